"""A jsonl file that grows a batch at a time and can be continued after any end, with its settings in FILE.json."""

from __future__ import annotations

import fcntl
import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.errors import DataError

Settings = Mapping[str, str | int | float | bool | None]
_MOST_LINES = 1000
"""More than one conversation has."""


class DataFile:
    """An open file of lines, each of which has an "index": that of the conversation it came from.

    Only one process can have it open. Used as a context manager; all that was appended stays, however it ends.
    """

    def __init__(self, path: Path, settings: Settings, *, overwrite: bool = False) -> None:
        """Opens or begins a file; a last line that was not finished is cut off.

        overwrite: begin anew whatever is there. Raises DataError when the file was made with other settings or by
        something else, when another process writes it, and when it cannot be written.
        """
        self.path, self._beside = path, path.with_name(path.name + ".json")
        self.lines = 0
        """Whole lines that were there."""
        self.last_index = -1
        """Of the last line; -1 in an empty file."""
        self.last_count = 0
        """How many lines at the end have that index."""
        if path.exists() and not path.is_file():
            raise DataError(f"{path} is not a file that can be appended to")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise self._failed(error) from None
        try:
            self._begin(settings, overwrite)
        except OSError as error:
            self.close()
            raise self._failed(error) from None
        except DataError:
            self.close()
            raise

    def __enter__(self) -> DataFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives the file free for other processes."""
        os.close(self._fd)

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Writes whole lines and hands them to the system. Raises DataError when that fails; no half line is left."""
        text = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)
        data, written = memoryview(text.encode()), 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as error:
            torn = bytes(data[:written])
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - (len(torn) - torn.rfind(b"\n") - 1))
            raise DataError(
                f"{self.path} could not grow ({error.strerror or error}); what is in it is kept, and the same command"
                " continues there"
            ) from None

    def _begin(self, settings: Settings, overwrite: bool) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{self.path} is being written by another process") from None
        if overwrite:
            os.ftruncate(self._fd, 0)
        if os.fstat(self._fd).st_size:
            self._check(settings)
            self._continue()
            return
        unfinished = self._beside.with_name(f".{self._beside.name}.part")
        unfinished.write_text(json.dumps(dict(settings), indent=1) + "\n", encoding="utf-8")
        unfinished.replace(self._beside)

    def _check(self, settings: Settings) -> None:
        advice = "take another --out, or begin anew with --overwrite"
        try:
            before = json.loads(self._beside.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DataError(
                f"{self.path} is there, without the settings it was made with; {advice}"
            ) from None
        except ValueError:
            before = None
        if not isinstance(before, dict):
            raise DataError(f"{self._beside} is damaged, so {self.path} cannot be continued; {advice}")
        for name in [*settings, *before]:
            old, new = before.get(name), settings.get(name)
            if old != new:
                raise DataError(f"{self.path} was made with {name} {old}, now it is {new}; {advice}")

    def _continue(self) -> None:
        """Finds the end of the last whole line, and what stands there."""
        size = 0
        tail: deque[bytes] = deque(maxlen=_MOST_LINES)
        with self.path.open("rb") as file:
            for raw in file:
                if not raw.endswith(b"\n"):
                    break
                size += len(raw)
                tail.append(raw)
                self.lines += 1
        os.ftruncate(self._fd, size)
        if tail:
            self.last_index = self._index(tail[-1])
            while tail and self._index(tail.pop()) == self.last_index:
                self.last_count += 1

    def _index(self, raw: bytes) -> int:
        try:
            return int(json.loads(raw)["index"])
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{self.path} holds a line that this command did not write") from None

    def _failed(self, error: OSError) -> DataError:
        return DataError(f"{self.path} cannot be written: {error.strerror or error}")
