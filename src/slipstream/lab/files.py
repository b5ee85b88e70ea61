"""Costs of cycles in files that slipstream wrote; and writing text without losing what was there."""

from __future__ import annotations

import json
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.lab.cycle_cost import CycleCost


def read_costs(path: Path) -> tuple[CycleCost | None, CycleCost | None]:
    """The plain and the speculative cycle in a file: a diagnosis has both, the cost of a cycle is one of them by its
    rows. Raises SlipstreamError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SlipstreamError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise SlipstreamError(f"{path} is not JSON: give a diagnosis.json or the cost of a cycle") from None
    if not isinstance(value, dict):
        raise SlipstreamError(f"{path} holds neither a diagnosis nor the cost of a cycle")
    try:
        if "plain_cycle" in value:
            plain, fast = value["plain_cycle"], value.get("speculative_cycle")
            return CycleCost.from_json(plain) if plain else None, CycleCost.from_json(fast) if fast else None
        cost = CycleCost.from_json(value)
    except ValueError as error:
        raise SlipstreamError(f"{path}: {error}") from None
    return (cost, None) if cost.rows is not None and cost.rows <= 1 else (None, cost)


def write_text(path: Path, text: str) -> bool:
    """Writes a file; whether there was one before. Raises SlipstreamError."""
    existed = path.exists()
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SlipstreamError(f"cannot write {path}: {error.strerror}") from None
    return existed
