"""torch.distributed's Gloo: the baseline on CPUs, over sockets, within one machine and between several."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor, distributed
from torch._C._distributed_c10d import PrefixStore

from slipstream.collectives.interface import Backend
from slipstream.collectives.meeting import ANSWER_S, Meeting
from slipstream.errors import RankError

_MOMENTS_S = 0.5

_IDLE = timedelta(days=7)
"""For broadcasts and barriers, in which ranks wait for work; the end of another process still ends the wait."""


class TorchCollectives(Backend):
    """Collectives of one torch process group, and what a failure inside it means."""

    def _use(self, meeting: Meeting, group: Any) -> None:
        self.rank, self.size = meeting.rank, meeting.size
        self._meeting, self._group = meeting, group

    def all_reduce(self, x: Tensor) -> Tensor:
        options = distributed.AllreduceOptions()
        self._run("all_reduce", x, lambda: self._group.allreduce([x], options))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return self._stacked(x).movedim(0, -2).reshape(*x.shape[:-1], self.size * x.shape[-1])

    def broadcast(self, x: Tensor) -> Tensor:
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, _IDLE
        self._run("broadcast", x, lambda: self._group.broadcast([x], options))
        return x

    def barrier(self) -> None:
        options = distributed.BarrierOptions()
        options.timeout = _IDLE
        self._run("barrier", None, lambda: self._group.barrier(options))

    def close(self) -> None:
        self._group.shutdown()

    def _stacked(self, x: Tensor) -> Tensor:
        """Every rank's x along a new first dimension."""
        out = x.new_empty(self.size * x.numel())
        self._run("all_gather", x, lambda: self._group._allgather_base(out, x.reshape(-1)))
        return out.view(self.size, *x.shape)

    def _run(self, operation: str, x: Tensor | None, start: Callable[[], distributed.Work]) -> None:
        if self.size == 1:
            return
        try:
            start().wait()
        except RuntimeError as error:
            raise self._failure(operation, x, str(error)) from error

    def _failure(self, operation: str, x: Tensor | None, reason: str) -> RankError:
        where = (
            operation
            if x is None
            else f"{operation} of {x.nbytes:,} bytes of {x.dtype}".replace("torch.", "")
        )
        if dead := self._dead():
            return RankError(
                f"rank {dead[0]} has died; rank {self.rank} waited for it in {self.name} {where}"
            )
        first = reason.strip().splitlines()[0] if reason.strip() else "no reason given"
        return RankError(
            f"rank {self.rank} could not finish {self.name} {where}: {first} (has another rank left, does it run"
            " something else?)"
        )

    def _dead(self) -> list[int]:
        """The ranks that have ended; a process may be some moments longer in ending than its sockets."""
        ends = time.monotonic() + _MOMENTS_S
        while self._meeting.attendance and time.monotonic() < ends:
            if dead := self._meeting.attendance.dead():
                return dead
            time.sleep(0.01)
        return []


class Gloo(TorchCollectives):
    """Gloo's own all-reduce: its ring adds in an order that depends on where in the message an element lies.

    With two ranks there is one addition, which commutes and is rounded once, in bfloat16 too; with more, neither holds.
    """

    name = "gloo"
    gives_up = (
        "with more than two ranks the order of its sums depends on where in the message an element lies"
    )

    @classmethod
    def unavailable(cls, meeting: Meeting) -> str | None:
        return None if distributed.is_gloo_available() else "this build of torch has no Gloo"

    def __init__(self, meeting: Meeting) -> None:
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=ANSWER_S)
        loopback = meeting.is_one_machine
        device = gloo.create_device(hostname="127.0.0.1") if loopback else gloo.create_default_device()
        options._devices = [device]
        store = PrefixStore(meeting.fresh_key(self.name), meeting.store)
        self._use(meeting, gloo(store, meeting.rank, meeting.size, options))
        self.row_invariant = meeting.size <= 2


class OrderedGloo(Gloo):
    """Gloo's all-gather, then the sum on every rank: in float32, in rank order, rounded once."""

    name = "gloo-ordered"
    gives_up = ""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__(meeting)
        self.row_invariant = True

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self._stacked(x)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)
