"""The ranks of a group as threads of one process: what a sharded forward does, without any other process."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import torch

from slipstream.collectives.interface import Collectives


class _Table:
    """What the ranks of one group lay out for each other."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.parts: list[torch.Tensor | None] = [None] * size


class Threads(Collectives):
    """One rank. Sums in float32 in rank order, rounded once; counts what it was asked for."""

    name, row_invariant = "threads", True

    def __init__(self, table: _Table, rank: int, size: int) -> None:
        self._table, self.rank, self.size = table, rank, size
        self.calls: Counter[tuple[str, int]] = Counter()
        """By kind and bytes that a rank contributes."""

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._table.parts[self.rank] = x.clone()
        self._table.barrier.wait(60)
        parts = list(self._table.parts)
        self._table.barrier.wait(60)
        return parts

    def all_reduce(self, x):
        self.calls["all_reduce", x.nbytes] += 1
        assert x.is_contiguous()
        assert x.dtype in (torch.float32, torch.bfloat16)
        parts = self._exchange(x)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(x.dtype)

    def all_gather(self, x):
        self.calls["all_gather", x.nbytes] += 1
        return torch.cat(self._exchange(x), dim=-1)

    def broadcast(self, x):
        return x.copy_(self._exchange(x)[0])

    def barrier(self):
        self._table.barrier.wait(60)


def on_ranks(size, work):
    """work(collectives) on every rank of a group, each in a thread; what each returned, in rank order."""
    table = _Table(size)

    def one(rank):
        try:
            with torch.inference_mode():
                return work(Threads(table, rank, size))
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
        errors = [e for future in futures if (e := future.exception())]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]
