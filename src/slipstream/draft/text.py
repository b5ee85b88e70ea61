"""The texts that drafters read: one a slot, on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Text:
    """The committed tokens of every slot. Beyond a slot's length its row holds anything."""

    tokens: Tensor
    """int64 [S, P]"""
    length: Tensor
    """int64 [S]: committed tokens; the last of them is the root of the next tree, its KV is not computed yet."""
