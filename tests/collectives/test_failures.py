"""A rank that dies, leaves, disagrees or hangs: all ranks raise, within ten seconds, and say which one it was."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from slipstream.collectives.choice import connect, why_not
from slipstream.collectives.group import launch
from slipstream.collectives.interface import Collectives
from slipstream.collectives.meeting import Meeting
from slipstream.errors import RankError, SlipstreamError

HOW = ("operation", "size", "dtype", "leave", "hang")


def five_sums(meeting: Meeting, backend: str) -> Collectives:
    wire = connect(meeting, backend)
    for _ in range(5):
        wire.all_reduce(torch.ones(8, 576))
    return wire


def misbehave(wire: Collectives, how: str) -> None:
    """What rank 1 does where the others sum float32 [8, 576]."""
    if how == "operation":
        wire.broadcast(torch.ones(8, 576))
    elif how == "size":
        wire.all_reduce(torch.ones(7, 576))
    elif how == "dtype":
        wire.all_reduce(torch.ones(16, 576, dtype=torch.bfloat16))
    elif how == "leave":
        wire.close()
        time.sleep(0.5)
    elif how == "hang":
        time.sleep(9)
        wire.all_reduce(torch.ones(8, 576))  # all parts are there
        wire.all_reduce(torch.ones(8, 576))


def run_into(rank: int, size: int, at: str) -> dict[str, tuple[str, float]]:
    """By trouble: the line that this rank raised, and after how many seconds."""
    meeting, found = Meeting.join(rank, size, at), {}
    for how in HOW:
        wire = five_sums(meeting, "shm")
        start = time.monotonic()
        try:
            if rank == 1:
                misbehave(wire, how)
            else:
                wire.all_reduce(torch.ones(8, 576))
            found[how] = ("nothing", 0.0)
        except RankError as error:
            found[how] = (str(error), time.monotonic() - start)
        meeting.exchange("done", how)
    return found


def killed(rank: int, size: int, at: str, backend: str, is_idle: bool) -> str:
    """The line that this rank raised; rank 1 is killed, while the others wait for it or for work."""
    wire = five_sums(Meeting.join(rank, size, at), backend)
    try:
        if rank == 1:
            time.sleep(1 if is_idle else 0)
            os.kill(os.getpid(), signal.SIGKILL)
        if is_idle:
            wire.broadcast(torch.zeros(4))
        wire.all_reduce(torch.ones(8, 576))
    except RankError as error:
        return str(error)
    return "nothing"


@pytest.fixture(scope="module")
def found() -> list[dict[str, tuple[str, float]]]:
    with launch(run_into, 3) as ranks:
        answers = ranks.results(60)
    return answers


@pytest.mark.parametrize(
    ("how", "other"),
    [
        ("operation", "broadcast of 18432 bytes of Float"),
        ("size", "all_reduce of 16128 bytes of Float"),
        ("dtype", "all_reduce of 18432 bytes of BFloat16"),
    ],
)
def test_a_rank_disagrees(found: list[dict[str, tuple[str, float]]], how: str, other: str) -> None:
    """All three ranks raise; the line names the two operations and their ranks."""
    for line, seconds in [each[how] for each in found]:
        assert "the ranks disagree" in line
        assert other in line
        assert "rank 1" in line
        assert "(operation " in line
        assert seconds < 10


@pytest.mark.parametrize(
    ("how", "reason"), [("leave", "rank 1 has left"), ("hang", "rank 1 did not come within 8 s")]
)
def test_a_rank_does_not_come(found: list[dict[str, tuple[str, float]]], how: str, reason: str) -> None:
    for line, seconds in (found[0][how], found[2][how]):
        assert line.startswith(reason)
        assert "shm all_reduce of 18432 bytes" in line
        assert seconds < 10
    if how == "hang":  # it comes too late, and is told so
        assert found[1][how][0].startswith(reason)


@pytest.mark.parametrize("is_idle", [False, True], ids=["at work", "idle"])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_is_killed(backend: str, is_idle: bool) -> None:
    """The starting process says so, and the others say where they waited; all within ten seconds, nothing left."""
    with launch(killed, 3, (backend, is_idle)) as ranks:
        while 1 not in ranks._answers:
            ranks._collect(time.monotonic() + 60)
        end = time.monotonic() + 10
        while len(ranks._answers) < 3 and time.monotonic() < end:
            ranks._collect(end)
        for rank in (0, 2):
            line = ranks._answers[rank]
            assert line.startswith("rank 1 has died"), line
            assert f"waited for it in {backend} " in line
        with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
            ranks.results()


def reasons(rank: int, size: int, at: str) -> dict[str, str]:
    meeting = Meeting.join(rank, size, at)
    found = why_not(meeting)
    for name in (*found, "carrier-pigeon"):
        with pytest.raises(SlipstreamError, match=r"cannot run here|there is no backend"):
            connect(meeting, name)
    auto = connect(meeting)
    assert auto.row_invariant
    assert not auto.is_lossy
    total = auto.all_reduce(torch.full((3,), rank + 1.0))
    return found | {"auto": auto.name, "total": str(total[0].item())}


def test_what_cannot_run_says_why() -> None:
    with launch(reasons, 2) as ranks:
        first, second = ranks.results(60)
    assert first == second
    assert first["nccl"] == "it is for cuda tensors, and the ranks compute on cpu"
    assert first["total"] == "3.0"
    assert "shm" in first["auto"]
