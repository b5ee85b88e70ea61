"""Starting ranks, meeting, and the ways in which one of them fails."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from slipstream.collectives.group import launch
from slipstream.collectives.meeting import Meeting
from slipstream.errors import RankError


def meet(rank: int, size: int, at: str) -> tuple[int, int, bool]:
    meeting = Meeting.join(rank, size, at)
    values = meeting.exchange("square", rank * rank)
    assert values == [r * r for r in range(size)]
    assert meeting.attendance is not None
    assert meeting.attendance.dead() == []
    meeting.agree("the model", "tiny")
    return meeting.rank, meeting.size, meeting.is_one_machine


def disagree(rank: int, size: int, at: str) -> None:
    Meeting.join(rank, size, at).agree("the dtype", "float32" if rank == 0 else "bfloat16")


def fail(rank: int, size: int, at: str, how: str) -> None:
    meeting = Meeting.join(rank, size, at)
    if rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("out of luck")
    meeting.exchange("never", rank)


def never_comes(rank: int, size: int, at: str) -> None:
    if rank == 0:
        Meeting.join(rank, size, at)
    raise SystemExit(3)


def test_ranks_meet() -> None:
    with launch(meet, 3) as ranks:
        assert ranks.results(60) == [(0, 3, True), (1, 3, True), (2, 3, True)]


@pytest.mark.parametrize(
    ("work", "args", "line"),
    [
        (disagree, (), "the ranks disagree about the dtype: rank 0 has float32, rank 1 has bfloat16"),
        (fail, ("kill",), "rank 1 was killed by SIGKILL"),
        (fail, ("raise",), "rank 1 failed: ValueError: out of luck"),
        (never_comes, (), "rank 1 failed: SystemExit: 3"),
    ],
)
def test_a_failing_rank_ends_all(work: Any, args: tuple[Any, ...], line: str) -> None:
    """The line names the rank that was the cause, and no process outlives it."""
    start = time.monotonic()
    with launch(work, 2, args) as ranks:
        with pytest.raises(RankError, match=line):
            ranks.results(60)
        assert not any(process.is_alive() for process in ranks._processes.values())
    assert time.monotonic() - start < 20
