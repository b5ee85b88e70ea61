"""Reads traces of the torch profiler (Kineto's Chrome JSON), plain or gzipped, piece by piece.

A trace is one object with an array of events that can be gigabytes long. Pieces of it are cut where one event ends
and the next begins and are decoded by msgspec into only the fields that are used; what is left at the end is, with the
head, a small JSON document that carries the metadata. So memory follows what is kept, not the size of the file.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.lab.traces.kernels import collective_kind
from slipstream.lab.traces.timeline import Columns, Message, Names, Timeline

Progress = Callable[[int, int], None]
"""Called now and then: bytes of the file read, and its size."""

BLOCK_BYTES = 8 << 20
_HEAD = re.compile(rb'"traceEvents"\s*:\s*\[')
_CUT = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|args|dur|id)")')
_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_CALLS = {"cuda_runtime", "cuda_driver", "runtime", "driver"}
_MARKS = {"user_annotation"}
_FRAMES = {"python_function", "cpu_op", "operator"}
_MATMULS = {"aten::mm", "aten::addmm", "aten::linear", "aten::matmul"}
_ITEM_BYTES = {
    "float": 4,
    "int": 4,
    "half": 2,
    "bfloat16": 2,
    "float16": 2,
    "double": 8,
    "long": 8,
    "float32": 4,
}


class _Args(msgspec.Struct, gc=False):
    """What is used of an event's arguments; producers disagree about types, so anything is let in."""

    device: Any = None
    stream: Any = None
    correlation: Any = None
    grid: Any = None
    collective: Any = msgspec.field(default=None, name="Collective name")
    elements: Any = msgspec.field(default=None, name="In msg nelems")
    group_size: Any = msgspec.field(default=None, name="Group size")
    dtype: Any = None
    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    name: Any = ""
    cat: Any = None
    ts: Any = None
    dur: Any = 0.0
    pid: Any = 0
    tid: Any = 0
    args: _Args | None = None


class _Document(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")
    distributed: Any = msgspec.field(default=None, name="distributedInfo")
    devices: Any = msgspec.field(default=None, name="deviceProperties")
    base_ns: Any = msgspec.field(default=0, name="baseTimeNanoseconds")
    with_stack: Any = 0


_events = msgspec.json.Decoder(list[_Event])
_document = msgspec.json.Decoder(_Document)


def read_kineto(path: Path, progress: Progress = lambda done, total: None) -> list[Timeline]:
    """The ranks in a file: one for each device that ran kernels. Raises SlipstreamError for what is no trace."""
    reader = _Reader(str(path))
    rest = b""
    head: bytes | None = None
    try:
        for block in _blocks(path, progress):
            rest += block
            if head is None:
                head = _head(rest)
                if head is None:
                    if len(rest) > 8 * BLOCK_BYTES:
                        break
                    continue
                rest = rest[len(head) :]
            rest = reader.take_whole_events(rest)
        if head is None:
            raise SlipstreamError(f"{path} is not a trace: it holds no traceEvents")
        document = _last(head, rest)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SlipstreamError(f"{path} is cut off or damaged: {error}; copy it again") from None
    except UnicodeDecodeError:
        raise SlipstreamError(f"{path} is not a trace: it is not JSON") from None
    except msgspec.DecodeError as error:
        where = "ends too early or is not JSON" if reader.read else "is not a trace: it is not JSON"
        raise SlipstreamError(f"{path} {where} ({error})") from None
    reader.add(document.events)
    return reader.timelines(document)


def _blocks(path: Path, progress: Progress) -> Iterator[bytes]:
    """The file's text, unpacked."""
    total = path.stat().st_size
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        stream: IO[bytes] = gzip.GzipFile(fileobj=raw) if packed else raw  # type: ignore[assignment]
        while block := stream.read(BLOCK_BYTES):
            progress(raw.tell(), max(total, 1))
            yield block


def _head(text: bytes) -> bytes | None:
    """Everything up to the first event; None while it has not come yet."""
    if text.lstrip()[:1] == b"[":
        return text[: text.index(b"[") + 1]
    found = _HEAD.search(text)
    return text[: found.end()] if found else None


def _last(head: bytes, rest: bytes) -> _Document:
    """The events that are left, with the metadata that stand before and after the array."""
    whole = head + rest
    if (
        head.lstrip()[:1] == b"["
    ):  # Chrome's other format: the array alone, of which even the end may be missing
        text = whole.rstrip().rstrip(b",")
        return _Document(_events.decode(text if text.endswith(b"]") else text + b"]"))
    return _document.decode(whole)


class _Reader:
    """Sorts events into columns, one set a device."""

    def __init__(self, source: str) -> None:
        self.source, self.read = source, 0
        self.names = Names()
        self.gpu: dict[int, Columns] = {}
        self.grid: dict[int, list[int]] = {}
        self.messages: dict[int, dict[int, Message]] = {}
        self.calls, self.marks, self.frames = Columns(), Columns(), Columns()
        self.rows: list[tuple[float, float, int]] = []
        self._threads = Names()

    def take_whole_events(self, text: bytes) -> bytes:
        """Reads the events that are complete and returns what is left."""
        cut = None
        for step in (1 << 16, 1 << 20, len(text)):  # near the end, as a rule
            begin = max(0, len(text) - step)
            for found in _CUT.finditer(text, begin):
                cut = found
            if cut is not None or begin == 0:
                break
        if cut is None:
            return text
        try:
            events = _events.decode(b"[" + text[: cut.start() + 1] + b"]")
        except msgspec.DecodeError:
            return text  # the cut fell inside an event, or the array has ended: with more text it shows
        self.add(events)
        return text[cut.end() :]

    def add(self, events: list[_Event]) -> None:
        """Sorts them in."""
        number, thread_of = self.names.number, self._threads.number
        for event in events:
            self.read += 1
            if event.ph != "X" or event.cat is None:
                continue
            kind = str(event.cat).lower()
            try:
                start = float(event.ts)
                end = start + float(event.dur)
            except (TypeError, ValueError):
                continue
            name, args = str(event.name), event.args
            if kind in _GPU:
                self._add_gpu(start, end, name, args or _Args(), event)
                continue
            thread = thread_of(f"{event.pid}/{event.tid}")
            if kind in _CALLS:
                self.calls.add(start, end, number(name), thread, _int(args.correlation if args else None))
            elif kind in _MARKS:
                self.marks.add(start, end, number(name), thread)
            elif kind in _FRAMES:
                self.frames.add(start, end, number(name), thread)
                if args is not None and name in _MATMULS and args.dims:
                    rows = _rows(args.dims)
                    if rows is not None:
                        self.rows.append((start, thread, rows))

    def _add_gpu(self, start: float, end: float, name: str, args: _Args, event: _Event) -> None:
        device = _int(args.device)
        if device not in self.gpu:
            self.gpu[device], self.grid[device], self.messages[device] = Columns(), [], {}
        columns = self.gpu[device]
        if args.collective:
            self.messages[device][len(columns.start)] = Message(
                collective_kind(str(args.collective)),
                _bytes(args.elements, args.dtype),
                _int(args.group_size) if args.group_size is not None else None,
            )
        stream = _int(args.stream) if args.stream is not None else _int(event.tid)
        columns.add(start, end, self.names.number(name), stream, _int(args.correlation))
        grid = args.grid
        self.grid[device].append(_int(grid[0]) if isinstance(grid, list) and grid else -1)

    def timelines(self, document: _Document) -> list[Timeline]:
        """One for each device; the zero is the first event of all."""
        if not self.gpu:
            raise SlipstreamError(
                f"{self.source} holds no GPU kernels"
                + ("; profile with the CUDA activity on" if self.read else ": it is empty")
            )
        columns = [self.calls, self.marks, self.frames, *self.gpu.values()]
        zero = min(min(each.start) for each in columns if each.start)
        base_ns = document.base_ns if isinstance(document.base_ns, int | float) else 0
        host = [each.events(zero)[0] for each in (self.calls, self.marks, self.frames)]
        about = document.distributed if isinstance(document.distributed, dict) else {}
        result = []
        for device, each in sorted(self.gpu.items()):
            gpu, order = each.events(zero)
            place = {int(old): new for new, old in enumerate(order)} if self.messages[device] else {}
            result.append(
                Timeline(
                    source=self.source,
                    names=self.names.texts,
                    gpu=gpu,
                    grid=np.array(self.grid[device], dtype=np.int64)[order],
                    calls=host[0],
                    marks=host[1],
                    frames=host[2],
                    epoch_us=base_ns / 1e3 + zero,
                    rank=about.get("rank") if len(self.gpu) == 1 else device,
                    world_size=about.get("world_size"),
                    device=_device_name(document.devices),
                    messages={place[old]: message for old, message in self.messages[device].items()},
                    row_shapes=[(start - zero, thread, rows) for start, thread, rows in self.rows],
                    with_stack=bool(document.with_stack),
                )
            )
        return result


def _device_name(devices: Any) -> str:
    if isinstance(devices, list) and devices and isinstance(devices[0], dict):
        return str(devices[0].get("name", ""))
    return ""


def _int(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return -1


def _bytes(elements: Any, dtype: Any) -> int | None:
    size = _ITEM_BYTES.get(str(dtype).lower())
    return int(elements) * size if size and isinstance(elements, int | float) else None


def _rows(dims: msgspec.Raw) -> int | None:
    """The rows of the first operand that is a matrix: [rows, K], or [batch, rows, K] of one piece."""
    try:
        shapes = msgspec.json.decode(dims)
        shape = next(each for each in shapes if isinstance(each, list) and len(each) >= 2)
        rows = 1
        for size in shape[:-1]:
            rows *= int(size)
    except (msgspec.DecodeError, StopIteration, TypeError, ValueError):
        return None
    return rows
