"""A whole cycle as one CUDA graph: draft, verify, accept, commit and what the host is told, in one launch.

A graph is kept for every (drafter, batch bucket, tree size, extent bucket, greedy or sampled). A shape's first cycle
runs operation by operation, which compiles its kernels; its second is captured. What a cycle brought goes to pinned
memory, into the next of a few places, so that the host may read it while the next cycle runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from slipstream.draft.drafter import Drafter
from slipstream.engine.cycle import Outcome, cycle
from slipstream.engine.runner import Eager, Pending, Runner, bucket_of
from slipstream.engine.state import State
from slipstream.target.family import Target

_PLACES = 4
"""Outcomes of one graph that stay readable; more than the cycles that are ever on their way."""
_SMALLEST_EXTENT = 1024
_BUDGET_SHARE = 0.05
"""Of the device's memory, for graphs."""
_WORTH = 0.03
"""The host's share of a cycle from which on it decides one cycle late: what it knows is then older, so the tree is
chosen a little worse."""
_TRIALS = 16
"""Cycles that are timed before that is decided."""


def runner_for(target: Target, state: State, use_graphs: bool = True) -> Runner:
    """The fastest runner for the device that the state lies on."""
    if use_graphs and state.table.is_cuda:
        return Graphed(target, state)
    return Eager(target, state, 1 if state.table.is_cuda else 0)


@dataclass(frozen=True)
class _Key:
    """What a captured cycle depends on."""

    drafter: int
    width: int
    batch: int
    size: int
    extent: int
    is_greedy: bool

    def __str__(self) -> str:
        kind = "greedy" if self.is_greedy else "sampled"
        return f"batch {self.batch}, {self.size} drafted tokens, up to {self.extent} keys, {kind}"


class Graphed(Runner):
    """Replays cycles on a GPU."""

    def __init__(self, target: Target, state: State, budget_bytes: int | None = None) -> None:
        """budget_bytes: of device memory, for all graphs together; when it is used up, further shapes run eagerly."""
        super().__init__(target, state)
        device = state.table.device
        total = torch.cuda.get_device_properties(device).total_memory
        self.budget_bytes = int(total * _BUDGET_SHARE) if budget_bytes is None else budget_bytes
        self._eager = Eager(target, state)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[_Key, _Graph | None] = {}
        """None: this one runs eagerly."""
        self._seen: dict[_Key, int] = {}
        """The width of an outcome of shapes that have run."""
        self._slots: dict[int, tuple[tuple[int, ...], Tensor]] = {}
        self._used_bytes = 0
        self._warned: set[str] = set()
        self._host = _HostShare()

    def start(
        self, drafter: Drafter | None, slots: Sequence[int], size: int, extent: int, is_greedy: bool
    ) -> Pending:
        width = drafter.before(self.state.text, slots, size, size + 1) if drafter else 0
        extent = self._extent(extent)
        key = _Key(id(drafter), width, bucket_of(len(slots)), size, extent, is_greedy)
        padded = (*slots, *[self.state.padding_slot] * (key.batch - len(slots)))
        on_device = self._on_device(padded)
        if key not in self._graphs and key in self._seen and (drafter is None or drafter.is_capturable):
            self._graphs[key] = self._capture(key, drafter, on_device)
        graph = self._graphs.get(key)
        if graph is None:
            brought, levels = _cycle(self.target, drafter, self.state, on_device, size, extent, is_greedy)
            self._seen[key] = brought.shape[1]
            return _Read(brought.to("cpu", non_blocking=True), levels, len(slots), _event(), None)
        self.lag = self._host.lag if drafter else 1
        return graph.replay(len(slots), self._host)

    def forget(self) -> None:
        torch.cuda.synchronize()
        self._graphs.clear()
        self._seen.clear()
        self._used_bytes = 0

    def _extent(self, extent: int) -> int:
        bucket = _SMALLEST_EXTENT
        while bucket < extent:
            bucket *= 2
        return min(bucket, self.state.table.shape[1])

    def _on_device(self, padded: tuple[int, ...]) -> Tensor:
        """The slots in the place that the graphs of this batch read them from."""
        known = self._slots.get(len(padded))
        if known is None or known[0] != padded:
            there = torch.tensor(padded, dtype=torch.int64).pin_memory()
            place = (
                known[1]
                if known
                else torch.empty(len(padded), dtype=torch.int64, device=self.state.table.device)
            )
            place.copy_(there, non_blocking=True)
            self._slots[len(padded)] = known = padded, place
        return known[1]

    def _capture(self, key: _Key, drafter: Drafter | None, slots: Tensor) -> _Graph | None:
        if self._used_bytes > self.budget_bytes:
            self._warn(
                f"slipstream: graphs take {self._used_bytes / 2**20:.0f} MiB of GPU memory, as much as they may;"
                f" {key}: runs without one"
            )
            return None
        before = torch.cuda.memory_reserved()
        try:
            graph = _Graph(self.target, drafter, self.state, slots, key, self._seen[key], self._pool)
        except (RuntimeError, torch.AcceleratorError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            self._warn(f"slipstream: {key}: cannot be captured as a graph and runs without one ({reason})")
            return None
        self._used_bytes += max(torch.cuda.memory_reserved() - before, 0)
        return graph

    def _warn(self, line: str) -> None:
        if line not in self._warned:
            self._warned.add(line)
            warnings.warn(line, RuntimeWarning, stacklevel=4)


class _HostShare:
    """How much of a cycle the device waits for the host when every outcome is read before the next cycle starts."""

    def __init__(self) -> None:
        self.lag = 0
        self._last_read_s = 0.0
        self._shares: list[float] = []

    def observe(self, device_ms: float) -> None:
        """A cycle was read; its graph ran that long."""
        now = perf_counter()
        wall_ms, self._last_read_s = (now - self._last_read_s) * 1e3, now
        if (
            wall_ms > 2 * device_ms or len(self._shares) > _TRIALS
        ):  # not one right after the other, or decided
            return
        self._shares.append(1 - device_ms / wall_ms)
        if len(self._shares) == _TRIALS:
            self.lag = int(sorted(self._shares)[_TRIALS // 2] > _WORTH)


class _Graph:
    """One captured cycle."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        state: State,
        slots: Tensor,
        key: _Key,
        width: int,
        pool: tuple[int, int],
    ) -> None:
        device = slots.device
        places = torch.zeros(_PLACES, key.batch * width, dtype=torch.int64, device=device)
        step = torch.zeros(1, dtype=torch.int64, device=device)
        self._there = torch.zeros(_PLACES, key.batch, width, dtype=torch.int64).pin_memory()
        self._graph, self._steps = torch.cuda.CUDAGraph(), 0
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, pool=pool):  # type: ignore[arg-type]  # torch's own handle
            brought, self._levels = _cycle(target, drafter, state, slots, key.size, key.extent, key.is_greedy)
            places.index_copy_(0, step % _PLACES, brought.reshape(1, -1))
            step += 1
            self._there.copy_(places.view_as(self._there), non_blocking=True)
        self._kept = places, step, slots

    def replay(self, count: int, host: _HostShare) -> Pending:
        start = torch.cuda.Event(enable_timing=True)
        start.record()
        self._graph.replay()
        place = self._there[self._steps % _PLACES]
        self._steps += 1
        end = _event()
        return _Read(place, self._levels, count, end, lambda: host.observe(start.elapsed_time(end)))


class _Read(Pending):
    def __init__(
        self,
        there: Tensor,
        levels: int,
        count: int,
        end: torch.cuda.Event,
        told: Callable[[], None] | None,
    ) -> None:
        self._there, self._levels, self._count, self._end, self._told = there, levels, count, end, told

    def read(self) -> list[Outcome]:
        self._end.synchronize()
        if self._told:
            self._told()
        return [Outcome.read(row, self._levels) for row in self._there[: self._count].tolist()]


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _cycle(
    target: Target,
    drafter: Drafter | None,
    state: State,
    slots: Tensor,
    size: int,
    extent: int,
    is_greedy: bool,
) -> tuple[Tensor, int]:
    if len(slots) > 1:  # what pads a batch would grow with every cycle otherwise
        state.text.length[state.padding_slot :].fill_(1)
    return cycle(target, drafter, state, slots, size, extent, is_greedy)
