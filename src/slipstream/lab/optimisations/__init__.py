"""Everything that may make speculation pay, one file each, and their ranking."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import log, sqrt

from slipstream.lab.case import Case
from slipstream.lab.optimisations.base import EFFORTS, Feasible, Optimisation


@cache
def every() -> dict[str, Optimisation]:
    """All of them by name: every module of this package that has an `OPTIMISATION`."""
    modules = (import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__))
    found = [module.OPTIMISATION for module in modules if hasattr(module, "OPTIMISATION")]
    return {each.name: each for each in found}


@dataclass(frozen=True)
class Ranked:
    """One optimisation in one case."""

    item: Optimisation
    feasible: Feasible
    after: Case | None
    """The case with it applied; None where it cannot work."""
    gain: float
    """How much faster both kinds of decoding become together: the geometric mean of the two ratios of speeds."""
    score: float
    """The gain's logarithm by effort."""


def rank(case: Case) -> list[Ranked]:
    """All of them: those that help, by gain and effort; then those without a predicted gain; then the impossible."""
    judged = [_judge(case, item) for item in every().values()]
    return sorted(judged, key=lambda one: (one.after is None, -one.score, one.item.name))


@dataclass(frozen=True)
class EndState:
    """What is left when everything that helps has been applied, in the order of the ranking."""

    case: Case
    applied: tuple[str, ...]


def end_state(case: Case, ranking: Sequence[Ranked], efforts: Sequence[str]) -> EndState:
    """Applies one after the other whatever still helps then; only of these efforts."""
    applied = []
    for one in ranking:
        if one.item.effort not in efforts or one.score <= 0:
            continue
        again = _judge(case, one.item)
        if again.after is not None and again.gain > NOTICEABLE:
            case = again.after
            applied.append(one.item.name)
    return EndState(case, tuple(applied))


NOTICEABLE = 1.005
"""A predicted gain below half a per cent is none."""


def gain_of(before: Case, after: Case) -> float:
    """Above 1 where both together are faster; a cheaper all-reduce speeds plain decoding as well."""
    return sqrt(after.plain_speed / before.plain_speed * after.fast_speed / before.fast_speed)


def _judge(case: Case, item: Optimisation) -> Ranked:
    feasible = item.feasible(case)
    if not feasible.possible:
        return Ranked(item, feasible, None, 1.0, 0.0)
    after = item.change(case)
    gain = gain_of(case, after)
    return Ranked(item, feasible, after, gain, log(gain) / EFFORTS[item.effort][0])
