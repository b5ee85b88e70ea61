"""What follows from a diagnosis: speeds and their spread, the speed-up by kind, acceptance, break-even."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

from slipstream.lab.break_even import BreakEven, break_even_by_rows
from slipstream.lab.cycle_cost import CycleCost
from slipstream.lab.diagnosis import Diagnosis, PromptResult, Run
from slipstream.lab.prompts import KINDS

RESAMPLES = 2000


@dataclass(frozen=True)
class Spread:
    """The middle and the quartiles of tokens a second over prompts."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Plain against speculative over some prompts."""

    prompts: int
    plain: Spread
    """Tokens a second."""
    speculative: Spread
    """Tokens a second."""
    speedup: float
    """Plain decoding time of all texts over the speculative time of the same texts."""
    low: float
    """The speed-up's 95 % interval, from drawing the prompts anew."""
    high: float
    tokens_per_cycle: float


@dataclass(frozen=True)
class Acceptance:
    """One position of the draft, counted from 1."""

    position: int
    tried: int
    conditional: float
    """The chance of being accepted once all before it were."""
    cumulative: float
    """The chance that the draft is accepted up to and including this position: the product of the conditional ones."""


@dataclass(frozen=True)
class Summary:
    """All derived figures; None and empty where too little was measured."""

    plain: Spread | None
    overall: Comparison | None
    by_kind: dict[str, Comparison]
    acceptance: list[Acceptance]
    verify_ratio: dict[int, float]
    """Cost of a verify step by its rows, relative to one row."""
    break_even: list[BreakEven]
    cycle_ratio: float | None
    """The mean speculative cycle over the mean plain cycle, timed runs: the tokens a cycle at which both are even."""

    def to_json(self) -> dict[str, Any]:
        """Plain values for the `summary` of the JSON file."""
        value = asdict(self)
        value["verify_ratio"] = {str(rows): ratio for rows, ratio in self.verify_ratio.items()}
        value["break_even"] = [entry.to_json() for entry in self.break_even]
        return value


def summarise(diagnosis: Diagnosis) -> Summary:
    """The derived figures of what was measured so far."""
    results = [result for result in diagnosis.results if result.speedup is not None]
    runs = [run for result in results if (run := result.speculative)]
    present = [kind for kind in KINDS if any(result.kind == kind for result in results)]
    plain = [result.plain.tokens_per_s for result in diagnosis.results if result.plain.tokens_per_s]
    step_us = diagnosis.step_us
    return Summary(
        plain=_spread(plain) if plain else None,
        overall=compare(results) if results else None,
        by_kind={kind: compare([result for result in results if result.kind == kind]) for kind in present},
        acceptance=acceptance(runs),
        verify_ratio={rows: us / step_us[1] for rows, us in sorted(step_us.items())} if 1 in step_us else {},
        break_even=_break_even(diagnosis),
        cycle_ratio=_cycle_s(runs) / _cycle_s([result.plain for result in results]) if results else None,
    )


def compare(results: Sequence[PromptResult]) -> Comparison:
    """Plain against speculative over these prompts, at least one, each with both runs."""
    pairs = [(result.plain, result.speculative) for result in results if result.speculative]
    times = [(plain.decode_s, fast.decode_s) for plain, fast in pairs]
    low, high = _interval(times)
    cycles = sum(fast.cycles for _, fast in pairs)
    return Comparison(
        prompts=len(pairs),
        plain=_spread([plain.tokens_per_s for plain, _ in pairs]),
        speculative=_spread([fast.tokens_per_s for _, fast in pairs]),
        speedup=_ratio(times),
        low=low,
        high=high,
        tokens_per_cycle=sum(fast.new_tokens for _, fast in pairs) / cycles if cycles else 0.0,
    )


def acceptance(runs: Sequence[Run]) -> list[Acceptance]:
    """By position, all runs together. Drafts differ in length, so cumulative is the product of the conditional ones."""
    result: list[Acceptance] = []
    cumulative = 1.0
    for position in range(max((len(run.tried) for run in runs), default=0)):
        tried = sum(run.tried[position] for run in runs if position < len(run.tried))
        accepted = sum(run.accepted[position] for run in runs if position < len(run.accepted))
        if not tried:
            break
        cumulative *= accepted / tried
        result.append(Acceptance(position + 1, tried, accepted / tried, cumulative))
    return result


def _break_even(diagnosis: Diagnosis) -> list[BreakEven]:
    if 1 not in diagnosis.step_us:
        return []
    return break_even_by_rows(
        diagnosis.step_us,
        speculative_overhead_us=_beside_step_us(diagnosis.speculative_cycle),
        plain_overhead_us=_beside_step_us(diagnosis.plain_cycle),
    )


def _beside_step_us(cost: CycleCost | None) -> float:
    """What the engine's step costs leave out: they hold verify, accept and commit already."""
    return cost.phase_us("draft") + cost.phase_us("host") if cost else 0.0


def _cycle_s(runs: Sequence[Run]) -> float:
    """Seconds of a mean cycle."""
    return sum(run.decode_s for run in runs) / max(1, sum(run.cycles for run in runs))


def _spread(values: Sequence[float]) -> Spread:
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Spread(low, median(values), high)


def _ratio(times: Sequence[tuple[float, float]]) -> float:
    return sum(plain for plain, _ in times) / sum(fast for _, fast in times)


def _interval(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Bootstrap over prompts, 2.5 % to 97.5 %; the seed is fixed, so that a report can be made again as it was."""
    draw = random.Random(0)
    ratios = sorted(_ratio(draw.choices(times, k=len(times))) for _ in range(RESAMPLES))
    return ratios[int(0.025 * RESAMPLES)], ratios[int(0.975 * RESAMPLES) - 1]
