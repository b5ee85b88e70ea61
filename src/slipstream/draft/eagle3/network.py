"""The forward of an EAGLE-3 drafter, from the same attentions and MLPs as the targets'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.draft.eagle3.checkpoint import Checkpoint
from slipstream.kernels.linear import Format, linear
from slipstream.kernels.norm import add_rms_norm_, rms_norm
from slipstream.target.attention import Attention, Rotary, make_attention
from slipstream.target.family import KVCache
from slipstream.target.mlp import DenseMlp
from slipstream.target.rows import KVTensor, Rows
from slipstream.target.weights import Loader


@dataclass(frozen=True)
class _Layer:
    entrance_norm: Tensor
    attention: Attention
    mlp_norm: Tensor
    mlp: DenseMlp


class Network:
    """A drafter's layers, packed."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, format: Format, device: torch.device, positions: int
    ) -> None:
        """dtype: of activations and KV. format: of the linear layers. positions: how far the rotary table reaches."""
        self.shape = shape = checkpoint.shape
        tensors: Mapping[str, Tensor] = checkpoint.tensors
        load = Loader(lambda name: tensors[name], dtype, format, str(device))
        self._fuse = load.linear("fc", has_bias=shape.fc_bias)
        self._input_norm = load.norm("input_norm") if shape.norm_before_fc else None
        self._fc_norms = (
            [load.norm(f"fc_norm.{tap}") for tap in range(shape.tap_count)] if shape.fc_norm else []
        )
        self._embed_norm = load.norm("layers.0.input_layernorm")
        rotary = Rotary(shape.decoder, positions, str(device))
        self._layers = []
        for index in range(shape.decoder.layers):
            at = load.below(f"layers.{index}.")
            self._layers.append(
                _Layer(
                    entrance_norm=at.norm("hidden_norm" if index == 0 else shape.later_norm),
                    attention=make_attention(at.below("self_attn."), shape.decoder, rotary),
                    mlp_norm=at.norm("post_attention_layernorm"),
                    mlp=DenseMlp(at.below("mlp."), False),
                )
            )
        self._norm = load.norm("norm")
        self._head = load.linear("lm_head")

    def kv_layout(self) -> list[tuple[KVTensor, ...]]:
        """Per layer, the KV tensors of one row."""
        return [layer.attention.layout for layer in self._layers]

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one drafted token reads."""
        layers = sum(layer.attention.weight_bytes + layer.mlp.weight_bytes for layer in self._layers)
        return layers + self._head.nbytes

    def fuse(self, features: Tensor) -> Tensor:
        """The target's states at the taps, [B, T, taps * Ht], as one state [B, T, H]."""
        eps = self.shape.decoder.rms_norm_eps
        if self._input_norm is not None:
            features = rms_norm(features, self._input_norm, eps)
        if self._fc_norms:
            parts = features.chunk(len(self._fc_norms), dim=-1)
            normed = [rms_norm(p.contiguous(), w, eps) for p, w in zip(parts, self._fc_norms, strict=True)]
            features = torch.cat(normed, dim=-1)
        return linear(features, self._fuse)

    def __call__(self, embedded: Tensor, state: Tensor, rows: Rows, kv: KVCache) -> tuple[Tensor, Tensor]:
        """embedded, state: [B, T, H], which are left as they are. Writes the rows' KV.

        Returns the state that the next step reads, and the normed one that the output layer reads.
        """
        shape, eps = self.shape, self.shape.decoder.rms_norm_eps
        first = self._layers[0]
        normed = rms_norm(state, first.entrance_norm, eps)
        residual = normed.clone() if shape.norm_before_residual else state.clone()
        hidden = torch.cat([rms_norm(embedded, self._embed_norm, eps), normed], dim=-1)
        for index, (layer, cache) in enumerate(zip(self._layers, kv, strict=True)):
            if index:
                hidden = add_rms_norm_(hidden, residual, layer.entrance_norm, eps)
            hidden = layer.attention(hidden, rows, cache)
            hidden = layer.mlp(add_rms_norm_(hidden, residual, layer.mlp_norm, eps))
        normed = add_rms_norm_(hidden, residual, self._norm, eps)
        return (normed if shape.norm_output else residual), normed

    def logits(self, normed: Tensor) -> Tensor:
        """[..., H] -> float32 [..., Vd]."""
        return linear(normed, self._head, torch.float32)
