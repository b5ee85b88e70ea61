"""Where one speculative cycle's time went, part by part.

The same type is filled by measuring the engine, by reading another engine's trace, or by predicting, so that any two
can be laid side by side. A cost is a flat tuple of parts, each of one phase: a source that knows more (a collective's
bytes, its skew, a launch gap) adds parts, or fields with defaults to `Part`; nothing that reads a cost has to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Phase = Literal["draft", "verify", "accept", "commit", "host"]
Source = Literal["measured", "trace", "predicted"]

PHASES: tuple[Phase, ...] = ("draft", "verify", "accept", "commit", "host")
"""In the order in which a cycle goes through them."""

VERIFY_PARTS = ("embed", "attention", "mlp", "moe", "norm", "lm_head", "all_reduce", "rest")
"""The parts of the verify step, `rest` being what its inner spans do not cover."""


@dataclass(frozen=True)
class Part:
    """One slice of a cycle's time, in microseconds, without what other slices already count."""

    phase: Phase
    name: str
    us: float


@dataclass(frozen=True)
class CycleCost:
    """The mean of some cycles. Times in microseconds a cycle."""

    parts: tuple[Part, ...]
    rows: float
    """Rows of the verify step, mean: 1 is plain decoding, 1 + N verifies N drafted tokens."""
    tokens: float
    """Committed tokens a cycle, mean."""
    cycles: int
    """How many cycles this is the mean of; 0 for a prediction."""
    source: Source = "measured"
    wall_us: float | None = None
    """The clock's own microseconds a cycle around all parts; None where there was no clock."""

    @property
    def total_us(self) -> float:
        """The sum of the parts."""
        return sum(part.us for part in self.parts)

    @property
    def attributed(self) -> float | None:
        """The share of the wall time that the parts explain; about 1, or the spans miss something."""
        return self.total_us / self.wall_us if self.wall_us else None

    def phase_us(self, phase: Phase) -> float:
        """Microseconds of one phase."""
        return sum(part.us for part in self.parts if part.phase == phase)

    def by_part(self) -> dict[str, float]:
        """Microseconds by `phase` or, inside verify, by `verify.part`, in the order of a cycle."""
        result: dict[str, float] = {}
        for part in self.parts:
            key = part.phase if part.name == part.phase else f"{part.phase}.{part.name}"
            result[key] = result.get(key, 0.0) + part.us
        return result

    @classmethod
    def from_spans(
        cls,
        self_us: Mapping[str, float],
        *,
        cycles: int,
        rows: float,
        tokens: float,
        wall_us: float | None = None,
    ) -> CycleCost:
        """From the self times of recorded spans (`Spans.self_us()`) and the wall time, both of all cycles together."""
        if cycles < 1:
            raise ValueError("a cycle's cost needs at least one cycle")
        parts = [Part(*_place(name), us / cycles) for name, us in self_us.items()]
        parts.sort(key=_order)
        wall = None if wall_us is None else wall_us / cycles
        return cls(tuple(parts), rows=rows, tokens=tokens, cycles=cycles, wall_us=wall)

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values; `total_us` and `attributed` are there for the reader and ignored on the way back."""
        return asdict(self) | {"total_us": self.total_us, "attributed": self.attributed}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CycleCost:
        """The inverse of `to_json`."""
        fields = {name: value[name] for name in ("rows", "tokens", "cycles", "source", "wall_us")}
        return cls(parts=tuple(Part(**part) for part in value["parts"]), **fields)


def _place(span: str) -> tuple[Phase, str]:
    """A span's phase and part. A name that no phase claims is the host's, under its own name: never dropped."""
    if span == "verify":
        return "verify", "rest"
    if span in VERIFY_PARTS:
        return "verify", span
    for phase in PHASES:
        if span == phase:
            return phase, span
    return "host", span


def _order(part: Part) -> tuple[int, int]:
    inner = VERIFY_PARTS.index(part.name) if part.phase == "verify" else 0
    return PHASES.index(part.phase), inner
