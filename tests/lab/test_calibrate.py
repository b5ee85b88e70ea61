"""Timing an all-reduce: among real ranks, and with clocks that are known."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.collectives.group import launch
from slipstream.collectives.interface import Solo
from slipstream.lab import calibrate_all_reduce
from slipstream.lab.calibrate_all_reduce import time_all_reduce
from slipstream.machine.machine import AllReduceCurve


class Gathered(Solo):
    """One of two ranks, with what both bring to a gather."""

    size = 2

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat([x, torch.tensor([2.0, 5.0, 4.0])])


def test_waiting_for_the_last_rank_is_not_counted() -> None:
    """Of each call the shorter of both ranks' times, 2, 2 and 4; of those the median."""
    assert calibrate_all_reduce._median_of_least(Gathered(), [5.0, 2.0, 9.0], torch.zeros(1)) == 2.0


def test_gloo_among_two_processes() -> None:
    with launch(_measure, 2) as group:
        first, second = group.results(60)
    assert first == second
    (curve,) = first
    assert (curve.backend, curve.ranks, curve.to_bytes) == ("gloo", 2, 8192)
    assert 5 < curve.us(4096) < 1e5


def _measure(rank: int, size: int, at: str) -> list[AllReduceCurve]:
    from slipstream.collectives.choice import connect
    from slipstream.collectives.meeting import Meeting

    calibrate_all_reduce._CALLS = 20
    return time_all_reduce(connect(Meeting.join(rank, size, at), "gloo"), torch.device("cpu"), [2048, 8192])
