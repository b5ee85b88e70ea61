"""The seam between the engine and a model family: what every family's forward offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from slipstream.target.rows import KVTensor, Rows

if TYPE_CHECKING:
    from slipstream.target.shape import ModelShape

KVCache = list[tuple[Tensor, ...]]
"""Per layer, the tensors that the family declared, each [rows, *shape]."""


class Target(Protocol):
    """A loaded model. Every row's bits depend on that row and its ancestors alone (design rule 3)."""

    shape: ModelShape
    dtype: torch.dtype
    """Of activations and KV."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens int64 [...] -> [..., H]."""
        ...

    def kv_layout(self) -> list[tuple[KVTensor, ...]]:
        """Per layer, the KV tensors of one row."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a forward of one row reads; norms and the embedding's one row are left aside."""
        ...

    def forward(self, rows: Rows, kv: KVCache, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """Writes the rows' KV; returns their final hidden states [B, T, H], after the last norm, and their features.

        taps: boundaries between layers, ascending: b is the state that enters layer b, and `shape.layers` the one
        before the last norm. Features: those states side by side, [B, T, len(taps) * H]; None without taps.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> float32 [..., V]."""
        ...
