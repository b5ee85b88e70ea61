"""How long each backend's all-reduce takes here, by size: among processes that are started for it.

`time_all_reduce` takes any Collectives, in a group that exists already.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.collectives.choice import BACKENDS, connect
from slipstream.collectives.group import launch
from slipstream.collectives.interface import Collectives
from slipstream.collectives.meeting import Meeting
from slipstream.errors import RankError, SlipstreamError
from slipstream.lab.calibrate import HERE, Progress
from slipstream.machine.curve import AllReduceCurve, through
from slipstream.machine.machine import Machine

SIZES_BYTES = tuple(2**power for power in range(11, 23))
"""2 KiB (a row of a small model) to 4 MiB (hundreds of rows of a large one)."""

_CALLS, _BUDGET_S = 200, 0.5
"""On a CPU: calls of each size, or as many as fit into the time."""


def measure_all_reduces(machine: Machine, progress: Progress) -> list[AllReduceCurve]:
    """Every backend that can run here, among 2, 4 and 8 ranks as far as there are GPUs or cores."""
    places = len(machine.devices) or machine.cpu.cores or machine.cpu.threads or 1
    runs = [(ranks, backend) for ranks in (2, 4, 8) if ranks <= places for backend in BACKENDS]
    found: list[AllReduceCurve] = []
    for number, (ranks, backend) in enumerate(runs):
        progress(f"{backend} among {ranks}", number, len(runs))
        with launch(_rank_work, ranks, (backend, machine.has_gpus)) as group:
            found += group.results()[0]
    if runs:
        progress("all-reduces measured", len(runs), len(runs))
    return found


def _rank_work(rank: int, size: int, at: str, backend: str, on_gpu: bool) -> list[AllReduceCurve]:
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    meeting = Meeting.join(rank, size, at)
    try:
        wire = connect(meeting, backend)
    except RankError:
        raise
    except SlipstreamError:
        return []  # it cannot run here, and says so on every rank
    try:
        return time_all_reduce(wire, device)
    finally:
        wire.close()


def time_all_reduce(
    wire: Collectives, device: torch.device, sizes_bytes: Sequence[int] = SIZES_BYTES
) -> list[AllReduceCurve]:
    """The median time by size of a backend, which every rank of its group must ask for; all get the same answer.

    A call's time is the least of the ranks': the last to come waits for nobody, so waiting for it is not counted. On a
    GPU eager, and as nodes of a CUDA graph. Messages are bfloat16.
    """
    ways = {False: _gpu_us, True: _captured_us} if device.type == "cuda" else {False: _cpu_us}
    curves = []
    for is_captured, measure in ways.items():
        points = [
            (size, measure(wire, torch.zeros(size // 2, dtype=torch.bfloat16, device=device)))
            for size in sizes_bytes
        ]
        curves.append(
            AllReduceCurve(
                wire.name, wire.size, is_captured, HERE, sizes_bytes[-1], through(points), "measured here"
            )
        )
    return curves


def _cpu_us(wire: Collectives, x: Tensor) -> float:
    """In lots of ten, after each of which the ranks agree whether to go on."""
    taken: list[float] = []
    for _ in range(10):
        wire.all_reduce(x)
    ends = time.perf_counter() + _BUDGET_S
    while not taken or (len(taken) < _CALLS and not _any(wire, time.perf_counter() > ends, x)):
        for _ in range(10):
            start = time.perf_counter()
            wire.all_reduce(x)
            taken.append((time.perf_counter() - start) * 1e6)
    return _median_of_least(wire, taken, x)


def _gpu_us(wire: Collectives, x: Tensor, calls: int = 50) -> float:
    """A pair of events around each call, the host not waiting in between: as an eager pass launches them."""
    for _ in range(5):
        wire.all_reduce(x)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    torch.cuda.synchronize()
    wire.barrier()
    for start, end in events:
        start.record()
        wire.all_reduce(x)
        end.record()
    torch.cuda.synchronize()
    return _median_of_least(wire, [start.elapsed_time(end) * 1e3 for start, end in events], x)


def _captured_us(wire: Collectives, x: Tensor, calls: int = 50, replays: int = 10) -> float:
    """Many calls in one graph, so that its launch hardly counts; each rank has to come to each call."""
    from slipstream.lab.calibrate_gpu import captured, event_us

    def run() -> None:
        for _ in range(calls):
            wire.all_reduce(x)

    graph = captured(run)
    graph.replay()
    torch.cuda.synchronize()
    wire.barrier()
    return _median_of_least(wire, [event_us(graph.replay) / calls for _ in range(replays)], x)


def _any(wire: Collectives, mine: bool, like: Tensor) -> bool:
    return bool(wire.all_reduce(like.new_full((1,), float(mine))).item())


def _median_of_least(wire: Collectives, taken: Sequence[float], like: Tensor) -> float:
    """The median over the calls of the least of all ranks' times."""
    mine = torch.tensor(taken, dtype=torch.float32, device=like.device)
    every = wire.all_gather(mine).view(wire.size, -1)
    least: list[float] = every.min(dim=0).values.tolist()
    return statistics.median(least)
