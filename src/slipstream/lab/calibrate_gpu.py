"""What a GPU can do at best, timed by events on the device. On the first GPU; the others are taken to be alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from slipstream.lab.calibrate import HERE, Step, best_s, name_of
from slipstream.machine.machine import Ceilings, Launch, MatrixRate, MemoryRead


def steps() -> Iterator[Step]:
    """Memory, matrix products in the number formats that the GPU has, launches."""
    yield "memory", _memory
    dtypes = [torch.bfloat16, torch.float32]
    if torch.cuda.get_device_capability() >= (8, 9):
        dtypes.insert(1, torch.float8_e4m3fn)
    for dtype in dtypes:
        yield f"{name_of(dtype)} products", partial(_matrix, dtype)
    yield "launches", _launches


def event_us(run: Callable[[], Any]) -> float:
    """Microseconds on the device between an event before `run` and one after it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return elapsed_ms * 1e3


def captured(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """`run` as a CUDA graph; it is run once before, for what a first call allocates or connects cannot be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def _best_event_us(run: Callable[[], Any], times: int = 10) -> float:
    run()
    return min(event_us(run) for _ in range(times))


def _memory() -> Ceilings:
    """Reading 2 GiB, many times a cache."""
    x = torch.ones(2**29, device="cuda")
    best = min(_best_event_us(way) for way in (x.sum, x.max))
    return Ceilings(memory_read=(MemoryRead(x.nbytes / best * 1e6, HERE),))


def _matrix(dtype: torch.dtype, size: int = 8192) -> Ceilings:
    """Random values: a product of zeros draws less power, and runs at a higher clock. float32 without TF32."""
    a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device="cuda")
        product = partial(torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.bfloat16)
    else:
        product = partial(torch.mm, a, b)
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        best = _best_event_us(product)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    return Ceilings(matrix=(MatrixRate(name_of(dtype), 2 * size**3 / best * 1e6, HERE),))


def _launches(calls: int = 500) -> Ceilings:
    """Eager: wall time of one of many small kernels, which the host launches slower than they run.

    Captured: what one more node adds to the replay of a graph, from two lengths, so that starting it is not counted.
    """
    x = torch.zeros(1, device="cuda")

    def run(count: int) -> None:
        for _ in range(count):
            x.add_(1.0)

    def eager() -> None:
        run(calls)
        torch.cuda.synchronize()

    eager_us = best_s(eager, 8) / calls * 1e6
    short, long = (_best_event_us(captured(partial(run, count)).replay) for count in (calls, 3 * calls))
    captured_us = max(0.0, (long - short) / (2 * calls))
    return Ceilings(launch=(Launch(False, eager_us, HERE), Launch(True, captured_us, HERE)))
