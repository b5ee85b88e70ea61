"""How a stretch of a GPU's time was spent: each microsecond once. Computing hides communication, nothing hides waiting.

A gap is the host's when the launch of the kernel that ended it had not returned when the GPU ran dry; otherwise the
kernel had been queued and the gap is the device's own (the next node of a graph, a dependency between streams). A gap
of the host follows a wait when the launching thread was waiting for the GPU at the moment the GPU ran dry: so it could
not launch ahead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from slipstream.lab.traces.kernels import KernelClass, classify
from slipstream.lab.traces.timeline import NO_CALL, Bools, Floats, Ints, Timeline

GapKind = Literal["between_kernels", "launch", "host_sync"]

_BLOCKING = re.compile(
    r"(?:Stream|Event|Device|Ctx)Synchronize|^(?:cuda|hip)Memcpy$|^hipMemcpyWithStream$|MemcpyDtoH"
)
_MAY_BLOCK = re.compile(r"Memcpy")


@dataclass
class Usage:
    """By GPU event and by gap. Times in microseconds."""

    exposed: Floats
    """By GPU event: its time that no earlier or more important event covers; computing comes before communicating."""
    gap_start: Floats
    gap_end: Floats
    gap_next: Ints
    """By gap: the GPU event that ended it."""
    gap_kind: list[GapKind]
    gap_call: Ints
    """By gap that follows a wait: the call that waited; `NO_CALL` otherwise."""
    waits: Ints
    """The calls that waited for the GPU."""


def use_of(timeline: Timeline) -> Usage:
    """All of a timeline."""
    gpu = timeline.gpu
    is_collective = collectives_of(timeline)
    exposed = np.zeros(len(gpu))
    computing = np.flatnonzero(~is_collective)
    exposed[computing] = _fresh(gpu.start[computing], gpu.end[computing])
    talking = np.flatnonzero(is_collective)
    if len(talking):
        begin = np.maximum(gpu.start[talking], _before(gpu.end[talking]))
        end = np.maximum(gpu.end[talking], begin)
        busy = _Covered(gpu.start[computing], gpu.end[computing])
        exposed[talking] = (end - begin) - (busy.until(end) - busy.until(begin))
    latest = np.maximum.accumulate(gpu.end)
    ends = np.flatnonzero(gpu.start[1:] > latest[:-1]) + 1
    start, end = latest[ends - 1], gpu.start[ends]
    waits = blocking_calls(timeline)
    kinds, calls = _why(timeline, waits, start, end, ends)
    return Usage(exposed, start, end, ends, kinds, calls, waits)


def classes_of(timeline: Timeline) -> list[KernelClass]:
    """The class of each name; a `Generic` NCCL kernel's kind may stand in its message instead."""
    return [classify(name) for name in timeline.names]


def collectives_of(timeline: Timeline) -> Bools:
    """Which GPU events communicate."""
    talks = np.array([each.is_collective for each in classes_of(timeline)] or [False])
    result: Bools = talks[timeline.gpu.name]
    return result


def blocking_calls(timeline: Timeline) -> Ints:
    """The calls that waited for the GPU: synchronisations, and copies to the host that returned only when done."""
    calls = timeline.calls
    waits = np.array([bool(_BLOCKING.search(name)) for name in timeline.names] or [False])
    copies = np.array([bool(_MAY_BLOCK.search(name)) for name in timeline.names] or [False])
    to_host = np.array(["DtoH" in name or "Device -> Host" in name for name in timeline.names] or [False])
    result = waits[calls.name] if len(calls) else np.zeros(0, dtype=bool)
    events = np.flatnonzero(to_host[timeline.gpu.name] & (timeline.call != NO_CALL))
    by = timeline.call[events]
    done = (
        copies[calls.name[by]] & (calls.end[by] >= timeline.gpu.end[events]) if len(by) else by.astype(bool)
    )
    result[by[done]] = True
    return np.flatnonzero(result)


def _fresh(start: Floats, end: Floats) -> Floats:
    """The part of each interval that lies after the end of all before it; `start` ascends."""
    return np.maximum(0.0, end - np.maximum(start, _before(end)))


def _before(end: Floats) -> Floats:
    """The latest end of all earlier intervals."""
    latest = np.maximum.accumulate(end)
    return np.concatenate([[-np.inf], latest[:-1]]) if len(end) else end


class _Covered:
    """The union of intervals, as the time it covers up to any moment."""

    def __init__(self, start: Floats, end: Floats) -> None:
        fresh = _fresh(start, end)
        keep = fresh > 0
        self._start = np.maximum(start, _before(end))[keep]
        self._length = fresh[keep]
        self._sum = np.concatenate([[0.0], np.cumsum(self._length)])

    def until(self, at: Floats) -> Floats:
        """Covered time before each moment."""
        index = np.searchsorted(self._start, at, side="right")
        last = np.maximum(index - 1, 0)
        if not len(self._start):
            return np.zeros(len(at))
        inside = np.minimum(at - self._start[last], self._length[last])
        result: Floats = np.where(index > 0, self._sum[last] + inside, 0.0)
        return result


def _why(
    timeline: Timeline, waits: Ints, start: Floats, end: Floats, following: Ints
) -> tuple[list[GapKind], Ints]:
    calls, by = timeline.calls, timeline.call[following]
    kinds: list[GapKind] = []
    causes = np.full(len(following), NO_CALL, dtype=np.int64)
    threads = {int(thread): waits[calls.thread[waits] == thread] for thread in np.unique(calls.thread[waits])}
    same = timeline.gpu.correlation[following] == timeline.gpu.correlation[following - 1]
    for index, call in enumerate(by):
        if call == NO_CALL or (same[index] and timeline.gpu.correlation[following[index]] >= 0):
            kinds.append("between_kernels")
            continue
        if calls.end[call] <= start[index]:
            kinds.append("between_kernels")
            continue
        mine = threads.get(int(calls.thread[call]))
        cause = NO_CALL
        if mine is not None:
            at = int(np.searchsorted(calls.start[mine], start[index], side="right")) - 1
            if at >= 0 and calls.end[mine[at]] > start[index]:
                cause = int(mine[at])
            elif call in mine and calls.end[call] - calls.start[call] > 0.5 * (end[index] - start[index]):
                cause = int(call)  # it waited for work that the trace does not show
        causes[index] = cause
        kinds.append("host_sync" if cause != NO_CALL else "launch")
    return kinds, causes
