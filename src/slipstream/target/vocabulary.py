"""A model's first and last layer, of which every rank holds the rows of its own tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.collectives.interface import Collectives
from slipstream.kernels.linear import Format, linear, pack
from slipstream.spans import span
from slipstream.target.shard import Shard
from slipstream.target.weights import Loader

_TABLE = "model.embed_tokens.weight"


class Vocabulary:
    """The embedding and the output layer."""

    def __init__(self, load: Loader, shard: Shard, collectives: Collectives) -> None:
        """With `q4_1` the output layer is `q8_0`, as quantised checkpoints keep it."""
        format: Format = "q8_0" if load.format == "q4_1" else load.format
        self._own, self._size, self._collectives = shard.tokens, shard.whole.vocab_size, collectives
        self._head = pack(load.weight(_TABLE if shard.whole.tie_embeddings else "lm_head.weight"), format)
        self._embedding = load.kept(_TABLE)
        if collectives.size > 1:  # what the tokens of other ranks add here: zeros, the last row
            self._embedding = torch.nn.functional.pad(self._embedding, (0, 0, 0, 1))

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one row reads, the embedding's one row left aside."""
        return self._head.nbytes

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens int64 [...] -> [..., H]."""
        if self._collectives.size == 1:
            return self._embedding[tokens]
        own = tokens - self._own.start
        is_own = (own >= 0) & (own < len(self._own))
        part = self._embedding[own.where(is_own, len(self._own))]
        with span("all_reduce"):
            return self._collectives.all_reduce(part)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> float32 [..., V]."""
        part = linear(hidden, self._head, torch.float32)
        if self._collectives.size == 1:
            return part
        longest = -(-self._size // self._collectives.size)
        part = torch.nn.functional.pad(part, (0, longest - part.shape[-1]))
        with span("all_gather"):
            every = self._collectives.all_gather(part)
        return every[..., : self._size].contiguous()
