"""How the GPU's time is divided, against a raster that knows nothing of the way it is done: every microsecond once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.lab.traces.timeline import Columns, Timeline
from slipstream.lab.traces.waits import use_of
from tests.lab import made_traces as made

intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 15), st.booleans(), st.integers(0, 60), st.integers(0, 9)),
    min_size=1,
    max_size=25,
)


def timeline(events: list[tuple[int, int, bool, int, int]]) -> Timeline:
    gpu, calls = Columns(), Columns()
    for index, (start, length, talks, early, lasts) in enumerate(events):
        gpu.add(start, start + length, int(talks), index % 3, index)
        calls.add(start - early, start - early + lasts, 2, 0, index)
    sorted_gpu, _ = gpu.events()
    host, _ = calls.events()
    nothing, _ = Columns().events()
    names = [made.GEMM, made.NCCL, "cudaLaunchKernel"]
    return Timeline("", names, sorted_gpu, np.full(len(events), -1), host, nothing, nothing)


@given(intervals)
def test_every_microsecond_once(events: list[tuple[int, int, bool, int, int]]) -> None:
    it = timeline(events)
    use = use_of(it)
    computes, talks = np.zeros(100, bool), np.zeros(100, bool)
    for start, length, is_talk, _, _ in events:
        (talks if is_talk else computes)[start : start + length] = True
    first = min(start for start, *_ in events)
    last = max(start + length for start, length, *_ in events)
    collective = it.gpu.name == 1
    assert use.exposed[~collective].sum() == pytest.approx(computes.sum())
    assert use.exposed[collective].sum() == pytest.approx((talks & ~computes).sum())
    idle = (~(computes | talks))[first:last].sum()
    assert (use.gap_end - use.gap_start).sum() == pytest.approx(idle)


@given(intervals)
def test_whose_gap_it_is(events: list[tuple[int, int, bool, int, int]]) -> None:
    """A gap is the host's where the launch of what ended it came back after the GPU had run dry."""
    it = timeline(events)
    use = use_of(it)
    for start, following, kind in zip(use.gap_start, use.gap_next, use.gap_kind, strict=True):
        call = it.call[following]
        assert kind == ("launch" if it.calls.end[call] > start else "between_kernels")


def test_a_wait_on_another_thread_is_not_the_reason() -> None:
    """Only the thread that launches is kept from launching by its own waits."""
    for thread, expected in ((0, "host_sync"), (5, "launch")):
        it = timeline([(0, 10, False, 1, 1), (50, 10, False, 2, 1)])
        waits = Columns()
        waits.add(-1, 0, 2, 0, 0)
        waits.add(48, 49.5, 2, 0, 1)
        waits.add(5, 30, 3, thread, -1)
        calls, _ = waits.events()
        names = [*it.names, "cudaStreamSynchronize"]
        again = Timeline("", names, it.gpu, it.grid, calls, it.marks, it.frames)
        assert use_of(again).gap_kind == [expected]
