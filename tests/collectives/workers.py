"""Rank processes for tests: started once for a module, connected once with each backend, then fed work."""

from __future__ import annotations

import io
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from slipstream.collectives.choice import connect
from slipstream.collectives.group import launch
from slipstream.collectives.interface import Collectives
from slipstream.collectives.meeting import Meeting

Job = Callable[..., Any]
"""job(collectives, *args) on every rank; a function of a module."""


def part(seed: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a rank brings: known to the test as well. Magnitudes differ widely, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-12, 12, shape, generator=generator)
    return x.to(dtype)


def serve(rank: int, size: int, at: str, pipes: list[Connection], names: tuple[str, ...]) -> None:
    meeting = Meeting.join(rank, size, at)
    backends = {name: connect(meeting, name) for name in names}
    while (order := pipes[rank].recv()) is not None:
        name, job, args = order
        answer = io.BytesIO()  # not as tensors: torch would hand their memory over, one file after another
        torch.save(job(backends[name], *args), answer)
        pipes[rank].send(answer.getvalue())
    for backend in backends.values():
        backend.close()


class Workers:
    """The ranks of one group; `run` gives every rank the same job and returns their answers."""

    def __init__(self, size: int, names: tuple[str, ...]) -> None:
        self.size, self.names = size, names
        pairs = [get_context("spawn").Pipe() for _ in range(size)]
        self._ours = [ours for ours, _ in pairs]
        self.ranks = launch(serve, size, ([theirs for _, theirs in pairs], names))

    def run(self, name: str, job: Job, *args: Any, timeout_s: float = 60) -> list[Any]:
        self.ranks.check()
        for pipe in self._ours:
            pipe.send((name, job, args))
        answers = []
        for pipe in self._ours:
            while not pipe.poll(0.5):
                self.ranks.check()
                timeout_s -= 0.5
                assert timeout_s > 0, "a rank hangs"
            answers.append(torch.load(io.BytesIO(pipe.recv())))
        return answers

    def close(self) -> None:
        with self.ranks:
            self.ranks.check()
            for pipe in self._ours:
                pipe.send(None)
            self.ranks.results(30)


def reduced(wire: Collectives, seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return wire.all_reduce(part(seed, wire.rank, shape, dtype)).clone()


def reduced_by_rows(
    wire: Collectives, seed: int, shape: tuple[int, ...], dtype: torch.dtype, rows: int
) -> Tensor:
    """The same sum, `rows` rows in each message."""
    x = part(seed, wire.rank, shape, dtype)
    return torch.cat([wire.all_reduce(some.clone()) for some in x.split(rows)])


def fused(
    wire: Collectives, seed: int, shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The sum's RMSNorm and the new residual; part 100 and 101 of the seed are residual and weight."""
    residual, weight = part(seed, 100, shape, dtype), part(seed, 101, shape[-1:], weight_dtype)
    x = part(seed, wire.rank, shape, dtype)
    return wire.all_reduce_add_rms_norm_(x, residual, weight, 1e-5), residual


def gathered(wire: Collectives, seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return wire.all_gather(part(seed, wire.rank, shape, dtype))


def spread(wire: Collectives, seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return wire.broadcast(part(seed, wire.rank, shape, dtype))
