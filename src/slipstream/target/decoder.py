"""The forward that all families share: residual layers of attention and MLP between an embedding and an output layer.

Llama (arXiv 2302.13971, 2407.21783), Qwen3 (arXiv 2505.09388), DeepSeek-V3 (arXiv 2412.19437) and Kimi-K2 differ in
their layers' attention (`target/attention.py`) and MLP (`target/mlp.py`), which the shape names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.collectives.interface import Collectives
from slipstream.kernels.linear import Format, Weight
from slipstream.kernels.norm import rms_norm
from slipstream.spans import span
from slipstream.target.attention import Attention, Rotary, make_attention
from slipstream.target.family import KVCache
from slipstream.target.mlp import Mlp, make_mlp
from slipstream.target.rows import KVTensor, Rows
from slipstream.target.shape import ModelShape
from slipstream.target.shard import Shard
from slipstream.target.vocabulary import Vocabulary
from slipstream.target.weights import Loader, Part


@dataclass(frozen=True)
class Layer:
    """One residual layer."""

    attention_norm: Tensor
    attention: Attention
    mlp_norm: Tensor
    mlp: Mlp


class Decoder:
    """A loaded model; implements `family.Target`."""

    def __init__(
        self,
        shard: Shard,
        checkpoint: Callable[[str, Part | None], Weight],
        collectives: Collectives,
        dtype: torch.dtype,
        format: Format,
        device: str,
        positions: int,
    ) -> None:
        """Packs the weights of a shard that `checkpoint` gives, tensor by tensor.

        dtype: of activations and KV. format: of the linear layers' weights; with `q4_1` the output layer is `q8_0`,
        as quantised checkpoints keep it. positions: how far the rotary tables reach.
        """
        self.shape, self.dtype, self._collectives = shard.whole, dtype, collectives
        load = Loader(shard.fetch(checkpoint), dtype, format, device)
        self._vocabulary = Vocabulary(load, shard, collectives)
        own = shard.shape
        rotary = Rotary(own, positions, device)
        self._layers = [_layer(load.below(f"model.layers.{i}."), own, rotary, i) for i in range(own.layers)]
        self._norms = [*(layer.attention_norm for layer in self._layers), load.norm("model.norm")]
        self._sum_span = "all_reduce" if collectives.size > 1 else "norm"

    def kv_layout(self) -> list[tuple[KVTensor, ...]]:
        return [layer.attention.layout for layer in self._layers]

    @property
    def weight_bytes(self) -> int:
        layers = sum(layer.attention.weight_bytes + layer.mlp.weight_bytes for layer in self._layers)
        return layers + self._vocabulary.weight_bytes

    @property
    def device(self) -> torch.device:
        return self._vocabulary.device

    def embed(self, tokens: Tensor) -> Tensor:
        return self._vocabulary.embed(tokens)

    def forward(self, rows: Rows, kv: KVCache, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        with span("embed"):
            residual = self.embed(rows.tokens)
        features = []
        with span("norm"):
            hidden = rms_norm(residual, self._norms[0], self.shape.rms_norm_eps)
        for index, (layer, cache) in enumerate(zip(self._layers, kv, strict=True)):
            if index in taps:
                features.append(residual.clone())  # what follows adds to it in place
            with span("attention"):
                hidden = layer.attention(hidden, rows, cache)
            hidden = self._add_sum_and_norm(hidden, residual, layer.mlp_norm)
            with span(layer.mlp.span):
                hidden = layer.mlp(hidden)
            hidden = self._add_sum_and_norm(hidden, residual, self._norms[index + 1])
        if len(self._layers) in taps:
            features.append(residual)
        return hidden, torch.cat(features, -1) if features else None

    def logits(self, hidden: Tensor) -> Tensor:
        with span("lm_head"):
            return self._vocabulary.logits(hidden)

    def _add_sum_and_norm(self, part: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        """Adds the ranks' parts of a layer's output to the residual; returns what enters the next layer."""
        with span(self._sum_span):
            return self._collectives.all_reduce_add_rms_norm_(part, residual, weight, self.shape.rms_norm_eps)


def _layer(load: Loader, shape: ModelShape, rotary: Rotary, index: int) -> Layer:
    return Layer(
        attention_norm=load.norm("input_layernorm"),
        attention=make_attention(load.below("self_attn."), shape, rotary),
        mlp_norm=load.norm("post_attention_layernorm"),
        mlp=make_mlp(load.below("mlp."), shape, index),
    )
