"""The ranks of one engine: started here or by torchrun, brought together, and ended together.

On one machine the caller is rank 0 and starts the others. Under torchrun every process makes the same Engine; in those
of rank 1 and above it follows rank 0 and does not return.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict

import torch

from slipstream import knobs
from slipstream.collectives.choice import connect
from slipstream.collectives.group import Ranks, launch
from slipstream.collectives.interface import Collectives, Solo
from slipstream.collectives.meeting import ENVIRONMENT, Meeting, under_torchrun
from slipstream.draft.drafter import Drafter
from slipstream.engine.followers import Leader, follow
from slipstream.engine.rank import Rank, Settings
from slipstream.engine.runner import Runner
from slipstream.errors import ModelError, RankError, SlipstreamError
from slipstream.kernels.native import native

_CLOSING_S = 5.0
_CAUSE_S = 1.0
"""Within that the system says how a process ended, once the others have noticed that it did."""


class Group:
    """Rank 0's side: its own part, those who follow it, and what becomes of them; here it is alone."""

    def __init__(self, settings: Settings) -> None:
        self.collectives: Collectives = Solo()
        self.rank = Rank(settings, self.collectives, settings.device)
        self.runner: Runner = self.rank.runner

    @staticmethod
    def of(settings: Settings, threads: int | None) -> Group:
        """Starts and meets the other ranks, where there are any, and loads this rank's part of the model.

        threads: of each rank; default: an equal share of the cores. Raises SlipstreamError.
        """
        return Group(settings) if settings.tp == 1 else _SeveralRanks(settings, threads)

    def use(self, drafter: Drafter | None) -> None:
        """Drafts with this one from now on, on every rank. SlipstreamError: it cannot be; the old one stays."""
        self.rank.use(drafter)

    def rest(self) -> None:
        """There is nothing to do for now. RankError: the ranks do not hold the same texts."""

    @property
    def notes(self) -> list[str]:
        """What the user should know about how the ranks exchange."""
        own = self.collectives
        if own.is_lossy:
            return [f"the all-reduce {own.name} rounds what it sends: texts differ from those of one rank"]
        if not own.row_invariant:
            return [
                f"the all-reduce {own.name} adds in an order that depends on the message: a speculative text may differ"
                " from the plain one where two tokens are about as likely"
            ]
        return []

    def watching(self) -> AbstractContextManager[None]:
        """Around what needs the other ranks: when one fails all end, and the error says which it was and where."""
        return nullcontext()

    def close(self) -> None:
        """Ends the other ranks. What needs them is an error from now on."""


class _SeveralRanks(Group):
    def __init__(self, settings: Settings, threads: int | None) -> None:
        number, here = _place(settings)
        threads = threads or max(1, cores() // here)
        torch.set_num_threads(threads)
        native()  # built once, before all ranks want it
        self._failure: str | None = None
        self._ranks: Ranks | None = None
        self._meeting: Meeting | None = None
        self.collectives = Solo()
        try:
            at = ENVIRONMENT
            if not under_torchrun():
                self._ranks = launch(_follow, settings.tp, (settings,), first=1, threads=threads)
                at = self._ranks.at
            self._meeting = Meeting.join(number, settings.tp, at, self._check)
            self.collectives, control, self.rank = _enter(self._meeting, settings)
        except RankError as error:
            ended = self._ended(error)
            # Every rank has this error, and one of them says it.
            raise (SlipstreamError(str(ended)) if number else ended) from None
        except BaseException:
            self._end()
            raise
        if number:
            try:
                follow(self.rank, control)
            finally:
                self._end()
            raise SystemExit(0)
        self.runner = self._leader = Leader(control, self.rank)

    def use(self, drafter: Drafter | None) -> None:
        self._leader.use(drafter)

    def rest(self) -> None:
        self._leader.rest()

    @contextmanager
    def watching(self) -> Iterator[None]:
        if self._failure:
            raise RankError(self._failure)
        try:
            yield
        except RankError as error:
            raise self._ended(error) from None
        except SlipstreamError:
            raise
        except (
            BaseException
        ):  # Ctrl-C, say: the others are in the middle of something that this rank has left
            self._failure = (
                "the ranks are out of step, as rank 0 was interrupted; the engine must be made again"
            )
            self._end()
            raise

    def close(self) -> None:
        if self._failure is None:
            self._failure = "the engine is closed"
            with suppress(RankError):  # they end all the same
                self._leader.close()
                if self._ranks:
                    self._ranks.results(_CLOSING_S)
            self._end()

    def _check(self) -> None:
        if self._ranks:
            self._ranks.check()

    def _ended(self, error: RankError) -> RankError:
        """Ends all ranks; the error that says why, with the cause where it is known."""
        self._failure, ends = str(error), time.monotonic() + _CAUSE_S
        try:
            while self._ranks and time.monotonic() < ends:
                self._ranks.check()
                time.sleep(0.01)
        except RankError as cause:
            if str(cause) not in self._failure:
                self._failure = f"{cause} ({error})"
        self._end()
        return RankError(self._failure)

    def _end(self) -> None:
        if self._ranks:
            self._ranks.close()
        self.collectives.close()
        if self._meeting:
            self._meeting.close()
        self._ranks = self._meeting = None


def cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _place(settings: Settings) -> tuple[int, int]:
    """This process's rank, and how many ranks its machine runs. Raises SlipstreamError where these cannot run."""
    if multiprocessing.parent_process() is not None and multiprocessing.current_process().name.startswith(
        "slipstream"
    ):
        raise SlipstreamError(
            "a rank came upon another engine with ranks of its own: in a script that is run, what makes the engine"
            " stands below if __name__ == '__main__'"
        )
    started = under_torchrun()
    if started and started[1] != settings.tp:
        raise SlipstreamError(
            f"torchrun started {started[1]} ranks, but tp is {settings.tp}: give both one number"
        )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", settings.tp)) if started else settings.tp
    if settings.device == "cpu" and here > cores() and not knobs.may_share_cores():
        raise SlipstreamError(
            f"tp is {here} on a machine with {cores()} cores; ranks that share a core wait for each other"
            " (SLIPSTREAM_SHARE_CORES=1 allows it)"
        )
    if settings.device != "cpu" and here > torch.cuda.device_count():
        raise SlipstreamError(
            f"tp is {here}, but torch can use {torch.cuda.device_count()} GPUs on this machine"
        )
    return started[0] if started else 0, here


def _enter(meeting: Meeting, settings: Settings) -> tuple[Collectives, Collectives, Rank]:
    """What every rank does first: the collectives, those for messages, and its part of the model."""
    meeting.agree("the settings", asdict(settings))
    device = settings.device
    if device != "cpu":
        device = f"cuda:{os.environ.get('LOCAL_RANK', meeting.rank)}"
        torch.cuda.set_device(device)
    collectives = connect(meeting, settings.all_reduce, device.split(":")[0])
    control = collectives if device == "cpu" else connect(meeting, "gloo")
    rank, error = None, ""
    try:
        rank = Rank(settings, collectives, device)
    except SlipstreamError as refused:
        error = str(refused)
    control.barrier()  # waits as long as the slowest loads, and no longer than all live
    for number, line in enumerate(meeting.exchange("loading", error)):
        if line:
            raise ModelError(line if line == error else f"rank {number}: {line}")
    assert rank is not None
    meeting.agree("the model's shape", repr(rank.model.shape))
    return collectives, control, rank


def _follow(rank: int, size: int, at: str, settings: Settings) -> None:
    """The work of a rank that was started here."""
    meeting = Meeting.join(rank, size, at)
    collectives, control, own = _enter(meeting, settings)
    follow(own, control)
    collectives.close()
    meeting.close()
