"""From committed tokens to the text that a user sees: end of text, stop strings, limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slipstream.engine.request import FinishReason, SamplingParams


class TextStream(Protocol):
    """Incremental detokenisation: `push` returns the text that a token completes, never half a character."""

    def push(self, token: int) -> str: ...


class Output:
    """One request's growing output. What is held back because it may begin a stop string comes with the end."""

    def __init__(self, params: SamplingParams, eos_ids: Sequence[int], stream: TextStream) -> None:
        self._params = params
        self._eos_ids = frozenset(() if params.ignore_eos else eos_ids)
        self._stream = stream
        self._emitted = 0
        self.text = ""
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None

    def push(self, tokens: Sequence[int]) -> tuple[str, list[int]]:
        """Takes committed tokens up to the end of the request; returns the new text to show and the tokens taken."""
        before = len(self.token_ids)
        for token in tokens:
            self._push_one(token)
            if self.finish_reason is not None:
                break
        shown = len(self.text) if self.finish_reason else len(self.text) - self._held_back()
        delta = self.text[self._emitted : shown]
        self._emitted = max(shown, self._emitted)
        return delta, self.token_ids[before:]

    def _push_one(self, token: int) -> None:
        self.token_ids.append(token)
        if token in self._eos_ids:
            self.finish_reason = "stop"
            return
        piece = self._stream.push(token)
        self.text += piece
        self._cut_at_stop(len(piece))
        if self.finish_reason is None and len(self.token_ids) == self._params.max_new_tokens:
            self.finish_reason = "length"

    def _cut_at_stop(self, grown: int) -> None:
        """Ends the text before the first stop string that the last `grown` characters completed."""
        found = [
            at
            for stop in self._params.stop
            if (at := self.text.find(stop, max(0, len(self.text) - grown - len(stop) + 1))) >= 0
        ]
        if found:
            self.text = self.text[: min(found)]
            self.finish_reason = "stop"

    def _held_back(self) -> int:
        """Characters at the end that may turn out to be the beginning of a stop string."""
        return max(
            (
                size
                for stop in self._params.stop
                for size in range(1, len(stop))
                if self.text.endswith(stop[:size])
            ),
            default=0,
        )
