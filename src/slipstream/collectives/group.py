"""Starting the ranks of one machine, and ending them: all together, within seconds, whatever happens to one.

    with launch(work, size=2, args=(model,)) as ranks:  # work(rank, size, at, *args), a function of a module
        print(ranks.results())

With `first=1` the caller is rank 0 itself, and joins with `Meeting.join(0, size, ranks.at, ranks.check)`.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from slipstream.errors import RankError, SlipstreamError

_GRACE_S = 1.5
"""After one rank has said that another one failed: for that other to say why."""

Work = Callable[..., Any]
"""work(rank, size, at, *args); `at` is for `Meeting.join`."""


class Ranks:
    """The running processes of one group; a context manager that leaves none behind."""

    def __init__(self, work: Work, size: int, args: Sequence[Any], first: int, threads: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="slipstream-")
        self.at = self._folder.name
        self.size = size
        self._answers: dict[int, Any] = {}
        self._pipes: dict[int, Connection] = {}
        self._processes: dict[int, SpawnProcess] = {}
        context = multiprocessing.get_context("spawn")
        try:
            for rank in range(first, size):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (work, rank, size, self.at, tuple(args), threads, theirs)
                process = context.Process(
                    target=_enter, args=arguments, name=f"slipstream rank {rank}", daemon=True
                )
                process.start()
                theirs.close()
                self._processes[rank], self._pipes[rank] = process, ours
        except BaseException:
            self.close()
            raise

    def results(self, timeout_s: float | None = None) -> list[Any]:
        """What each rank's work returned, in rank order, once all are done; RankError if one failed or died."""
        ends = None if timeout_s is None else time.monotonic() + timeout_s
        self.check()
        while len(self._answers) < len(self._processes):
            self._collect(ends)
            self.check()
        return [self._answers[rank] for rank in sorted(self._processes)]

    def check(self) -> None:
        """Raises RankError if a rank has failed or died. Costs microseconds."""
        self._collect(time.monotonic())
        ends = time.monotonic() + _GRACE_S
        while (failures := self._failures()) and all(each.is_consequence for each in failures):
            if len(self._answers) == len(self._processes) or time.monotonic() > ends:
                break
            self._collect(ends)
        if failures:
            self.close()
            raise RankError(min(failures, key=lambda each: each.is_consequence).line)

    def _failures(self) -> list[_Failure]:
        """In the order in which they came: the first one is the nearest to the cause."""
        return [answer for answer in self._answers.values() if isinstance(answer, _Failure)]

    def _collect(self, ends: float | None) -> None:
        """Takes in what has come, waiting for the next answer until `ends` (monotonic seconds)."""
        waiting = {pipe: rank for rank, pipe in self._pipes.items() if rank not in self._answers}
        for pipe in wait(list(waiting), None if ends is None else max(0.0, ends - time.monotonic())):
            rank = waiting[pipe]  # type: ignore[index]
            try:
                self._answers[rank] = self._pipes[rank].recv()
            except EOFError:
                process = self._processes[rank]
                process.join(_GRACE_S)
                self._answers[rank] = _Failure(f"rank {rank} {_how_it_ended(process.exitcode)}", False)

    def close(self) -> None:
        """Ends what still runs."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes.values():
            pipe.close()
        self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Failure:
    """Why a rank did not finish; a consequence is what it saw of another rank's trouble."""

    def __init__(self, line: str, is_consequence: bool) -> None:
        self.line, self.is_consequence = line, is_consequence


def launch(work: Work, size: int, args: Sequence[Any] = (), *, first: int = 0, threads: int = 1) -> Ranks:
    """Starts ranks `first` to size - 1 of a group on this machine, each calling work(rank, size, at, *args).

    work: a function of a module, and args and its result whatever can be pickled. threads: torch's, in each rank.
    """
    return Ranks(work, size, args, first, threads)


def _how_it_ended(status: int | None) -> str:
    if status is not None and status < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status} before it was done"


def _enter(
    work: Work, rank: int, size: int, at: str, args: tuple[Any, ...], threads: int, pipe: Connection
) -> None:
    """The first function of a rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the starting process ends the ranks
    threading.Thread(target=_end_with_parent, args=(rank, at), daemon=True).start()
    import torch

    torch.set_num_threads(threads)
    try:
        answer: Any = work(rank, size, at, *args)
    except SlipstreamError as error:
        answer = _Failure(f"{error}", isinstance(error, RankError))
    except BaseException as error:
        if os.environ.get("SLIPSTREAM_DEBUG"):
            import traceback

            traceback.print_exc()
        answer = _Failure(f"rank {rank} failed: {type(error).__name__}: {error}", False)
    try:
        pipe.send(answer)
        pipe.close()
    except BrokenPipeError:
        _end_alone(rank, at, answer.line if isinstance(answer, _Failure) else "")


def _end_with_parent(rank: int, at: str) -> None:
    """A rank whose starting process has gone has nobody to work for."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    parent.join()
    time.sleep(2 * _GRACE_S)  # a rank in a collective has a better line to say
    _end_alone(rank, at, "")


def _end_alone(rank: int, at: str, line: str) -> None:
    """Cleans up what the process that started this one would have cleaned up, had it not been killed."""
    shutil.rmtree(at, ignore_errors=True)
    if rank == 1:  # one says it for all
        print(f"error: {line or 'the process that started the ranks has ended'}", file=sys.stderr, flush=True)
    os._exit(1)
