"""Reads SQLite exports of Nsight Systems (`nsys export --type sqlite`).

Tables and columns are those of NVIDIA's own description of the export ("Nsight Systems SQLite Schema Reference"). Times
are nanoseconds. Texts stand in StringIds. Rows come in no promised order. A graph replay appears as its kernels (node
mode, `--cuda-graph-trace=node`) or as one row of CUPTI_ACTIVITY_KIND_GRAPH_TRACE (graph mode), which hides them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.lab.traces.timeline import Columns, Names, Timeline

Progress = Callable[[int, int], None]

GRAPH_NAME = "whole graph replay"
_KERNEL, _GRAPH = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_MEMCPY, _MEMSET = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
_RUNTIME, _NVTX = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
_COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
_RANGES = (34, 59, 60, 70)
"""NVTX event types that have an end: domain and global ranges, by push and pop or by start and end."""
_BATCH = 100_000


def is_sqlite(path: Path) -> bool:
    """Whether a file is an SQLite database."""
    with path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\x00"


def read_nsys(path: Path, progress: Progress = lambda done, total: None) -> list[Timeline]:
    """The ranks in an export: one for each device. Raises SlipstreamError for what is no such export."""
    try:
        with sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True) as connection:
            return _Reader(path, connection, progress).read()
    except sqlite3.DatabaseError as error:
        raise SlipstreamError(f"{path} is damaged or not an Nsight Systems export: {error}") from None


class _Reader:
    def __init__(self, path: Path, connection: sqlite3.Connection, progress: Progress) -> None:
        self.path, self.connection, self.progress = path, connection, progress
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        self.tables = {row[0] for row in names}
        self.names, self.threads = Names(), Names()
        self.gpu: dict[int, Columns] = {}
        self.grid: dict[int, list[int]] = {}
        self.graphs: dict[int, int] = {}

    def read(self) -> list[Timeline]:
        """The timelines."""
        if not self.tables & {_KERNEL, _GRAPH}:
            raise SlipstreamError(
                f"{self.path} holds no GPU kernels: it is not an Nsight Systems export with CUDA traced"
            )
        self._strings = dict(self.connection.execute("SELECT id, value FROM StringIds"))
        steps: list[Callable[[], None]] = [self._kernels, self._graph_replays, self._copies]
        calls, marks = Columns(), Columns()
        steps += [lambda: self._calls(calls), lambda: self._marks(marks)]
        for index, step in enumerate(steps):
            self.progress(index, len(steps))
            step()
        if not self.gpu:
            raise SlipstreamError(f"{self.path} holds no GPU kernels")
        host = [each.events()[0] for each in (calls, marks, Columns())]
        zero = min(min(each.start) for each in (*self.gpu.values(), calls, marks) if each.start)
        for events in host:
            events.start -= zero
            events.end -= zero
        devices = self._device_names()
        result = []
        for device, columns in sorted(self.gpu.items()):
            gpu, order = columns.events(zero)
            result.append(
                Timeline(
                    source=str(self.path),
                    names=self.names.texts,
                    gpu=gpu,
                    grid=np.array(self.grid[device], dtype=np.int64)[order],
                    calls=host[0],
                    marks=host[1],
                    frames=host[2],
                    epoch_us=zero,
                    rank=device if len(self.gpu) > 1 else None,
                    device=devices.get(device, ""),
                    whole_graphs=self.graphs.get(device, 0),
                )
            )
        return result

    def _rows(self, table: str, columns: str) -> Iterator[dict[str, Any]]:
        """The rows of a table as dicts; columns that this version of the export lacks are None."""
        if table not in self.tables:
            return
        wanted = columns.split()
        present = {row[1] for row in self.connection.execute(f"PRAGMA table_info({table})")}
        chosen = [f'"{name}"' if name in present else "NULL" for name in wanted]
        found = self.connection.execute(f"SELECT {', '.join(chosen)} FROM {table}")
        while rows := found.fetchmany(_BATCH):
            for values in rows:
                row = dict(zip(wanted, values, strict=True))
                if "end" not in row or (row["end"] and row["end"] >= row["start"]):  # 0: no time was recorded
                    yield row

    def _text(self, number: Any) -> str:
        return str(self._strings.get(number, "?"))

    def _add(self, row: dict[str, Any], name: str, grid: int) -> None:
        device = int(row["deviceId"] or 0)
        columns = self.gpu.setdefault(device, Columns())
        self.grid.setdefault(device, []).append(grid)
        columns.add(
            row["start"] / 1e3,
            row["end"] / 1e3,
            self.names.number(name),
            int(row["streamId"] or 0),
            int(row["correlationId"] if row["correlationId"] is not None else -1),
        )

    def _kernels(self) -> None:
        wanted = "start end deviceId streamId correlationId demangledName shortName gridX"
        for row in self._rows(_KERNEL, wanted):
            name = row["demangledName"] if row["demangledName"] is not None else row["shortName"]
            self._add(row, self._text(name), int(row["gridX"] if row["gridX"] is not None else -1))

    def _graph_replays(self) -> None:
        for row in self._rows(_GRAPH, "start end deviceId streamId correlationId graphId"):
            device = int(row["deviceId"] or 0)
            self.graphs[device] = self.graphs.get(device, 0) + 1
            self._add(row, f"{GRAPH_NAME} {row['graphId']}", -1)

    def _copies(self) -> None:
        for row in self._rows(_MEMCPY, "start end deviceId streamId correlationId copyKind"):
            self._add(row, f"Memcpy {_COPY_KINDS.get(row['copyKind'], '')}".rstrip(), -1)
        for row in self._rows(_MEMSET, "start end deviceId streamId correlationId"):
            self._add(row, "Memset", -1)

    def _calls(self, calls: Columns) -> None:
        for row in self._rows(_RUNTIME, "start end nameId globalTid correlationId"):
            # The export appends the version of the function's signature: cudaLaunchKernel_v7000.
            name = self._text(row["nameId"]).split("_v")[0]
            number = self.names.number(name)
            thread = self.threads.number(str(row["globalTid"]))
            correlation = int(row["correlationId"] if row["correlationId"] is not None else -1)
            calls.add(row["start"] / 1e3, row["end"] / 1e3, number, thread, correlation)

    def _marks(self, marks: Columns) -> None:
        for row in self._rows(_NVTX, "start end eventType text textId globalTid"):
            if row["eventType"] not in _RANGES:
                continue
            text = row["text"] if row["text"] is not None else self._text(row["textId"])
            thread = self.threads.number(str(row["globalTid"]))
            marks.add(row["start"] / 1e3, row["end"] / 1e3, self.names.number(str(text)), thread)

    def _device_names(self) -> dict[int, str]:
        return {int(row["id"]): str(row["name"]) for row in self._rows("TARGET_INFO_GPU", "id name")}
