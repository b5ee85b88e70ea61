"""The seam between the engine and a model family: what every family's forward offers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from slipstream.target.rows import KVTensor, Rows

if TYPE_CHECKING:
    from slipstream.target.shape import ModelShape

KVCache = list[tuple[Tensor, ...]]
"""Per layer, the tensors that the family declared, each [rows, *shape]."""


class Target(Protocol):
    """A loaded model. Every row's bits depend on that row and its ancestors alone (design rule 3)."""

    shape: ModelShape

    def kv_layout(self) -> list[tuple[KVTensor, ...]]:
        """Per layer, the KV tensors of one row."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a forward of one row reads; norms and the embedding's one row are left aside."""
        ...

    def forward(self, rows: Rows, kv: KVCache) -> Tensor:
        """Writes the rows' KV and returns their final hidden states [B, T, H], after the last norm."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> float32 [..., V]."""
        ...
