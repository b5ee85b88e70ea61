"""Measures what this machine can do at best: memory, matrix products and launches; `machine.cache` keeps it.

Every figure is the best of several runs: what disturbs a run only makes it slower. The GPU's are in `calibrate_gpu`,
the all-reduces in `calibrate_all_reduce`.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.machine.curve import AllReduceCurve
from slipstream.machine.machine import Ceilings, Launch, Machine, MatrixRate, MemoryRead, Source

HERE = "here"
"""The key of the source of all that is measured."""

Progress = Callable[[str, int, int], None]
"""Called before each piece of work: what it is, how many pieces are done, how many there are."""

Step = tuple[str, Callable[[], Ceilings]]
"""A piece of the work: what it is, and what does it."""


def calibrate(machine: Machine, all_reduces: Sequence[AllReduceCurve], progress: Progress) -> Machine:
    """The machine with what is measured on it now in place of what it had; `all_reduces` were measured before."""
    if machine.has_gpus:
        from slipstream.lab.calibrate_gpu import steps

        every = list(steps())
    else:
        every = list(_cpu_steps(machine.cpu.threads or 1))
    parts: list[Ceilings] = []
    for number, (what, measure) in enumerate(every):
        progress(what, number, len(every))
        parts.append(measure())
    progress("measured", len(every), len(every))
    device = machine.devices[0].name if machine.has_gpus else machine.cpu.name
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    text = f"slipstream machine --calibrate on {device}, torch {torch.__version__}, {today}"
    ceilings = Ceilings(
        memory_read=tuple(rate for part in parts for rate in part.memory_read),
        matrix=tuple(rate for part in parts for rate in part.matrix),
        launch=tuple(launch for part in parts for launch in part.launch),
        all_reduce=tuple(all_reduces),
    )
    return replace(machine, ceilings=ceilings, sources={**machine.sources, HERE: Source("measured", text)})


def best_s(run: Callable[[], Any], times: int) -> float:
    """The least seconds of so many runs, after one that warms up."""
    run()
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def name_of(dtype: torch.dtype) -> str:
    """As a machine's matrix rates are called: float32, bfloat16, float8."""
    return str(dtype).removeprefix("torch.").removesuffix("_e4m3fn")


def _cpu_steps(threads: int) -> Iterator[Step]:
    """By threads: one, half of them and all of them."""
    counts = sorted({1, max(1, threads // 2), threads})
    for count in counts:
        yield f"memory, {count} threads", partial(_with_threads, count, _cpu_memory)
    for count in counts:
        for dtype in (torch.float32, torch.bfloat16):
            measure = partial(_with_threads, count, partial(_cpu_matrix, dtype))
            yield f"{name_of(dtype)} products, {count} threads", measure
    yield "small operations", _cpu_launch


def _with_threads(count: int, measure: Callable[[], Ceilings]) -> Ceilings:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return measure()
    finally:
        torch.set_num_threads(before)


def _cpu_memory(count: int = 2**26) -> Ceilings:
    """The fastest of three ways to read 256 MiB, several times a last-level cache."""
    x = torch.ones(count)
    ways: list[Callable[[], Tensor]] = [x.sum, x.max, partial(torch.dot, x, x)]
    best = min(best_s(way, 8) for way in ways)
    return Ceilings(memory_read=(MemoryRead(x.nbytes / best, HERE, torch.get_num_threads()),))


def _cpu_matrix(dtype: torch.dtype, size: int = 2048) -> Ceilings:
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    best = best_s(partial(torch.mm, a, b), 5)
    return Ceilings(matrix=(MatrixRate(name_of(dtype), 2 * size**3 / best, HERE, torch.get_num_threads()),))


def _cpu_launch(calls: int = 2000) -> Ceilings:
    """A torch operation on one number: all overhead."""
    x = torch.zeros(1)

    def run() -> None:
        for _ in range(calls):
            x.add_(1.0)

    return Ceilings(launch=(Launch(False, best_s(run, 8) / calls * 1e6, HERE),))
