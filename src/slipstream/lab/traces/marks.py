"""What an annotation says: the phase of a step, and its rows where it tells them.

SGLang writes `step[TARGET_VERIFY bs=1]`, `draft`, `draft_extend`; vLLM `execute_context_1(1024)_generation_2(16)`: one
request with 1,024 tokens of its prompt, two that decode with 16 rows together; slipstream and others `draft`, `verify`,
...; torch's profiler `ProfilerStep#3`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

StepPhase = Literal["draft", "verify", "decode", "accept", "extend", "prefill", "step"]
"""`extend` refreshes the drafter with the accepted rows. `step` is a repeated step of an unknown kind."""

MAIN: tuple[StepPhase, ...] = ("verify", "decode", "prefill", "step")
"""Phases in which the target model runs: one of them in each cycle."""


@dataclass(frozen=True)
class Meaning:
    """Of an annotation that names a phase."""

    phase: StepPhase
    rows: int | None = None
    requests: int | None = None


_SGLANG = re.compile(r"step\[(?P<mode>\w+) bs=(?P<requests>\d+)(?: toks=(?P<tokens>\d+))?")
_VLLM = re.compile(
    r"execute_(?:\d+_)?context_(?P<c>\d+)\((?P<cs>[^)]*)\)_generation_(?P<g>\d+)\((?P<gs>[^)]*)\)"
)
_SG_MODES: dict[str, StepPhase] = {
    "EXTEND": "prefill",
    "MIXED": "prefill",
    "SPLIT_PREFILL": "prefill",
    "DECODE": "decode",
    "TARGET_VERIFY": "verify",
    "DRAFT_EXTEND": "extend",
    "DRAFT_EXTEND_V2": "extend",
}
_PLAIN: dict[str, StepPhase] = {
    "draft": "draft",
    "draft_extend": "extend",
    "verify": "verify",
    "decode": "decode",
    "prefill": "prefill",
    "accept": "accept",
    "commit": "extend",
    "gpu_model_runner: draft": "draft",
    "gpu_model_runner: sample": "accept",
}


@lru_cache(maxsize=65536)
def meaning(annotation: str) -> Meaning | None:
    """What an annotation says of the phase, if anything."""
    found = _SGLANG.search(annotation)
    if found:
        phase = _SG_MODES.get(found["mode"])
        requests, tokens = int(found["requests"]), found["tokens"]
        rows = int(tokens) if tokens else requests if phase == "decode" else None
        return Meaning(phase, rows, requests) if phase else None
    found = _VLLM.search(annotation)
    if found:
        return _vllm(found)
    if annotation in _PLAIN:
        return Meaning(_PLAIN[annotation])
    if annotation.startswith("ProfilerStep#"):
        return Meaning("step")
    return None


def _vllm(found: re.Match[str]) -> Meaning | None:
    contexts, requests = int(found["c"]), int(found["g"])
    context_rows, rows = (_tokens(found[name]) for name in ("cs", "gs"))
    if contexts:
        total = None if context_rows is None else context_rows + (rows or 0)
        return Meaning("prefill", total, contexts + requests)
    if not requests:
        return None  # an empty step: nothing was scheduled
    return Meaning("verify" if rows is not None and rows > requests else "decode", rows, requests)


def _tokens(text: str) -> int | None:
    """`8`, or `sq32sk32785sqsq32sqsk32785`: the sum of the queries' lengths."""
    found = re.match(r"(\d+)$|sq(\d+)sk", text)
    return int(found.group(1) or found.group(2)) if found else None
