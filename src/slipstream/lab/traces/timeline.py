"""One rank's trace as columns: what the GPU ran, what the host called, what was annotated. Times in microseconds."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NO_CALL = -1
"""In `Timeline.call`: the launch of this kernel was not recorded."""


@dataclass
class Events:
    """Events of one kind, by start."""

    start: Floats
    end: Floats
    name: Ints
    """Into `Timeline.names`."""
    thread: Ints
    """The host's thread; of GPU events the stream."""
    correlation: Ints
    """The same number in a GPU event and in the call that launched it; -1 where there is none."""

    def __len__(self) -> int:
        return len(self.start)


@dataclass
class Timeline:
    """One rank. All times count from the same zero within it; `epoch_us` makes those of ranks comparable."""

    source: str
    names: list[str]
    gpu: Events
    grid: Ints
    """Blocks of each GPU event in x; -1 for copies and where the profiler did not say."""
    calls: Events
    """What the host called of CUDA or HIP."""
    marks: Events
    """Annotations: `record_function`, NVTX."""
    frames: Events
    """Operators and Python functions: where a call came from."""
    epoch_us: float = 0.0
    rank: int | None = None
    world_size: int | None = None
    device: str = ""
    messages: dict[int, Message] = field(default_factory=dict)
    """By GPU event: what the profiler says of a collective."""
    row_shapes: list[tuple[float, float, int]] = field(default_factory=list)
    """Host start, thread and rows of matrix products outside graphs."""
    with_stack: bool = False
    whole_graphs: int = 0
    """GPU events that stand for a whole graph replay: their kernels were not recorded."""
    call: Ints = field(init=False)
    """By GPU event: the call that launched it, or `NO_CALL`."""

    replayed: Bools = field(init=False)
    """By GPU event: part of a graph replay, as several events of one launch are, or one whose launch says so."""

    def __post_init__(self) -> None:
        order = np.argsort(self.calls.correlation, kind="stable")
        known = self.calls.correlation[order]
        at = np.searchsorted(known, self.gpu.correlation)
        at[at == len(known)] = 0
        found = (known[at] == self.gpu.correlation) if len(known) else np.zeros(len(self.gpu), dtype=bool)
        found &= self.gpu.correlation >= 0
        self.call = np.where(found, order[at] if len(known) else 0, NO_CALL).astype(np.int64)
        _, inverse, counts = np.unique(self.gpu.correlation, return_inverse=True, return_counts=True)
        graph_names = np.array(["GraphLaunch" in text for text in self.names] or [False])
        self.replayed = (counts[inverse] > 1) & (self.gpu.correlation >= 0)
        self.replayed[found] |= graph_names[self.calls.name[self.call[found]]]


@dataclass(frozen=True)
class Message:
    """A collective's metadata."""

    kind: str
    bytes: int | None
    group_size: int | None


class Columns:
    """Events while they are read; compact, as there may be ten million."""

    def __init__(self) -> None:
        self.start, self.end = array("d"), array("d")
        self.name, self.thread, self.correlation = array("q"), array("q"), array("q")

    def add(self, start: float, end: float, name: int, thread: int, correlation: int = -1) -> None:
        """One event."""
        self.start.append(start)
        self.end.append(end)
        self.name.append(name)
        self.thread.append(thread)
        self.correlation.append(correlation)

    def events(self, zero: float = 0.0) -> tuple[Events, Ints]:
        """The events by start, counted from `zero`, and their order: neither format promises one."""
        start = np.array(self.start, dtype=np.float64)
        end = np.array(self.end, dtype=np.float64)
        order = np.lexsort((-end, start))
        columns = (np.array(each, dtype=np.int64) for each in (self.name, self.thread, self.correlation))
        name, thread, correlation = (column[order] for column in columns)
        return Events(start[order] - zero, end[order] - zero, name, thread, correlation), order


class Names:
    """Texts by number, each kept once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[Any, int] = {}

    def number(self, text: str) -> int:
        """Its number."""
        found = self._numbers.get(text)
        if found is None:
            found = self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return found
