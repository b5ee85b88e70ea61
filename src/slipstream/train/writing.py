"""What all data that the target writes itself shares: how it is asked for, what comes of it, and how it is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from time import perf_counter
from typing import Any

from slipstream.train.chat import Spoken
from slipstream.train.data_file import DataFile
from slipstream.train.dialects import Message

SEEDS = 1_000_003
"""Apart enough that no two seeds of the user's share a batch or a conversation."""


@dataclass(frozen=True)
class Wishes:
    """How answers are written."""

    temperature: float = 0.8
    """Of the answers that are not greedy."""
    greedy_share: float = 0.8
    """Of all conversations."""
    max_new_tokens: int = 512
    user_tokens: int = 96
    """The longest user's turn; only where the model writes it."""
    free_share: float = 0.2
    """Of the user's turns that do not begin with given words; only where the model writes them."""
    keep_loops: bool = False
    seed: int = 0


@dataclass
class Tally:
    """What came of it."""

    conversations: int = 0
    """Those that were worked on, kept or not."""
    lines: int = 0
    answer_tokens: int = 0
    cut: int = 0
    """Answers that reached the longest length; they are kept."""
    loops: int = 0
    """Answers that were left out because they repeat themselves."""
    empty: int = 0
    """Left out because one side said nothing."""
    too_long: int = 0
    """Conversations that end early because the next answer would not fit."""
    refused: int = 0
    """Conversations that end early because the chat template refuses their next turn."""

    def add(self, other: Tally) -> None:
        """Counts another one's too."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


Batch = tuple[list[dict[str, Any]], Tally]
"""Lines to be written together, and what came of them."""


def line_of(
    name: str, index: int, messages: Sequence[Message], spoken: Spoken, finish: str
) -> dict[str, Any]:
    """A line of the file: the texts for people and other tools, the tokens as they were written."""
    spans = [list(span) for span in spoken.spans]
    told = {"id": name, "index": index, "conversations": list(messages)}
    return {**told, "tokens": spoken.tokens, "loss": spans, "finish": finish}


def write(
    file: DataFile,
    batches: Iterator[Batch],
    until_s: float | None,
    tally: Tally,
    report: Callable[[Tally], None],
) -> None:
    """Writes batch after batch, until there is none or the next one would not end in time.

    until_s: when it must have ended, by `perf_counter`; the first batch is always written. tally: counts what is in the
    file, and is reported after each batch.
    """
    longest_s = 0.0
    while True:
        began = perf_counter()
        if until_s is not None and longest_s and began + 1.1 * longest_s > until_s:
            return
        found = next(batches, None)
        if found is None:
            return
        file.append(found[0])
        tally.add(found[1])
        longest_s = max(longest_s, perf_counter() - began)
        report(tally)
