"""The forward that all families share: residual layers of attention and MLP between an embedding and an output layer.

Llama (arXiv 2302.13971, 2407.21783), Qwen3 (arXiv 2505.09388), DeepSeek-V3 (arXiv 2412.19437) and Kimi-K2 differ in
their layers' attention (`target/attention.py`) and MLP (`target/mlp.py`), which the shape names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.linear import Format, linear, pack
from slipstream.kernels.norm import add_rms_norm_, rms_norm
from slipstream.spans import span
from slipstream.target.attention import Attention, Rotary, make_attention
from slipstream.target.family import KVCache
from slipstream.target.mlp import Mlp, make_mlp
from slipstream.target.rows import KVTensor, Rows
from slipstream.target.shape import ModelShape
from slipstream.target.weights import Fetch, Loader


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
        self, shape: ModelShape, fetch: Fetch, dtype: torch.dtype, format: Format, device: str, positions: int
    ) -> None:
        """Packs the weights that `fetch` gives, tensor by tensor.

        dtype: of activations and KV. format: of the linear layers' weights; with `q4_1` the output layer is `q8_0`,
        as quantised checkpoints keep it. positions: how far the rotary tables reach.
        """
        self.shape, self.dtype = shape, dtype
        load = Loader(fetch, dtype, format, device)
        table, head = "model.embed_tokens.weight", "q8_0" if format == "q4_1" else format
        self._head = pack(load.weight(table if shape.tie_embeddings else "lm_head.weight"), head)
        self._embedding = load.kept(table)
        rotary = Rotary(shape, positions, device)
        self._layers = [
            _layer(load.below(f"model.layers.{i}."), shape, rotary, i) for i in range(shape.layers)
        ]
        self._norm = load.norm("model.norm")

    def kv_layout(self) -> list[tuple[KVTensor, ...]]:
        return [layer.attention.layout for layer in self._layers]

    @property
    def weight_bytes(self) -> int:
        layers = sum(layer.attention.weight_bytes + layer.mlp.weight_bytes for layer in self._layers)
        return layers + self._head.nbytes

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    def embed(self, tokens: Tensor) -> Tensor:
        return self._embedding[tokens]

    def forward(self, rows: Rows, kv: KVCache, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        with span("embed"):
            residual = self.embed(rows.tokens)
        eps, hidden, features = self.shape.rms_norm_eps, None, []
        for index, (layer, cache) in enumerate(zip(self._layers, kv, strict=True)):
            with span("norm"):
                if hidden is None:
                    hidden = rms_norm(residual, layer.attention_norm, eps)
                else:
                    hidden = add_rms_norm_(hidden, residual, layer.attention_norm, eps)
            if index in taps:
                features.append(residual.clone())  # what follows adds to it in place
            with span("attention"):
                hidden = layer.attention(hidden, rows, cache)
            with span("norm"):
                hidden = add_rms_norm_(hidden, residual, layer.mlp_norm, eps)
            with span(layer.mlp.span):
                hidden = layer.mlp(hidden)
        assert hidden is not None
        with span("norm"):
            hidden = add_rms_norm_(hidden, residual, self._norm, eps)
        if len(self._layers) in taps:
            features.append(residual)
        return hidden, torch.cat(features, -1) if features else None

    def logits(self, hidden: Tensor) -> Tensor:
        with span("lm_head"):
            return linear(hidden, self._head, torch.float32)


def _layer(load: Loader, shape: ModelShape, rotary: Rotary, index: int) -> Layer:
    return Layer(
        attention_norm=load.norm("input_layernorm"),
        attention=make_attention(load.below("self_attn."), shape, rotary),
        mlp_norm=load.norm("post_attention_layernorm"),
        mlp=make_mlp(load.below("mlp."), shape, index),
    )
