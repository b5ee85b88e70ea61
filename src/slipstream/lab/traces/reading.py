"""Traces in, the cost of a cycle out: what `slipstream trace` knows of them, as numbers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.lab.cycle_cost import CycleCost, Kind, Part, Phase, Traffic, ordered
from slipstream.lab.traces import ranks as between
from slipstream.lab.traces.kernels import KernelClass
from slipstream.lab.traces.kineto import read_kineto
from slipstream.lab.traces.nsys import is_sqlite, read_nsys
from slipstream.lab.traces.steps import Cycle, Step, Steps, find_steps
from slipstream.lab.traces.timeline import NO_CALL, Bools, Floats, Ints, Timeline
from slipstream.lab.traces.waits import Usage, classes_of, use_of

SCHEMA = "slipstream.trace/1"
Progress = Callable[[str, int, int], None]

_PHASES: dict[str, Phase] = {
    "draft": "draft",
    "verify": "verify",
    "decode": "verify",
    "prefill": "verify",
    "step": "verify",
    "accept": "accept",
    "extend": "commit",
    "host": "host",
}


@dataclass
class StepKind:
    """Steps of one phase and number of rows. Medians over steps and ranks, microseconds a step.

    `total_us` is all that is charged to such a step: its kernels, each moment once, and the gaps before each of them.
    """

    phase: str
    rows: int | None
    why_rows: str
    steps: int
    total_us: float
    busy_us: float
    host_wait_us: float
    """The GPU was idle because the host had not launched the next kernel."""
    between_kernels_us: float
    kernels: float
    graph_kernels: float
    """Of them in graph replays."""
    graphs: float
    """Graph replays."""
    collectives: dict[str, float]
    """Count by kind."""
    collective_us: float
    """Their durations together, overlapped or not."""
    exposed_us: float
    wire_us: float | None
    """None with one rank: wire and skew cannot be told apart."""
    skew_us: float | None


@dataclass(frozen=True)
class HostWait:
    """A place in the host's code that waits for the GPU and so lets it run dry."""

    call: str
    where: str
    """The innermost line of the engine's own code, where the trace has Python frames."""
    a_cycle: float
    idle_us: float
    """Of the GPU a cycle, from running dry to the next kernel."""


@dataclass
class Reading:
    """What was found in some traces of one job."""

    sources: list[str]
    device: str
    ranks: int
    world_size: int | None
    kinds: list[StepKind]
    costs: dict[str, CycleCost]
    """By `verify 8 rows`; the one that stands for the job comes first."""
    waits: list[HostWait]
    launches: float
    """Kernels, copies and graphs that the host launches in a cycle of the first kind."""
    longest_wait_us: float
    """The longest that a call of the host waited for the GPU in such a cycle."""
    evidence: list[str] = field(default_factory=list)

    @property
    def cost(self) -> CycleCost:
        """The cost of the cycle that stands for the job."""
        return next(iter(self.costs.values()))

    def to_json(self) -> dict[str, Any]:
        """Plain values; `cycle` is a `CycleCost`."""
        return {
            "schema": SCHEMA,
            **asdict(self),
            "costs": {name: cost.to_json() for name, cost in self.costs.items()},
            "cycle": self.cost.to_json(),
        }


def read_traces(paths: Sequence[Path], progress: Progress = lambda what, done, total: None) -> Reading:
    """Everything about the traces of one job: files of one rank each, or one file. Raises SlipstreamError."""
    if len({path.resolve() for path in paths}) < len(paths):
        raise SlipstreamError("the same file was given twice; give one trace a rank")
    timelines: list[Timeline] = []
    for path in paths:
        timelines += _read_file(path, progress)
    timelines = between.check_together(timelines)
    progress("looking for steps", 0, 1)
    found = [find_steps(timeline) for timeline in timelines]
    for timeline, steps in zip(timelines, found, strict=True):
        if not steps.cycles:
            raise SlipstreamError(
                f"no step was found in {timeline.source}: it has {len(timeline.gpu)} GPU events, but neither "
                "annotations of steps nor kernels that repeat; trace at least 3 steps"
            )
    return _Job(timelines, found).reading()


def _read_file(path: Path, progress: Progress) -> list[Timeline]:
    if path.is_dir():
        raise SlipstreamError(f"{path} is a folder; give the trace files in it")
    try:
        if not path.stat().st_size:
            raise SlipstreamError(f"{path} is empty")
        read = read_nsys if is_sqlite(path) else read_kineto
        return read(path, lambda done, total: progress(f"reading {path.name}", done, total))
    except OSError as error:
        raise SlipstreamError(f"cannot read {path}: {error.strerror or error}") from None


@dataclass
class _Sums:
    """Of one part, or one collective size: over all cycles and ranks."""

    us: float = 0.0
    count: int = 0
    lasted: float = 0.0
    wire: float = 0.0


@dataclass(frozen=True)
class _Slot:
    """What a step's kernels and gaps are charged to: a phase, or the host between cycles."""

    phase: str
    kernels: Ints
    gaps: Ints


class _Rank:
    """A timeline with all that is known by GPU event."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.use: Usage = use_of(timeline)
        self.kinds: list[KernelClass] = classes_of(timeline)
        self.is_collective: Bools = np.array([kind.is_collective for kind in self.kinds] or [False])[
            timeline.gpu.name
        ]
        self.gap_of = np.full(len(timeline.gpu), -1, dtype=np.int64)
        self.gap_of[self.use.gap_next] = np.arange(len(self.use.gap_next))
        self.wire: Floats = np.full(len(timeline.gpu), np.nan)
        self.gap_us = self.use.gap_end - self.use.gap_start

    def gaps(self, kernels: Ints) -> Ints:
        """The gaps that these kernels ended."""
        found = self.gap_of[kernels]
        result: Ints = found[found >= 0]
        return result

    def kind(self, event: int) -> str:
        """The name of the part an event belongs to."""
        name: str = self.kinds[self.timeline.gpu.name[event]].name
        if name == "collective" and event in self.timeline.messages:
            return self.timeline.messages[event].kind
        return name


class _Job:
    """The ranks of a job."""

    def __init__(self, timelines: Sequence[Timeline], found: Sequence[Steps]) -> None:
        self.timelines, self.found = timelines, found
        self.ranks = [_Rank(timeline) for timeline in timelines]
        self.cycles = between.align(timelines, found)
        if len(timelines) > 1:
            for copies in self.cycles:
                for rank, calls, wire in between.wire_times(timelines, copies):
                    self.ranks[rank].wire[calls] = wire
        self.begins: list[Bools] = [np.zeros(len(timeline.gpu), dtype=bool) for timeline in timelines]
        """By rank and GPU event: it is the first of a cycle, so the gap before it is of no phase."""
        self.following: dict[int, Cycle] = {}
        """By the id of a cycle: the one after it."""
        for begins, steps in zip(self.begins, found, strict=True):
            begins[[_first(cycle) for cycle in steps.cycles]] = True
            self.following |= {id(cycle): after for cycle, after in pairwise(steps.cycles)}

    def reading(self) -> Reading:
        """All of it."""
        groups: dict[str, list[list[Cycle]]] = defaultdict(list)
        for copies in self.cycles:
            groups[_title(copies[0].main)].append(copies)
        order = sorted(groups, key=lambda name: _importance(groups[name]), reverse=True)
        costs = {name: self._cost(groups[name]) for name in order}
        cycles = _whole(groups[order[0]])
        first = self.timelines[0]
        evidence = list(next(iter(costs.values())).evidence)
        return Reading(
            sources=list(dict.fromkeys(each.source for each in self.timelines)),
            device=first.device,
            ranks=len(self.timelines),
            world_size=first.world_size,
            kinds=self._kinds(),
            costs=costs,
            waits=self._waits(cycles),
            launches=self._launches(cycles),
            longest_wait_us=self._longest_wait(cycles),
            evidence=evidence,
        )

    def _slots(self, rank: int, cycle: Cycle) -> list[_Slot]:
        """All that happened from the cycle's first kernel to the first one of the next cycle."""
        it = self.ranks[rank]
        result = []
        for step in cycle.steps:
            for phase, kernels in ((step.phase, step.kernels), ("accept", step.tail)):
                if len(kernels):
                    result.append(_Slot(phase, kernels, it.gaps(kernels[~self.begins[rank][kernels]])))
        following = self.following.get(id(cycle))
        if following is not None:
            begin = np.array([_first(following)])
            result.append(_Slot("host", begin[:0], it.gaps(begin)))
        return result

    def _cost(self, group: list[list[Cycle]]) -> CycleCost:
        """The mean of the cycles of one kind over cycles and ranks."""
        chosen = _whole(group)
        sums: dict[tuple[Phase, str, Kind, int | None, str], _Sums] = defaultdict(_Sums)
        wall = 0.0
        for copies in chosen:
            for rank, cycle in enumerate(copies):
                wall += cycle.end - cycle.start
                for slot in self._slots(rank, cycle):
                    self._charge(rank, slot, sums)
        shares = len(chosen) * len(self.ranks)
        parts = [
            Part(
                phase,
                name,
                each.us / shares,
                kind,
                each.count / shares,
                self._traffic(each, size, by, shares) if kind == "collective" else None,
            )
            for (phase, name, kind, size, by), each in sums.items()
        ]
        parts.sort(key=lambda part: -part.us)
        main = chosen[0][0].main
        return CycleCost(
            ordered(parts),
            rows=main.rows,
            tokens=1.0 if main.phase == "decode" and main.rows == 1 else None,
            cycles=len(chosen),
            source="trace",
            wall_us=wall / shares,
            ranks=self.timelines[0].world_size or len(self.ranks),
            evidence=tuple(self._evidence(chosen)),
        )

    def _charge(
        self, rank: int, slot: _Slot, sums: dict[tuple[Phase, str, Kind, int | None, str], _Sums]
    ) -> None:
        it, phase = self.ranks[rank], _PHASES[slot.phase]
        gpu = it.timeline.gpu
        for event in slot.kernels:
            what = it.kinds[gpu.name[event]]
            if what.is_collective:
                message = it.timeline.messages.get(int(event))
                key = (phase, it.kind(event), "collective", message.bytes if message else None, what.by)
            else:
                key = (phase, what.name, "compute", None, "")
            each = sums[key]  # type: ignore[index]
            each.us += float(it.use.exposed[event])
            each.count += 1
            each.lasted += float(gpu.end[event] - gpu.start[event])
            each.wire += float(it.wire[event])
        for gap in slot.gaps:
            name = it.use.gap_kind[gap]
            kind: Kind = "host_sync" if name == "host_sync" else "launch_gap"
            each = sums[phase, name, kind, None, ""]
            each.us += float(it.gap_us[gap])
            each.count += 1

    def _traffic(self, each: _Sums, size: int | None, by: str, shares: int) -> Traffic:
        known = not np.isnan(each.wire)
        return Traffic(
            bytes=size,
            wire_us=each.wire / shares if known else None,
            skew_us=(each.lasted - each.wire) / shares if known else None,
            overlapped_us=float(max(0.0, each.lasted - each.us)) / shares,
            by=by,
        )

    def _evidence(self, chosen: list[list[Cycle]]) -> list[str]:
        main = chosen[0][0].main
        result = list(self.found[0].evidence)
        rows = (
            "The rows of a step cannot be read off" if main.rows is None else f"Rows of a step: {main.rows}"
        )
        if main.why_rows:
            result.append(f"{rows}: {main.why_rows}.")
        world, ranks = self.timelines[0].world_size or len(self.ranks), len(self.ranks)
        if not chosen[0][0].is_complete:
            result.append("Only one such cycle is there, and it may be cut off at its end.")
        if world > ranks > 1:
            result.append(
                f"{ranks} of {world} ranks were traced: the wire time is at most the one shown, as a rank that was not "
                "traced may have waited less."
            )
        elif world > 1 and ranks == 1:
            result.append("One rank was traced: wire time and waiting for slower ranks cannot be told apart.")
        if self.timelines[0].with_stack:
            result.append(
                "Python stacks were recorded, which slows the host: without the profiler the GPU waits less for it."
            )
        if self.timelines[0].whole_graphs:
            result.append(
                "Graph replays were recorded as a whole: their kernels and collectives cannot be told apart; export a "
                "trace made with --cuda-graph-trace=node."
            )
        return result

    def _kinds(self) -> list[StepKind]:
        """The table: every phase and number of rows, in the order of a cycle."""
        slots: dict[tuple[str, int | None, str], list[tuple[int, _Slot]]] = defaultdict(list)
        for rank, steps in enumerate(self.found):
            for step in steps.steps:
                it = self.ranks[rank]
                inner = step.kernels[~self.begins[rank][step.kernels]]
                slots[step.phase, step.rows, step.why_rows].append(
                    (rank, _Slot(step.phase, step.kernels, it.gaps(inner)))
                )
                if len(step.tail):
                    slots["accept", None, ""].append((rank, _Slot("accept", step.tail, it.gaps(step.tail))))
            for cycle in steps.cycles[1:]:
                begin = np.array([_first(cycle)])
                slots["host", None, ""].append((rank, _Slot("host", begin[:0], self.ranks[rank].gaps(begin))))
        order = ("prefill", "step", "draft", "verify", "decode", "accept", "extend", "host")
        merged: dict[tuple[str, int | None], list[tuple[int, _Slot]]] = defaultdict(list)
        why: dict[tuple[str, int | None], str] = {}
        for (phase, rows, reason), each in slots.items():
            merged[phase, rows] += each
            why.setdefault((phase, rows), reason)
        keys = sorted(merged, key=lambda key: (order.index(key[0]), key[1] or 0))
        return [self._step_kind(*key, why[key], merged[key]) for key in keys]

    def _step_kind(self, phase: str, rows: int | None, why: str, slots: list[tuple[int, _Slot]]) -> StepKind:
        figures: dict[str, list[float]] = defaultdict(list)
        counts: Counter[str] = Counter()
        for rank, slot in slots:
            it = self.ranks[rank]
            gpu, events = it.timeline.gpu, slot.kernels
            waited = np.array([it.use.gap_kind[gap] != "between_kernels" for gap in slot.gaps], dtype=bool)
            gaps = it.gap_us[slot.gaps]
            talking = events[it.is_collective[events]]
            counts.update(it.kind(event) for event in talking)
            replayed = events[it.timeline.replayed[events]]
            lasted = gpu.end[talking] - gpu.start[talking]
            figures["busy_us"].append(it.use.exposed[events].sum())
            figures["host_wait_us"].append(gaps[waited].sum() if len(gaps) else 0.0)
            figures["between_kernels_us"].append(gaps[~waited].sum() if len(gaps) else 0.0)
            figures["total_us"].append(figures["busy_us"][-1] + gaps.sum())
            figures["kernels"].append(len(events))
            figures["graph_kernels"].append(len(replayed))
            figures["graphs"].append(len(np.unique(gpu.correlation[replayed])))
            figures["collective_us"].append(lasted.sum())
            figures["exposed_us"].append(it.use.exposed[talking].sum())
            figures["wire_us"].append(it.wire[talking].sum())
        wire = [float(value) for value in figures.pop("wire_us") if not np.isnan(value)]
        middle = {name: float(median(values)) for name, values in figures.items()}
        known = len(self.ranks) > 1 and bool(counts) and bool(wire)
        return StepKind(
            phase=phase,
            rows=rows,
            why_rows=why,
            steps=round(len(slots) / len(self.ranks)),
            collectives={kind: count / len(slots) for kind, count in sorted(counts.items())},
            wire_us=median(wire) if known else None,
            skew_us=middle["collective_us"] - median(wire) if known else None,
            **middle,
        )

    def _cycle_events(self, rank: int, cycle: Cycle) -> Ints:
        return np.concatenate([np.concatenate([step.kernels, step.tail]) for step in cycle.steps])

    def _waits(self, chosen: list[list[Cycle]]) -> list[HostWait]:
        """The places that let the GPU run dry, the dearest first."""
        idle: dict[tuple[str, str], list[float]] = defaultdict(list)
        for copies in chosen:
            for rank, cycle in enumerate(copies):
                it = self.ranks[rank]
                for slot in self._slots(rank, cycle):
                    for gap in slot.gaps:
                        call = int(it.use.gap_call[gap])
                        if call != NO_CALL:
                            name = it.timeline.names[it.timeline.calls.name[call]]
                            idle[name, place_of(it.timeline, call)].append(float(it.gap_us[gap]))
        shares = len(chosen) * len(self.ranks)
        found = [HostWait(*key, len(each) / shares, sum(each) / shares) for key, each in idle.items()]
        return sorted(found, key=lambda each: -each.idle_us)

    def _launches(self, chosen: list[list[Cycle]]) -> float:
        counts = []
        for copies in chosen:
            for rank, cycle in enumerate(copies):
                calls = self.timelines[rank].call[self._cycle_events(rank, cycle)]
                counts.append(len(np.unique(calls[calls != NO_CALL])))
        return float(np.mean(counts))

    def _longest_wait(self, chosen: list[list[Cycle]]) -> float:
        longest = 0.0
        for copies in chosen:
            for rank, cycle in enumerate(copies):
                calls, waits = self.timelines[rank].calls, self.ranks[rank].use.waits
                inside = waits[(calls.start[waits] >= cycle.start) & (calls.start[waits] < cycle.end)]
                if len(inside):
                    longest = max(longest, float((calls.end[inside] - calls.start[inside]).max()))
        return longest


def place_of(timeline: Timeline, call: int) -> str:
    """The innermost line of Python around a call that is not torch's own; else the operator; else nothing."""
    frames, calls = timeline.frames, timeline.calls
    before = int(np.searchsorted(frames.start, calls.start[call], side="right"))
    around = np.flatnonzero(
        (frames.end[:before] >= calls.end[call]) & (frames.thread[:before] == calls.thread[call])
    )
    names = [timeline.names[frames.name[index]] for index in around[::-1]]
    own = [name for name in names if ".py(" in name and not any(word in name for word in _NOT_OWN)]
    operators = [name for name in names if name.startswith("aten::")]
    return next(iter(own or operators), "")


_NOT_OWN = ("torch/", "contextlib", "nvtx_utils", "<built-in")


def _first(cycle: Cycle) -> int:
    """A cycle's first GPU event."""
    return int(min(step.kernels[0] for step in cycle.steps))


def _title(step: Step) -> str:
    if step.rows is None:
        return step.phase
    return f"{step.phase} {step.rows} row{'s' * (step.rows != 1)}"


def _importance(group: list[list[Cycle]]) -> tuple[bool, bool, int]:
    """Speculation before plain decoding before the rest; of several kinds the one with the most cycles."""
    main = group[0][0].main
    return main.phase == "verify", main.phase in ("decode", "step"), len(group)


def _whole(group: list[list[Cycle]]) -> list[list[Cycle]]:
    """The cycles whose end is known, where there are any."""
    return [copies for copies in group if all(cycle.is_complete for cycle in copies)] or group
