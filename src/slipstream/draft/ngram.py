"""Prompt lookup: what followed the latest earlier occurrence of the text's longest repeated suffix (Saxena 2023)."""

from __future__ import annotations

from torch import Tensor

from slipstream.draft.drafter import Drafter
from slipstream.draft.text import Text
from slipstream.draft.tree import Tree
from slipstream.kernels.lookup import lookup


class NGramDrafter(Drafter):
    """Drafts from the prompt and the output so far. It costs microseconds, so it drafts first and is asked after.

    Its outlook is the length of the suffix that it found: the longer, the more often the draft is right.
    """

    name = "ngram"
    is_free = True

    def __init__(self, max_drafted: int = 31, max_suffix: int = 15) -> None:
        self.max_drafted = max_drafted
        self.max_suffix = max_suffix
        self._drafted: Tensor
        self._matched: Tensor

    def outlook(self, text: Text, slots: Tensor) -> Tensor:
        self._drafted, self._matched = lookup(
            text.tokens, slots, text.length[slots], self.max_suffix, self.max_drafted
        )
        return self._matched

    def draft(self, text: Text, slots: Tensor, size: int) -> Tree:
        tokens = self._drafted[:, :size]
        return Tree.chain(tokens, (self._matched > 0)[:, None].expand_as(tokens))
