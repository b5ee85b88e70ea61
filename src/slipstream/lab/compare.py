"""Two costs of a cycle side by side, wherever they come from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.lab.cycle_cost import PHASES, CycleCost, Kind
from slipstream.lab.traces import read_traces

KINDS: dict[Kind, str] = {
    "compute": "computing",
    "collective": "communicating, not hidden",
    "launch_gap": "device idle, next kernel not launched",
    "host_sync": "device idle, host had waited",
    "host": "host",
}
_PREFERRED = ("cycle", "speculative_cycle", "speculative")


@dataclass(frozen=True)
class Difference:
    """One line. None where a side has no such part."""

    name: str
    a_us: float | None
    b_us: float | None

    @property
    def more_us(self) -> float:
        """What B takes more than A."""
        return (self.b_us or 0.0) - (self.a_us or 0.0)


@dataclass(frozen=True)
class Comparison:
    """Everything about A and B, in the order of a cycle."""

    phases: list[Difference]
    parts: list[Difference]
    kinds: list[Difference]
    traffic: list[Difference]
    """Wire time, waiting for slower ranks, and communication hidden behind computing."""
    total: Difference
    wall: Difference

    def biggest(self, most: int = 3) -> list[Difference]:
        """The parts that differ most."""
        ranked = sorted((part for part in self.parts if part.more_us), key=lambda part: -abs(part.more_us))
        return ranked[:most]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""

        def lines(every: list[Difference]) -> list[dict[str, Any]]:
            return [
                {"name": each.name, "a_us": each.a_us, "b_us": each.b_us, "more_us": each.more_us}
                for each in every
            ]

        return {
            "phases": lines(self.phases),
            "parts": lines(self.parts),
            "kinds": lines(self.kinds),
            "traffic": lines(self.traffic),
            "total": lines([self.total])[0],
            "wall": lines([self.wall])[0],
        }


def compare(a: CycleCost, b: CycleCost) -> Comparison:
    """B against A, part by part. Parts that only one of them has stay, with nothing on the other side."""
    left, right = a.by_part(), b.by_part()
    names = [*left, *(name for name in right if name not in left)]
    order: list[str] = [*PHASES]
    names.sort(key=lambda name: order.index(name.split(".")[0]))
    present = {part.phase for part in (*a.parts, *b.parts)}
    kinds = {part.kind for part in (*a.parts, *b.parts)}
    return Comparison(
        phases=[
            Difference(phase, a.phase_us(phase), b.phase_us(phase)) for phase in PHASES if phase in present
        ],
        parts=[Difference(name, left.get(name), right.get(name)) for name in names],
        kinds=[
            Difference(text, a.kind_us(kind), b.kind_us(kind))
            for kind, text in KINDS.items()
            if kind in kinds
        ],
        traffic=_traffic(a, b) if a.collectives() or b.collectives() else [],
        total=Difference("all parts", a.total_us, b.total_us),
        wall=Difference("by the clock", a.wall_us, b.wall_us),
    )


def _traffic(a: CycleCost, b: CycleCost) -> list[Difference]:
    def total(cost: CycleCost, field: str) -> float | None:
        values: list[float | None] = [
            getattr(part.traffic, field) if part.traffic else None for part in cost.collectives()
        ]
        known = [value for value in values if value is not None]
        return sum(known) if len(known) == len(values) else None

    names = {
        "wire_us": "on the wire",
        "skew_us": "waiting for slower ranks",
        "overlapped_us": "hidden behind computing",
    }
    return [Difference(text, total(a, field), total(b, field)) for field, text in names.items()]


def load_costs(path: Path) -> dict[str, CycleCost]:
    """The costs in a file, by name: a trace, or JSON that trace, profile, diagnose or predict wrote.

    The first one stands for the file. Raises SlipstreamError where there is none.
    """
    value = _json(path)
    if value is None or "traceEvents" in value:
        return read_traces([path]).costs
    found: dict[str, CycleCost] = {}
    for name, each in {"": value, **value}.items():
        inside = each if isinstance(each, Mapping) else {}
        for inner, candidate in {name: each, **inside}.items():
            if isinstance(candidate, Mapping) and "parts" in candidate and "cycles" in candidate:
                try:
                    found.setdefault(inner, CycleCost.from_json(candidate))
                except ValueError as error:
                    raise SlipstreamError(f"{path}: {error}") from None
    if not found:
        raise SlipstreamError(
            f"{path} holds no cost of a cycle; give what trace, profile or diagnose wrote with --json"
        )
    first = next((name for name in _PREFERRED if name in found), next(iter(found)))
    return {first: found[first], **found}


def _json(path: Path) -> dict[str, Any] | None:
    """The file as a JSON object, if it is a small one; None where it must be a trace or nothing."""
    try:
        if path.stat().st_size > 32 << 20:
            return None
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SlipstreamError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
