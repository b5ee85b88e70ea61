"""What every drafter offers to the cycle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.draft.text import Text
from slipstream.draft.tree import Tree

if TYPE_CHECKING:
    from slipstream.target.family import Target

OUTLOOKS = 16
"""The number of classes that an outlook can name."""


class Drafter(ABC):
    """Proposes tokens for the requests in `slots`. Its own state, if any, lives in tensors indexed by slot.

    A drafter may be wrong in every token: acceptance decides what is kept, so it can cost time but not change a text.
    """

    name: str
    max_drafted: int
    """The most tokens that one tree of it holds."""

    is_free: bool = False
    """Drafting costs nothing beside the outlook, so the controller may score drafts that are not verified."""

    is_tree: bool = False
    """It drafts trees, their nodes in the order of its own confidence, instead of chains."""

    is_capturable: bool = True
    """Its part of a cycle runs on the device alone, so that a whole cycle can be one graph."""

    taps: tuple[int, ...] = ()
    """The target's states that it reads: boundaries between layers, as `Target.forward` names them."""

    def attach(self, target: Target, slots: int, width: int) -> None:
        """Makes room for the state of `slots` requests of up to `width` tokens, before any of them begins."""

    def reset(self, slot: int) -> None:
        """Another request begins in this slot."""

    def before(self, text: Text, slots: Sequence[int], size: int, observed: int) -> int:
        """Called on the host before every forward over these slots, outside of any graph: before a cycle with a tree of
        `size` (0: plain), or a part of a prefill, after which `observe` tells of up to `observed` positions.

        What a draft in a graph cannot do is done here. Returns what else the graph depends on.
        """
        return 0

    def observe(self, text: Text, slots: Tensor, first: Tensor, features: Tensor) -> None:
        """What the target's states were: features [B, T, F] of the positions first (int64 [B]) .. first + T - 1.

        Called after every forward of a drafter with taps. Positions at or beyond a text's length may hold anything.
        """

    def outlook(self, text: Text, slots: Tensor) -> Tensor:
        """int64 [B]: how promising a draft would be now, as a class below `OUTLOOKS`; acceptance is kept by class.

        0 means that there is nothing to draft. A drafter that cannot tell beforehand answers 1 for all. Called once
        after every prefill and every cycle, whether it drafted or not.
        """
        return torch.ones_like(slots)

    @abstractmethod
    def draft(self, text: Text, slots: Tensor, size: int) -> Tree:
        """A tree of `size` nodes (1 <= size <= max_drafted) for each slot, after `outlook` of the same text."""
