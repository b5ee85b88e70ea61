"""What every drafter offers to the cycle."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from slipstream.draft.text import Text
from slipstream.draft.tree import Tree


class Drafter(Protocol):
    """Proposes tokens for the requests in `slots`. Its own state, if any, lives in tensors indexed by slot.

    A drafter may be wrong in every token: acceptance decides what is kept, so it can cost time but not change a text.
    """

    name: str
    max_drafted: int
    """The most tokens that one tree of it holds."""

    is_free: bool
    """Drafting costs nothing beside the outlook, so the controller may score drafts that are not verified."""

    def outlook(self, text: Text, slots: Tensor) -> Tensor:
        """int64 [B]: how promising a draft would be now, as a class below `OUTLOOKS`; acceptance is kept by class.

        0 means that there is nothing to draft. A drafter that cannot tell beforehand answers 1 for all. Called once
        before every cycle, whether it drafts or not.
        """
        ...

    def draft(self, text: Text, slots: Tensor, size: int) -> Tree:
        """A tree of `size` nodes (1 <= size <= max_drafted) for each slot, right after `outlook` of the same."""
        ...


OUTLOOKS = 16
"""The number of classes that an outlook can name."""
