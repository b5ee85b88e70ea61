"""Where one speculative cycle's time went, part by part.

The same type is filled by measuring the engine, by reading another engine's trace, or by predicting, so that any two
can be laid side by side. A cost is a flat tuple of parts, each of one phase: a source that knows more (a collective's
bytes, its skew, a launch gap) adds parts, or fields with defaults to `Part`; nothing that reads a cost has to change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Phase = Literal["draft", "verify", "accept", "commit", "host"]
Source = Literal["measured", "trace", "predicted"]
Kind = Literal["compute", "collective", "launch_gap", "host_sync", "host"]
"""What a slice of time is spent on.

compute: the device computes or copies. collective: it communicates and does nothing else (overlapped communication is
noted beside it). launch_gap: it idles until the host, or the graph, gives it the next kernel. host_sync: it idles
because the host had waited for a result before it gave out more work. host: the host works and no device waits for it
by name (an engine on a CPU is its own host).
"""

PHASES: tuple[Phase, ...] = ("draft", "verify", "accept", "commit", "host")
"""In the order in which a cycle goes through them."""

VERIFY_PARTS = ("embed", "attention", "mlp", "moe", "norm", "lm_head", "all_reduce", "rest")
"""The parts of the verify step, `rest` being what its inner spans do not cover. A trace knows kernels, not modules: it
has parts of its own (`gemm`, `sampling`, ...), which come after these."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")


@dataclass(frozen=True)
class Traffic:
    """What is known of a part that communicates; all its calls in one cycle together, microseconds, mean over ranks.

    A call lasts from its own rank's start to its end: the wire time, which is the shortest of all ranks', and the skew,
    which is waiting for a rank that came later. Part of that may pass while the device computes something else:

        wire_us + skew_us == exposed + overlapped_us     where exposed is the `us` of the part
    """

    bytes: int | None = None
    """What one rank contributes to one call; None where the source does not say."""
    wire_us: float | None = None
    """None where it cannot be told apart from the skew, as in the trace of a single rank."""
    skew_us: float | None = None
    overlapped_us: float = 0.0
    by: str = ""
    """What carried it, as far as it is known: `NCCL Ring LL`, `vLLM one-shot`, `gloo`."""


@dataclass(frozen=True)
class Part:
    """One slice of a cycle's time, in microseconds, without what other slices already count."""

    phase: Phase
    name: str
    """Of a collective: one of `COLLECTIVES`. Calls of different sizes are different parts of the same name."""
    us: float
    kind: Kind = "compute"
    count: float | None = None
    """Calls (spans, kernels, gaps, waits) a cycle, mean; None where nobody counted."""
    traffic: Traffic | None = None
    """Of collectives only."""


@dataclass(frozen=True)
class CycleCost:
    """The mean of some cycles. Times in microseconds a cycle, those of several ranks their mean."""

    parts: tuple[Part, ...]
    rows: float | None
    """Rows of the verify step, mean: 1 is plain decoding, 1 + N verifies N drafted tokens. None where a trace does not
    show them (the evidence says why)."""
    tokens: float | None
    """Committed tokens a cycle, mean. None where it is not known: a prediction's depends on the acceptance."""
    cycles: int
    """How many cycles this is the mean of; 0 for a prediction."""
    source: Source = "measured"
    wall_us: float | None = None
    """The clock's own microseconds a cycle around all parts; None where there was no clock."""
    ranks: int = 1
    """Tensor-parallel ranks that share the model."""
    evidence: tuple[str, ...] = ()
    """What the figures rest on and what is not known, a sentence each."""

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

    def kind_us(self, kind: Kind, phase: Phase | None = None) -> float:
        """Microseconds of one kind, in one phase or in all; of collectives that is what was exposed."""
        return sum(
            part.us for part in self.parts if part.kind == kind and (phase is None or part.phase == phase)
        )

    def collectives(self, phase: Phase | None = None) -> tuple[Part, ...]:
        """The parts that communicate, of one phase or of all."""
        return tuple(
            part
            for part in self.parts
            if part.kind == "collective" and (phase is None or part.phase == phase)
        )

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
        calls: Mapping[str, int] | None = None,
        traffic: Mapping[str, Traffic] | None = None,
        ranks: int = 1,
        evidence: Sequence[str] = (),
    ) -> CycleCost:
        """From the self times of recorded spans (`Spans.self_us()`) and the wall time, both of all cycles together.

        calls: how often each span was entered, all cycles together. traffic: by span, of one cycle.
        """
        if cycles < 1:
            raise ValueError("a cycle's cost needs at least one cycle")
        parts = []
        for name, us in self_us.items():
            phase, part = _place(name)
            kind: Kind = "collective" if name in COLLECTIVES else "host" if phase == "host" else "compute"
            count = calls[name] / cycles if calls and name in calls else None
            parts.append(Part(phase, part, us / cycles, kind, count, (traffic or {}).get(name)))
        wall = None if wall_us is None else wall_us / cycles
        return cls(
            ordered(parts),
            rows=rows,
            tokens=tokens,
            cycles=cycles,
            wall_us=wall,
            ranks=ranks,
            evidence=tuple(evidence),
        )

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values; `total_us` and `attributed` are there for the reader and ignored on the way back."""
        return asdict(self) | {"total_us": self.total_us, "attributed": self.attributed}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CycleCost:
        """The inverse of `to_json`; what older versions did not write has its default. ValueError for anything else."""
        try:
            parts = tuple(_part_from_json(part) for part in value["parts"])
            later = {name: value[name] for name in ("source", "wall_us", "ranks") if name in value}
            return cls(
                parts,
                rows=value["rows"],
                tokens=value["tokens"],
                cycles=value["cycles"],
                evidence=tuple(value.get("evidence", ())),
                **later,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the cost of a cycle: {type(error).__name__} {error}") from None


def ordered(parts: Iterable[Part]) -> tuple[Part, ...]:
    """The parts in the order of a cycle."""
    return tuple(sorted(parts, key=_order))


def _part_from_json(value: Mapping[str, Any]) -> Part:
    traffic = value.get("traffic")
    return Part(**{**value, "traffic": Traffic(**traffic) if traffic else None})


def _place(span: str) -> tuple[Phase, str]:
    """A span's phase and part. A name that no phase claims is the host's, under its own name: never dropped."""
    if span == "verify":
        return "verify", "rest"
    if span in VERIFY_PARTS or span in COLLECTIVES:
        return "verify", span
    for phase in PHASES:
        if span == phase:
            return phase, span
    return "host", span


_KINDS: tuple[Kind, ...] = ("compute", "collective", "launch_gap", "host_sync", "host")


def _order(part: Part) -> tuple[int, int, int]:
    """By phase; inside verify the parts that are known by name, then those of a trace; what waits comes last."""
    known = part.phase == "verify" and part.name in VERIFY_PARTS
    inner = VERIFY_PARTS.index(part.name) if known else len(VERIFY_PARTS)
    return PHASES.index(part.phase), inner, _KINDS.index(part.kind)
