"""Ranks of one machine through shared memory: one-shot sums with spinning flags (kernels/csrc/shm.h says how)."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from slipstream.collectives.interface import Backend
from slipstream.collectives.meeting import ANSWER_S, Meeting
from slipstream.kernels.native import native

SLOT_BYTES = 256 * 1024
"""Of each of a rank's two slots; longer messages go in parts. Two slots of two ranks fit into a core's L2 cache."""

TWO_SHOT_BYTES = 1 << 62
"""From this size on a sum is made in two shots: never, unless measured to be faster (see choice.py)."""

SPIN_US, SPIN_CROWDED_US = 2000, 5
"""That a rank looks at a flag without a pause: where each rank has a core for itself, and where it has not."""


class Shm(Backend):
    """Every rank writes its part where all can read it, and sums all parts itself, in rank order, in float32."""

    name = "shm"
    row_invariant = True

    @classmethod
    def unavailable(cls, meeting: Meeting) -> str | None:
        if not meeting.is_one_machine:
            return f"the ranks are on {len(set(meeting.hosts))} machines, and memory is shared within one"
        if meeting.attendance is None:
            return "the ranks cannot see each other's files in /proc: not Linux, another user or another container"
        if native() is None:
            return "it needs slipstream's C++ kernels, which are switched off or could not be built"
        return None

    def __init__(self, meeting: Meeting, two_shot_bytes: int = TWO_SHOT_BYTES) -> None:
        extension, attendance = native(), meeting.attendance
        assert extension is not None
        assert attendance is not None
        self.rank, self.size = meeting.rank, meeting.size
        own = os.memfd_create("slipstream-shm")
        os.ftruncate(own, extension.shm_segment_bytes(SLOT_BYTES))
        key = meeting.fresh_key(self.name)
        addresses = meeting.exchange(f"{key}/segment", f"/proc/{os.getpid()}/fd/{own}")
        segments = [
            own if rank == self.rank else os.open(address, os.O_RDONLY | os.O_CLOEXEC)
            for rank, address in enumerate(addresses)
        ]
        locks = [attendance.file_of(rank) for rank in range(self.size)]
        crowded = self.size > len(os.sched_getaffinity(0))
        spin_us = SPIN_CROWDED_US if crowded else SPIN_US
        self._group: Any = extension.ShmGroup(
            self.rank, segments, locks, SLOT_BYTES, two_shot_bytes, spin_us, int(ANSWER_S * 1e3)
        )
        meeting.exchange(f"{key}/mapped", True)
        for fd in segments:
            os.close(fd)

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._group.all_reduce_(x)
        return x

    def all_reduce_add_rms_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        y: Tensor | None = self._group.all_reduce_add_rms_norm_(x, residual, weight, eps)
        return super().all_reduce_add_rms_norm_(x, residual, weight, eps) if y is None else y

    def all_gather(self, x: Tensor) -> Tensor:
        y: Tensor = self._group.all_gather(x, self.size)
        return y

    def broadcast(self, x: Tensor) -> Tensor:
        self._group.broadcast_(x)
        return x

    def barrier(self) -> None:
        self._group.barrier()

    def sum_in_two_shots_from(self, message_bytes: int) -> None:
        """The size from which a sum is made in two shots; the same on all ranks. The bits stay the same."""
        self._group.set_two_shot_bytes(message_bytes)

    def close(self) -> None:
        self._group.leave()
