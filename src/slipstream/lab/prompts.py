"""Prompt files: one JSON object a line, `{"kind": "chat", "prompt": "..."}`; or a .txt with one chat prompt a line."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError

KINDS = ("chat", "code", "summarise", "edit")
"""From the hardest to guess to the easiest: an edited text mostly stands in the prompt already."""

DEFAULT_FILE = Path(__file__).parent / "prompts" / "default.jsonl"


@dataclass(frozen=True)
class Prompt:
    """One user turn and the kind of work that it is."""

    kind: str
    prompt: str


def load_prompts(path: Path | None = None) -> list[Prompt]:
    """Every prompt of a file, in its order; the shipped set without a path. A bad line is an error that names it."""
    path = path or DEFAULT_FILE
    lines = _read_text(path).split("\n")  # not splitlines: JSON may hold U+2028 as it is
    parse = _parse_text if path.suffix == ".txt" else _parse_json
    prompts = [
        parse(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()
    ]
    if not prompts:
        raise SlipstreamError(
            f"{path} holds no prompt: write one JSON object a line, with a kind and a prompt"
        )
    return prompts


def count_by_kind(prompts: list[Prompt]) -> dict[str, int]:
    """How many prompts of each kind, in the order of `KINDS`."""
    counts = Counter(prompt.kind for prompt in prompts)
    return {kind: counts[kind] for kind in KINDS if counts[kind]}


def _read_text(path: Path) -> str:
    """The file as text; reading it by bytes first lets a wrong encoding be located by its line."""
    try:
        data = path.read_bytes()
    except IsADirectoryError:
        raise SlipstreamError(f"{path} is a folder; --prompts takes a file") from None
    except OSError as error:
        raise SlipstreamError(f"cannot read the prompt file {path}: {error.strerror}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise SlipstreamError(
            f"{path}, line {line}: not UTF-8 text (byte 0x{data[error.start]:02x})"
        ) from None


def _parse_text(line: str, where: str) -> Prompt:
    return Prompt(kind="chat", prompt=line.strip())


def _parse_json(line: str, where: str) -> Prompt:
    try:
        value: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise SlipstreamError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise SlipstreamError(f"{where}: not a prompt: nested too deeply") from None
    if not isinstance(value, dict):
        raise SlipstreamError(f"{where}: not a JSON object with a kind and a prompt")
    missing = [name for name in ("kind", "prompt") if name not in value]
    if missing:
        raise SlipstreamError(f"{where}: {' and '.join(missing)} missing")
    unknown = sorted(set(value) - {"kind", "prompt"})
    if unknown:
        raise SlipstreamError(f"{where}: unknown field {unknown[0]!r}; known are kind, prompt")
    if value["kind"] not in KINDS:
        raise SlipstreamError(f"{where}: unknown kind {value['kind']!r}; known are {', '.join(KINDS)}")
    if not isinstance(value["prompt"], str) or not value["prompt"].strip():
        raise SlipstreamError(f"{where}: the prompt must be a text that is not empty")
    if any("\ud800" <= letter <= "\udfff" for letter in value["prompt"]):
        raise SlipstreamError(f"{where}: the prompt holds half a surrogate pair, which is not text")
    return Prompt(kind=value["kind"], prompt=value["prompt"])
