"""Ranks of one job beside each other: which call on one rank is which on another, and what it cost the wire.

All ranks make the same collectives in the same order, graph replay or not, so calls are matched by their order within a
step. A rank that comes first waits inside its kernel for the others; the one that comes last waits for nobody. So the
shortest duration is the wire time, and what a rank needs beyond that is skew.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.lab.traces.steps import Cycle, Steps
from slipstream.lab.traces.timeline import Floats, Ints, Timeline
from slipstream.lab.traces.waits import classes_of, collectives_of


def check_together(timelines: Sequence[Timeline]) -> list[Timeline]:
    """The timelines in the order of their ranks. Raises SlipstreamError where they cannot be of one job."""
    if len(timelines) == 1:
        return list(timelines)
    sizes = {each.world_size for each in timelines if each.world_size is not None}
    if len(sizes) > 1:
        raise SlipstreamError(
            f"these traces do not belong together: their jobs have {' and '.join(map(str, sorted(sizes)))} ranks"
        )
    ranks = [each.rank for each in timelines]
    known = [rank for rank in ranks if rank is not None]
    for rank in known:
        if known.count(rank) > 1:
            first, second = [each.source for each in timelines if each.rank == rank][:2]
            raise SlipstreamError(
                f"these traces do not belong together: {first} and {second} are both rank {rank}"
            )
    if len(known) == len(ranks):
        return sorted(timelines, key=lambda each: each.rank or 0)
    return list(timelines)


def align(timelines: Sequence[Timeline], found: Sequence[Steps]) -> list[list[Cycle]]:
    """The cycles that all ranks have: for each its copies, one a rank. Raises SlipstreamError where they differ."""
    if len(found) == 1:
        return [[cycle] for cycle in found[0].cycles]
    found = [Steps(each.steps, [cycle for cycle in each.cycles if cycle.is_complete]) for each in found]
    if not all(steps.cycles for steps in found):
        raise SlipstreamError("no cycle is whole on every rank; trace a few more steps")
    offsets = [_offset(timelines, found, index) for index in range(len(found))]
    first = max(offsets)
    count = min(len(steps.cycles) + offset for steps, offset in zip(found, offsets, strict=True)) - first
    if count < 1:
        raise SlipstreamError("these traces do not belong together: no cycle of one overlaps one of another")
    result = [
        [steps.cycles[first + index - offset] for steps, offset in zip(found, offsets, strict=True)]
        for index in range(count)
    ]
    return _same(timelines, result)


def wire_times(timelines: Sequence[Timeline], copies: Sequence[Cycle]) -> list[tuple[int, Ints, Floats]]:
    """By rank: a cycle's collectives in order, and the wire time of each, the shortest duration of all ranks."""
    calls = [_collectives(timeline, cycle) for timeline, cycle in zip(timelines, copies, strict=True)]
    lasted = [
        timeline.gpu.end[each] - timeline.gpu.start[each]
        for timeline, each in zip(timelines, calls, strict=True)
    ]
    shortest = np.minimum.reduce(lasted)
    return [(rank, each, shortest) for rank, each in enumerate(calls)]


def _collectives(timeline: Timeline, cycle: Cycle) -> Ints:
    own = np.sort(np.concatenate([np.concatenate([step.kernels, step.tail]) for step in cycle.steps]))
    result: Ints = own[collectives_of(timeline)[own]]
    return result


def _offset(timelines: Sequence[Timeline], found: Sequence[Steps], index: int) -> int:
    """By how many cycles a rank's trace begins later than the first rank's: 0 where both have as many."""
    mine, others = found[index].cycles, found[0].cycles
    if len(mine) == len(others):
        return 0
    at = np.array([cycle.start for cycle in mine]) + (timelines[index].epoch_us - timelines[0].epoch_us)
    reference = np.array([cycle.start for cycle in others])
    best: tuple[float, int] = (np.inf, 0)
    for offset in range(1 - len(mine), len(others)):
        low, high = max(0, offset), min(len(others), len(mine) + offset)
        apart = float(np.median(np.abs(at[low - offset : high - offset] - reference[low:high])))
        best = min(best, (apart, offset))
    return best[1]


def _same(timelines: Sequence[Timeline], cycles: Sequence[list[Cycle]]) -> list[list[Cycle]]:
    """The cycles in which all ranks make the same collectives; an error where that is less than half of them."""
    kinds = [classes_of(timeline) for timeline in timelines]
    same, different = [], ""
    for copies in cycles:
        made = [
            [
                kinds[rank][timelines[rank].gpu.name[event]].name
                for event in _collectives(timelines[rank], cycle)
            ]
            for rank, cycle in enumerate(copies)
        ]
        other = next((rank for rank, each in enumerate(made) if each != made[0]), None)
        if other is None:
            same.append(copies)
        else:
            different = (
                f"in the same step {timelines[0].source} makes {len(made[0])} collectives and "
                f"{timelines[other].source} {len(made[other])}"
                + (" other ones" if len(made[other]) == len(made[0]) else "")
            )
    if 2 * len(same) < len(cycles):
        raise SlipstreamError(f"these traces do not belong together: {different}")
    return same
