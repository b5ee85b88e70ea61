"""Ranks of one machine through shared memory: one-shot sums with spinning flags (kernels/csrc/shm.h says how)."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from slipstream.collectives.interface import Backend
from slipstream.collectives.meeting import ANSWER_S, Meeting
from slipstream.kernels.native import native

SLOT_BYTES = 256 * 1024
"""Of each of a rank's two slots; longer messages go in parts. Two slots of two ranks fit into a core's L2 cache."""

NEVER = 1 << 62
"""A size that no message has."""

_TRIED_BYTES = (32 << 10, 64 << 10, 128 << 10, SLOT_BYTES)
_ROUNDS = 15

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

    def __init__(self, meeting: Meeting, two_shot_bytes: int | None = None) -> None:
        """two_shot_bytes: the size from which sums are made in two shots; None: as measured here and now."""
        extension, attendance = native(), meeting.attendance
        assert extension is not None
        assert attendance is not None
        self.rank, self.size = meeting.rank, meeting.size
        own = os.memfd_create("slipstream-shm")
        os.ftruncate(own, extension.shm_segment_bytes(SLOT_BYTES))
        addresses = meeting.exchange("segment", f"/proc/{os.getpid()}/fd/{own}")
        segments = [
            own if rank == self.rank else os.open(address, os.O_RDONLY | os.O_CLOEXEC)
            for rank, address in enumerate(addresses)
        ]
        locks = [attendance.file_of(rank) for rank in range(self.size)]
        crowded = self.size > len(os.sched_getaffinity(0))
        spin_us = SPIN_CROWDED_US if crowded else SPIN_US
        self._group: Any = extension.ShmGroup(
            self.rank, segments, locks, SLOT_BYTES, NEVER, spin_us, int(ANSWER_S * 1e3)
        )
        meeting.exchange("mapped", True)
        for fd in segments:
            os.close(fd)
        if two_shot_bytes is None:  # ranks that take turns on a core say nothing about either way
            two_shot_bytes = (
                NEVER if crowded else meeting.exchange("two shots", self._two_shots_pay_from())[0]
            )
        self._group.set_two_shot_bytes(two_shot_bytes)

    def _two_shots_pay_from(self) -> int:
        """The least size from which on two shots were faster at every size that was tried."""
        least = NEVER
        for size in reversed(_TRIED_BYTES):
            x = torch.zeros(size // 4)
            us: dict[int, list[float]] = {NEVER: [], 0: []}
            for _ in range(_ROUNDS):
                for two_shot_bytes, times in us.items():
                    self._group.set_two_shot_bytes(two_shot_bytes)
                    self._group.barrier()
                    start = time.perf_counter()
                    self._group.all_reduce_(x)
                    times.append((time.perf_counter() - start) * 1e6)
            if statistics.median(us[0]) > statistics.median(us[NEVER]):
                break
            least = size
        return least

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

    def close(self) -> None:
        self._group.leave()
