"""What one forward of a target runs over: the rows of a tree per request, and where their KV goes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class KVTensor:
    """One tensor of a layer's KV cache, as its family declares it: [rows, *shape] (design rule 6)."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """B requests of T rows each; row 0 is the root (the last committed token), the others its tree.

    A prefill is the same with known tokens: a chain whose root is the first of them. All tensors int64.
    """

    tokens: Tensor
    """[B, T]"""
    positions: Tensor
    """[B, T]: the root's position + depth."""
    kv_rows: Tensor
    """[B, T]: the cache row that each row's KV is written to."""
    table: Tensor
    """[S, P]: the cache row of every (slot, index)."""
    slots: Tensor
    """[B]"""
    prefix: Tensor
    """[B]: keys before the root, which is the root's position."""
    depth: Tensor | None = None
    """[B, T]; None for a chain, where a row's depth is its index."""
    ancestors: Tensor | None = None
    """[B, T, A]: tree rows from the root to each row, itself included; None for a chain."""
    extent: int = 0
    """The host's upper bound of the keys that any row sees; kernels on a GPU launch for it and leave early."""
