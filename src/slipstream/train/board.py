"""TensorBoard's files, written as the figures come: torch's own writer holds them back, and reports a full disk in a
thread of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path


class Board:
    """One file of scalars."""

    def __init__(self, folder: Path, first: int) -> None:
        """first: the first update to come; what other files of the folder hold from there on does not count.

        Raises ImportError without TensorBoard, and OSError.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        # Files are read in the order of their names.
        self._file = (folder / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}").open("wb")
        self._records = RecordWriter(self._file)
        self._write(Event(step=first, file_version="brain.Event:2"))
        self._write(Event(step=first, session_log=SessionLog(status=SessionLog.START)))

    def put(self, number: int, where: str, figures: Mapping[str, float]) -> None:
        """The figures of an update."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=f"{where}/{name}", simple_value=each) for name, each in figures.items()]
        self._write(Event(step=number, summary=Summary(value=values)))

    def close(self) -> None:
        """Nothing comes after it."""
        self._file.close()

    def _write(self, event: object) -> None:
        event.wall_time = time.time()  # type: ignore[attr-defined]
        self._records.write(event.SerializeToString())  # type: ignore[attr-defined]
        self._file.flush()
