"""Drafts arbitrary tokens: for measuring what a verify step costs."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.draft.drafter import Drafter
from slipstream.draft.text import Text
from slipstream.draft.tree import Tree


class ArbitraryDrafter(Drafter):
    """The same made-up chain for every request."""

    name = "arbitrary"

    def __init__(self, vocabulary: int, max_drafted: int) -> None:
        self._vocabulary, self.max_drafted = vocabulary, max_drafted

    def draft(self, text: Text, slots: Tensor, size: int) -> Tree:
        tokens = (torch.arange(size, device=slots.device) * 104729 % self._vocabulary).expand(len(slots), -1)
        return Tree.chain(tokens, torch.ones_like(tokens, dtype=torch.bool))
