"""Which step each kernel belongs to: from the annotation under which the host launched it, or from what repeats.

A cycle is what repeats as a whole: from one run of the target model to the next, from the draft that precedes it on
where there is one. Cycles are cut where the first kernel of a cycle starts on the GPU.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from slipstream.lab.traces.kernels import classify
from slipstream.lab.traces.marks import MAIN, Meaning, StepPhase, meaning
from slipstream.lab.traces.nsys import GRAPH_NAME
from slipstream.lab.traces.timeline import NO_CALL, Bools, Floats, Ints, Timeline

GRAPH_KERNELS = 8
"""A graph replay of fewer kernels is a piece of a step, not a step."""
_ADD_NORM = ("add_rms", "addrms", "add_rmsnorm")
_SPECULATION = ("verify_tree", "verifytree", "rejection", "build_tree", "eagle", "speculative_sampling")


@dataclass
class Step:
    """One step of one phase."""

    phase: StepPhase
    label: str
    kernels: Ints
    """Into the timeline's GPU events, in order of start."""
    tail: Ints
    """Of a verify or decode step: what the host launched after it and before the next one; sampling, mostly."""
    rows: int | None = None
    requests: int | None = None
    why_rows: str = ""
    """How the rows are known, or why they are not."""

    @property
    def key(self) -> tuple[str, int | None]:
        """Steps of the same phase and rows are of one kind."""
        return self.phase, self.rows


@dataclass
class Cycle:
    """Steps that follow each other, one of them of the target model. Times on the GPU, in microseconds."""

    steps: list[Step]
    start: float = 0.0
    end: float = 0.0
    is_complete: bool = True
    """Whether another one follows, so that its end is known."""

    @property
    def main(self) -> Step:
        return next(step for step in self.steps if step.phase in MAIN)


@dataclass
class Steps:
    """All of a timeline."""

    steps: list[Step]
    cycles: list[Cycle]
    evidence: list[str] = field(default_factory=list)


def find_steps(timeline: Timeline) -> Steps:
    """The steps and cycles; none where nothing repeats."""
    steps, evidence = _annotated(timeline), ["The phases are those that the engine's own annotations name."]
    if not steps:
        steps, evidence = _repeated(timeline)
    for step in steps:
        _find_rows(timeline, step)
    return Steps(steps, _cycles(timeline, steps), evidence if steps else [])


def _annotated(timeline: Timeline) -> list[Step]:
    windows = _windows(timeline)
    if not windows:
        return []
    starts = np.array([start for start, _, _, _ in windows])
    ends = np.array([end for _, end, _, _ in windows])
    launched = launch_times(timeline)
    owner = np.searchsorted(starts, launched, side="right") - 1
    result = []
    order = np.argsort(owner, kind="stable")
    bounds = np.searchsorted(owner[order], np.arange(len(windows) + 1))
    for index, (_, _, what, label) in enumerate(windows):
        own = order[bounds[index] : bounds[index + 1]]
        if not len(own):
            continue
        late = launched[own] > ends[index]
        splits = what.phase in ("verify", "decode")
        kernels, tail = (own[~late], own[late]) if splits else (own, own[:0])
        if len(kernels):
            tail, draft = _draft_in(timeline, tail)
            result.append(Step(what.phase, label, kernels, tail, what.rows, what.requests))
            if len(draft):
                result.append(Step("draft", "", draft, draft[:0]))
    return result


def _draft_in(timeline: Timeline, tail: Ints) -> tuple[Ints, Ints]:
    """What follows a step, split where a drafter that nobody annotated begins: it attends, as sampling never does."""
    classes = [classify(timeline.names[timeline.gpu.name[event]]).name for event in tail]
    if "attention" not in classes:
        return tail, tail[:0]
    sampled = [index for index in range(classes.index("attention")) if classes[index] == "sampling"]
    begin = sampled[-1] + 1 if sampled else 0
    return tail[:begin], tail[begin:]


def _windows(timeline: Timeline) -> list[tuple[float, float, Meaning, str]]:
    """The annotations that name a phase, outermost ones, of the thread that has most of them: start, end, meaning."""
    marks = timeline.marks
    texts = [meaning(text) for text in timeline.names]
    known = [index for index in range(len(marks)) if texts[marks.name[index]] is not None]
    if not known:
        return []
    fine = [index for index in known if texts[marks.name[index]] != Meaning("step")]
    chosen = fine or known
    thread = Counter(int(marks.thread[index]) for index in chosen).most_common(1)[0][0]
    result: list[tuple[float, float, Meaning, str]] = []
    for index in chosen:
        if marks.thread[index] != thread:
            continue
        name = timeline.names[marks.name[index]]
        what = texts[marks.name[index]]
        assert what is not None
        start, end = float(marks.start[index]), float(marks.end[index])
        if result and end <= result[-1][1]:
            result[-1] = (*result[-1][:2], _merged(result[-1][2], what), result[-1][3])
        else:
            result.append((start, end, what, name))
    return result


def _merged(outer: Meaning, inner: Meaning) -> Meaning:
    """An annotation with another one inside: the outer phase, but what prefills the drafter is prefill."""
    if outer.phase in ("draft", "extend") and inner.phase == "prefill":
        return inner
    if outer.phase in MAIN and outer.rows is None:
        return replace(outer, rows=inner.rows, requests=inner.requests)
    return outer


def launch_times(timeline: Timeline) -> Floats:
    """When the host launched each GPU event. One without a record is taken to come with the one before it."""
    result = np.full(len(timeline.gpu), -np.inf)
    known = timeline.call != NO_CALL
    result[known] = timeline.calls.start[timeline.call[known]]
    if not known.any():  # nothing of the host was recorded: the GPU's own clock has to do
        return timeline.gpu.start
    last = np.maximum.accumulate(np.where(known, np.arange(len(result)), -1))
    missing = ~known & (last >= 0)
    result[missing] = result[last[missing]]
    return result


def _repeated(timeline: Timeline) -> tuple[list[Step], list[str]]:
    """Without annotations: a kernel that comes once a step cuts the trace; big graph replays are steps in a cut."""
    anchor = _anchor(timeline)
    if anchor is None:
        return [], []
    cuts = _where_idle(timeline, np.flatnonzero(timeline.gpu.name == anchor))
    owner = np.searchsorted(cuts, np.arange(len(timeline.gpu)), side="right")
    replayed = timeline.replayed
    steps: list[Step] = []
    for index in range(1, len(cuts)):  # what lies before the first cut and after the last may be incomplete
        steps += _parts_of(timeline, np.flatnonzero(owner == index), replayed)
    names = {timeline.names[number] for number in np.unique(timeline.gpu.name)}
    speculates = any(word in name.lower() for name in names for word in _SPECULATION)
    drafts = any(step.phase == "draft" for step in steps)
    for step in steps:
        if step.phase == "decode" and (speculates or drafts):
            step.phase = "verify"
    why = (
        "kernels of speculative decoding run in it" if speculates else "smaller graphs run around it"
        if drafts else "nothing in it speaks of speculation"
    )  # fmt: skip
    return steps, [
        f"No annotation names the phases; they are inferred: `{timeline.names[anchor][:60]}` comes once a step, and "
        f"the longest forward of a step is called {'verify' if speculates or drafts else 'decode'} because {why}."
    ]


def _anchor(timeline: Timeline) -> int | None:
    """A kernel that runs once a step: of the counts that several kernels share, the smallest one that cuts evenly."""
    names, counts = np.unique(timeline.gpu.name, return_counts=True)
    shared = Counter(int(count) for count in counts)
    busy = timeline.gpu.end - timeline.gpu.start
    for needed in (3, 1):
        for count in sorted(count for count, kinds in shared.items() if kinds >= needed and count >= 3):
            for name in names[counts == count]:
                at = np.flatnonzero(timeline.gpu.name == name)
                lengths = np.diff(at)
                usual = np.median(lengths)
                even = np.mean(np.abs(lengths - usual) <= 0.05 * usual + 1)
                covered = busy[at[0] : at[-1]].sum() / max(busy.sum(), 1e-9)
                if even >= 0.6 and covered >= 0.4:
                    return int(name)
    return None


def _where_idle(timeline: Timeline, cuts: Ints) -> Ints:
    """The cuts moved to where the GPU is idle for longest, if that is before the same kernel nearly every time."""
    gpu = timeline.gpu
    idle = gpu.start[1:] - np.maximum.accumulate(gpu.end)[:-1]
    longest = np.array([begin + 1 + int(np.argmax(idle[begin:end])) for begin, end in pairwise(cuts)])
    name, count = Counter(gpu.name[longest].tolist()).most_common(1)[0]
    if count < 0.8 * len(longest) or len(longest) < 3:
        return cuts
    result: Ints = longest[gpu.name[longest] == name]
    return result


def _parts_of(timeline: Timeline, kernels: Ints, replayed: Bools) -> list[Step]:
    """The steps in one repetition: its big graph replays, each with the kernels before it, the last with the rest."""
    gpu = timeline.gpu
    correlation = gpu.correlation[kernels]
    busy = gpu.end[kernels] - gpu.start[kernels]
    big: list[tuple[int, float]] = []
    for number in dict.fromkeys(correlation[replayed[kernels]].tolist()):
        inside = correlation == number
        is_whole = timeline.names[gpu.name[kernels[inside][0]]].startswith(GRAPH_NAME)
        if is_whole or inside.sum() >= GRAPH_KERNELS:
            big.append((number, float(busy[inside].sum())))
    big = [each for each in big if each[1] >= 0.02 * busy.sum()]
    if len(big) < 2:
        return [Step("decode", "", kernels, kernels[:0])]
    longest = max(range(len(big)), key=lambda index: big[index][1])
    result, begin = [], 0
    for index, (number, us) in enumerate(big):
        last = int(np.flatnonzero(correlation == number)[-1]) + 1
        end = last if index < len(big) - 1 else len(kernels)
        # Forwards of about the same length are equals; the drafter's are much shorter.
        phase: StepPhase = (
            "decode" if us > 0.6 * big[longest][1] else "draft" if index < longest else "extend"
        )
        own = kernels[begin:last] if phase == "decode" else kernels[begin:end]
        tail = kernels[last:end] if phase == "decode" else kernels[:0]
        result.append(Step(phase, "", own, tail))
        begin = end
    return result


def _find_rows(timeline: Timeline, step: Step) -> None:
    """The rows of a step, from the best witness there is; and who that is."""
    if step.rows is not None:
        step.why_rows = f"the annotation `{step.label}` says so"
        return
    if step.phase not in ("verify", "decode"):
        return
    grids = [
        int(timeline.grid[index])
        for index in step.kernels
        if timeline.grid[index] > 0
        and any(word in timeline.names[timeline.gpu.name[index]].lower() for word in _ADD_NORM)
        and classify(timeline.names[timeline.gpu.name[index]]).name == "norm"
    ]
    if len(grids) >= 2:
        rows, count = Counter(grids).most_common(1)[0]
        if count >= 0.75 * len(grids):
            step.rows = rows
            step.why_rows = f"{count} of its add-and-RMSNorm kernels run with {rows} blocks, one a row"
            return
    rows_of = _matmul_rows(timeline, step)
    if rows_of is not None:
        step.rows = rows_of
        step.why_rows = "the shapes of its matrix products, which ran outside graphs, say so"
        return
    replayed = timeline.replayed[step.kernels].mean() > 0.5
    step.why_rows = (
        "most of it is a CUDA graph replay, which runs no host code: shapes are not recorded"
        if replayed
        else "neither shapes (record_shapes) nor a kernel with one block a row were recorded"
    )


def _matmul_rows(timeline: Timeline, step: Step) -> int | None:
    calls = timeline.call[step.kernels]
    calls = calls[calls != NO_CALL]
    if not len(calls) or not timeline.row_shapes:
        return None
    begin, end = timeline.calls.start[calls].min() - 50, timeline.calls.end[calls].max()
    thread = Counter(timeline.calls.thread[calls].tolist()).most_common(1)[0][0]
    inside = [rows for at, of, rows in timeline.row_shapes if begin <= at <= end and of == thread]
    if len(inside) < 4:
        return None
    rows, count = Counter(inside).most_common(1)[0]
    return rows if count >= 0.75 * len(inside) else None


def _cycles(timeline: Timeline, steps: list[Step]) -> list[Cycle]:
    """The steps in groups; what comes before the first whole one belongs to none."""
    groups: list[list[Step]] = []
    for step in steps:
        has_main = bool(groups) and any(each.phase in MAIN for each in groups[-1])
        if not groups or (has_main and step.phase in ("draft", *MAIN)):
            groups.append([])
        groups[-1].append(step)
    cycles = [Cycle(group) for group in groups if any(step.phase in MAIN for step in group)]
    if len(cycles) > 2 and cycles[0].main.key == cycles[1].main.key:
        first, second = ({step.phase for step in cycle.steps} for cycle in cycles[:2])
        if first < second:
            del cycles[0]  # the trace begins within it
    gpu = timeline.gpu
    for cycle in cycles:
        cycle.start = float(min(gpu.start[step.kernels[0]] for step in cycle.steps))
        ran = np.concatenate([np.concatenate([step.kernels, step.tail]) for step in cycle.steps])
        cycle.end = float(gpu.end[ran].max())
    for cycle, following in pairwise(cycles):
        cycle.end = max(following.start, cycle.start)
    if cycles:
        cycles[-1].is_complete = False
    return cycles
