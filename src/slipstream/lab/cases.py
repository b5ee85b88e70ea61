"""From options to a case; and the reference case."""

from __future__ import annotations

from dataclasses import replace

from slipstream.errors import RequestError
from slipstream.lab.case import Case, Corrections
from slipstream.lab.predict import Draft, Settings, Shares
from slipstream.machine.machine import Machine
from slipstream.target.named import find_config
from slipstream.target.shape import WeightBytes

ASSUMED_ACCEPTANCE = 0.6
FORMAT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0625, "int4": 0.5625}
"""Of a weight, the scales of the blocks included."""

PLAIN_MS, VERIFY_MS, DRAFT_MS, ACCEPTANCE, DRAFTED = 12.2, 30.0, 3.4, 0.38, 3
"""The reference case as its people saw it; the drafting follows from the acceptance that they said is needed, 0.75."""
NCCL_MS, ALL_REDUCES = 25.0, 122
REFERENCE_CONTEXT = 4096
"""Not on record."""


def make_case(
    machine: Machine,
    model: str,
    *,
    rows: int = 4,
    depth: int | None = None,
    context: int = 1024,
    batch: int = 1,
    tp: int = 1,
    backend: str | None = None,
    setting: str | None = None,
    eager_verify: bool = False,
    draft: Draft = "eagle3",
    draft_ms: float | None = None,
    acceptance: float | None = None,
    dtype: str = "bfloat16",
    weights: str | None = None,
    threads: int | None = None,
    shares: Shares | None = None,
) -> Case:
    """A case from what a command is told. Raises SlipstreamError.

    rows: of one request's verify step, the drafted tokens and one more. depth: of the draft, where it is a tree.
    eager_verify: only plain decoding runs in a CUDA graph. weights: a format of `FORMAT_BYTES`; None is as the
    checkpoint stores them.
    """
    config = find_config(model)
    if rows < 1:
        raise RequestError(f"--rows is {rows}; plain decoding has 1")
    if tp > max(len(machine.devices), 1) and machine.has_gpus:
        raise RequestError(f"--tp is {tp}; {machine.name} has {len(machine.devices)} GPUs")
    stored = config.weight_bytes(FORMAT_BYTES[dtype]) if weights is None else _uniform(weights)
    plain = Settings(
        weights=stored,
        batch=batch,
        context=context,
        dtype=dtype,
        tp=tp,
        backend=backend or ("nccl" if machine.has_gpus else "gloo"),
        setting=setting,
        captured=machine.has_gpus,
        threads=threads,
    )
    fast = replace(plain, drafted=rows - 1, depth=min(depth or rows - 1, rows - 1), draft=draft)
    known = acceptance is not None
    chance = acceptance if acceptance is not None else ASSUMED_ACCEPTANCE
    case = Case(machine.name, machine, model, config.shape, plain, fast, chance, known, shares or Shares())
    if draft_ms is not None:
        predicted_us = case.fast_cost.phase_us("draft")
        if predicted_us:
            case = replace(case, fast_corrections=Corrections(draft=draft_ms * 1e3 / predicted_us))
    return _eager(case) if eager_verify and machine.has_gpus else case


def reference_case(rows: int = DRAFTED + 1) -> Case:
    """Kimi-K2.5 on 8 RTX PRO 6000 over PCIe: plain decoding in a graph, the verify step launched kernel by kernel."""
    return make_case(
        Machine.load("8x-rtx-pro-6000-pcie5"),
        "kimi-k2.5",
        rows=rows,
        context=REFERENCE_CONTEXT,
        tp=8,
        eager_verify=True,
        draft_ms=DRAFT_MS,
        acceptance=ACCEPTANCE,
    )


def _eager(case: Case) -> Case:
    """The speculative cycle launched one by one. How long it waits for slow ranks stays, whoever sends the messages."""
    eager = case.speculative(captured=False)
    waits = [
        part.traffic.skew_us / part.count
        for part in eager.fast_cost.collectives("verify")
        if part.name == "all_reduce" and part.traffic and part.traffic.skew_us is not None and part.count
    ]
    return eager.speculative(skew_us=max(waits, default=None))


def _uniform(weights: str) -> WeightBytes:
    if weights not in FORMAT_BYTES:
        raise RequestError(f"unknown format of weights {weights!r}; known are {', '.join(FORMAT_BYTES)}")
    return WeightBytes.uniform(FORMAT_BYTES[weights])
