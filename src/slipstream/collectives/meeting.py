"""How the ranks of one group find each other, agree on what they run, and notice one that has died.

    meeting = Meeting.join(rank, size, at=folder)  # a private folder of one machine, or ENVIRONMENT under torchrun
    meeting.agree("the model", name)
    wire = connect(meeting, "shm")

On one machine nothing listens on a network: the store is a file in a folder that only the user can enter. Each rank
holds a lock on an anonymous file of its own, which the kernel lets go of when the process ends, however it ends; the
others reach that file through /proc and try the lock. No name is left behind, for there never was one.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from slipstream.errors import RankError

ENVIRONMENT = "env://"
"""The place of meeting under torchrun: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say the rest."""

PATIENCE_S = 120.0
"""That a rank waits for the others to come: they may be importing, loading or building kernels."""

ANSWER_S = 8.0
"""That a rank waits inside a reduction for another one that lives: with the rest of its way out, below ten seconds."""

_GLANCE_S = 0.2


def under_torchrun() -> tuple[int, int] | None:
    """(rank, size) where torchrun started this process, None elsewhere."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Attendance:
    """Who is still alive, among the ranks of one machine. Linux: it needs memfd_create, flock and /proc."""

    def __init__(self) -> None:
        self._own = os.memfd_create("slipstream-rank")
        fcntl.flock(self._own, fcntl.LOCK_EX)
        self._others: dict[int, int] = {}

    @property
    def address(self) -> str:
        """Where the other processes of this user find the lock."""
        return f"/proc/{os.getpid()}/fd/{self._own}"

    def watch(self, rank: int, address: str) -> None:
        """Keeps an eye on another rank from now on. OSError: its file cannot be reached."""
        self._others[rank] = os.open(address, os.O_RDONLY | os.O_CLOEXEC)

    def file_of(self, rank: int) -> int:
        """The descriptor whose lock the rank holds while it lives; -1 for this process itself."""
        return self._others.get(rank, -1)

    def dead(self) -> list[int]:
        """The ranks that have ended."""
        return [rank for rank, fd in sorted(self._others.items()) if _is_free(fd)]

    def close(self) -> None:
        for fd in (self._own, *self._others.values()):
            os.close(fd)
        self._others.clear()


def _is_free(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


@dataclass
class Meeting:
    """One rank's side of the group: its number, the store that all share, and who else is there."""

    rank: int
    size: int
    store: Store
    hosts: Sequence[str] = ()
    attendance: Attendance | None = None
    """None where the ranks are not all on one machine."""
    _check: Callable[[], None] = field(default=lambda: None, repr=False)
    _keys: int = field(default=0, repr=False)

    @classmethod
    def join(cls, rank: int, size: int, at: str | Path, check: Callable[[], None] = lambda: None) -> Meeting:
        """Waits until all ranks are here, and compares their versions.

        `check` is called while waiting; it raises where the caller knows of a rank that will not come.
        """
        if at == ENVIRONMENT:
            store = next(rendezvous(ENVIRONMENT, rank, size))[0]
        else:
            store = FileStore(str(Path(at) / "store"), size)
        it = cls(rank, size, PrefixStore("slipstream", store), _check=check)
        it.hosts = it.exchange("host", _host())
        versions = {"slipstream": metadata.version("slipstream"), "torch": torch.__version__}
        it.agree("the versions", versions)
        if len(set(it.hosts)) == 1 and sys.platform == "linux":
            it.attendance = it._take_attendance()
        return it

    @property
    def is_one_machine(self) -> bool:
        return len(set(self.hosts)) == 1

    def _take_attendance(self) -> Attendance | None:
        attendance = Attendance()
        addresses = self.exchange("attendance", attendance.address)
        reached = True
        for rank, address in enumerate(addresses):
            if rank != self.rank:
                try:
                    attendance.watch(rank, address)
                except OSError:  # another user, or another container, of the same machine
                    reached = False
        if all(self.exchange("reached", reached)):
            return attendance
        attendance.close()
        return None

    def exchange(self, key: str, value: Any) -> list[Any]:
        """Every rank's value (plain JSON), in rank order; all ranks make the same exchanges in the same order."""
        key = self.fresh_key(key)
        self.store.set(f"{key}/{self.rank}", json.dumps(value))
        return [json.loads(self._get(f"{key}/{rank}", rank)) for rank in range(self.size)]

    def agree(self, what: str, value: Any) -> None:
        """Raises on every rank where they do not all bring the same value (plain JSON)."""
        values = self.exchange(what, value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise RankError(
                    f"the ranks disagree about {what}: rank 0 has {values[0]}, rank {rank} has {other}"
                )

    def fresh_key(self, name: str) -> str:
        """A key that was not used yet; the ranks must ask for theirs in the same order."""
        self._keys += 1
        return f"{self._keys} {name}"

    def _get(self, key: str, rank: int) -> bytes:
        ends = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.store.wait([key], timedelta(seconds=_GLANCE_S))
                value: bytes = self.store.get(key)
                return value
            except RuntimeError as error:
                self._check()
                if self.attendance and (dead := self.attendance.dead()):
                    raise RankError(f"rank {dead[0]} has died while the ranks were meeting") from None
                if time.monotonic() > ends:
                    raise RankError(
                        f"rank {rank} of {self.size} did not come within {PATIENCE_S:.0f} s"
                    ) from error

    def close(self) -> None:
        if self.attendance:
            self.attendance.close()
            self.attendance = None


def _host() -> str:
    """What is the same on two ranks exactly when they run on the same machine, since its last start."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"
