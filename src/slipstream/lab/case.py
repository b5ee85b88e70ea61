"""A model on a machine, plain and speculative: what optimisations are judged on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from slipstream.lab.break_even import DraftShape, best_tree, chain
from slipstream.lab.cycle_cost import CycleCost, Part, Traffic
from slipstream.lab.predict import Settings, Shares, predict
from slipstream.machine.machine import Machine
from slipstream.target.shape import ModelShape


@dataclass(frozen=True)
class Corrections:
    """Seen over predicted, of what was seen: how far a prediction of something similar is moved."""

    compute: float = 1.0
    collective: float = 1.0
    draft: float = 1.0
    by: str | None = None
    """What carried the collectives that were seen: another backend is not moved by them."""

    def of(self, part: Part) -> float:
        """For one part."""
        if part.phase == "draft":
            return self.draft
        if part.phase != "verify":
            return 1.0
        if part.traffic is not None and self.by is not None and part.traffic.by != self.by:
            return 1.0
        return {"compute": self.compute, "collective": self.collective}.get(part.kind, 1.0)

    def apply(self, cost: CycleCost) -> CycleCost:
        """Every part moved."""
        return replace(cost, parts=tuple(_scaled(part, self.of(part)) for part in cost.parts))


@dataclass(frozen=True)
class Case:
    """What runs, how, and how well its drafts do."""

    name: str
    machine: Machine
    model: str
    shape: ModelShape
    plain: Settings
    fast: Settings
    """Of the speculative cycle."""
    acceptance: float
    """The chance that a drafted token is accepted, given that all before it were."""
    acceptance_is_known: bool = False
    """False where it is assumed."""
    shares: Shares = field(default_factory=Shares)
    plain_corrections: Corrections = field(default_factory=Corrections)
    fast_corrections: Corrections = field(default_factory=Corrections)
    adaptive: bool = False
    """The draft's size follows the acceptance and the costs; without speculation where that is faster."""

    @property
    def draft_shape(self) -> DraftShape:
        """A chain, or the best tree of so many nodes."""
        drafted, depth = self.fast.drafted, self.fast.depth
        return chain(drafted) if depth >= drafted else best_tree(drafted, depth)

    @cached_property
    def plain_cost(self) -> CycleCost:
        """Of a token of plain decoding (of each request of the batch)."""
        return self.plain_corrections.apply(predict(self.machine, self.shape, self.plain, self.shares))

    @cached_property
    def fast_cost(self) -> CycleCost:
        """Of a speculative cycle, its expected tokens in it."""
        cost = self.fast_corrections.apply(predict(self.machine, self.shape, self.fast, self.shares))
        return replace(cost, tokens=self.tokens * self.fast.batch)

    @property
    def tokens(self) -> float:
        """Expected tokens a cycle of one request."""
        return self.draft_shape.tokens(self.acceptance)

    @property
    def plain_speed(self) -> float:
        """Tokens a second of all requests."""
        return self.plain.batch / self.plain_cost.total_us * 1e6

    @property
    def fast_speed(self) -> float:
        """Tokens a second of all requests with speculation; that of plain decoding where an adaptive engine stops."""
        speed = self.fast.batch * self.tokens / self.fast_cost.total_us * 1e6
        return max(speed, self.plain_speed) if self.adaptive else speed

    @property
    def best_speed(self) -> float:
        """Of the better of both."""
        return max(self.plain_speed, self.fast_speed)

    @property
    def tokens_needed(self) -> float:
        """Tokens a cycle at which speculation breaks even."""
        return self.fast_cost.total_us / self.plain_cost.total_us

    @property
    def acceptance_needed(self) -> float | None:
        """The chance of acceptance that it takes; None where none is enough."""
        return self.draft_shape.needed(self.tokens_needed)

    def both(self, **changes: object) -> Case:
        """The same with these settings changed in plain decoding and in the speculative cycle."""
        return replace(
            self,
            plain=replace(self.plain, **changes),  # type: ignore[arg-type]
            fast=replace(self.fast, **changes),  # type: ignore[arg-type]
        )

    def speculative(self, **changes: object) -> Case:
        """The same with these settings of the speculative cycle changed."""
        return replace(self, fast=replace(self.fast, **changes))  # type: ignore[arg-type]

    def seen(self, plain: CycleCost | None, fast: CycleCost | None) -> Case:
        """The same, its predictions moved to what was measured or read from a trace."""
        case = self
        if plain is not None:
            case = replace(case, plain=_settings_seen(case.plain, plain))
            case = replace(case, plain_corrections=_corrections(case.plain_cost, plain))
        if fast is not None:
            case = replace(case, fast=_settings_seen(case.fast, fast))
            case = replace(case, fast_corrections=_corrections(case.fast_cost, fast))
        return case


def _settings_seen(settings: Settings, seen: CycleCost) -> Settings:
    """What no roofline predicts is taken as it was seen: the host, its waits, idle time between launches."""
    host_us = seen.kind_us("host") + seen.kind_us("host_sync")
    gap_us = 0.0 if settings.captured else seen.kind_us("launch_gap", "verify")
    return replace(settings, host_us=host_us, gap_us=gap_us)


def _corrections(predicted: CycleCost, seen: CycleCost) -> Corrections:
    def ratio(seen_us: float, predicted_us: float) -> float:
        return seen_us / predicted_us if seen_us and predicted_us else 1.0

    return Corrections(
        compute=ratio(seen.kind_us("compute", "verify"), predicted.kind_us("compute", "verify")),
        collective=ratio(seen.kind_us("collective", "verify"), predicted.kind_us("collective", "verify")),
        draft=ratio(seen.phase_us("draft"), predicted.phase_us("draft")),
        by=next((part.traffic.by for part in predicted.collectives("verify") if part.traffic), None),
    )


def _scaled(part: Part, factor: float) -> Part:
    traffic = part.traffic
    if traffic is not None and traffic.wire_us is not None and traffic.skew_us is not None:
        traffic = Traffic(
            traffic.bytes,
            traffic.wire_us * factor,
            traffic.skew_us * factor,
            traffic.overlapped_us,
            traffic.by,
        )
    return replace(part, us=part.us * factor, traffic=traffic)
