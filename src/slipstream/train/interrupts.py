"""Ctrl-C in the middle of an update would leave half of the weights changed; here it waits until the update is done."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """While it is entered, Ctrl-C and SIGTERM only set `asked`."""

    def __init__(self, insisting: bool) -> None:
        """insisting: whether asking twice interrupts at once. torchrun asks all of its ranks twice by itself."""
        self.asked = False
        self._insisting = insisting
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # others cannot receive any
            self._before = {number: signal.signal(number, self._ask) for number in _SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and self._insisting:
            raise KeyboardInterrupt
        self.asked = True
