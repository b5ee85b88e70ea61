"""Prompt lookup: what followed the latest earlier occurrence of the text's longest repeated suffix (Saxena 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.draft.drafter import Drafter
from slipstream.draft.text import Text
from slipstream.draft.tree import Tree
from slipstream.kernels.lookup import lookup

if TYPE_CHECKING:
    from slipstream.target.family import Target


class NGramDrafter(Drafter):
    """Drafts from the prompt and the output so far. It costs microseconds, so it drafts as soon as it is asked how
    promising that would be, and keeps the draft by slot.

    Its outlook is the length of the suffix that it found: the longer, the more often the draft is right.
    """

    name = "ngram"
    is_free = True

    def __init__(self, max_drafted: int = 31, max_suffix: int = 15) -> None:
        self.max_drafted = max_drafted
        self.max_suffix = max_suffix
        self._drafted = torch.empty(0, max_drafted, dtype=torch.int64)
        self._matched = torch.empty(0, dtype=torch.int64)

    def attach(self, target: Target, slots: int, width: int) -> None:
        self._make_room(slots, target.device)

    def _make_room(self, slots: int, device: torch.device) -> None:
        self._matched = torch.zeros(slots, dtype=torch.int64, device=device)
        self._drafted = torch.zeros(slots, self.max_drafted, dtype=torch.int64, device=device)

    def outlook(self, text: Text, slots: Tensor) -> Tensor:
        if len(self._matched) != len(text.length) or self._matched.device != slots.device:
            self._make_room(len(text.length), slots.device)
        drafted, matched = lookup(text.tokens, slots, text.length[slots], self.max_suffix, self.max_drafted)
        self._drafted[slots], self._matched[slots] = drafted, matched
        return matched

    def draft(self, text: Text, slots: Tensor, size: int) -> Tree:
        tokens = self._drafted[slots, :size]
        return Tree.chain(tokens, (self._matched[slots] > 0)[:, None].expand_as(tokens))
