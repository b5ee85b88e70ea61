"""The Llama family: RMSNorm, grouped-query attention with rotary embedding, SwiGLU (arXiv 2302.13971, 2407.21783)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from slipstream.kernels.activation import swiglu
from slipstream.kernels.attention import attention
from slipstream.kernels.linear import Format, PackedWeight, QuantisedWeight, linear, pack
from slipstream.kernels.norm import add_rms_norm_, rms_norm
from slipstream.kernels.rope import rope_kv_write
from slipstream.spans import span
from slipstream.target.family import KVCache
from slipstream.target.rows import KVTensor, Rows
from slipstream.target.shape import ModelShape, Rope

Weight = Tensor | QuantisedWeight
Fetch = Callable[[str], Weight]
"""A checkpoint: a tensor by its Hugging Face name."""


@dataclass(frozen=True)
class Layer:
    """One layer's weights, packed."""

    attention_norm: Tensor
    qkv: PackedWeight
    out: PackedWeight
    mlp_norm: Tensor
    gate_up: PackedWeight
    down: PackedWeight


class Llama:
    """A loaded model of the family; implements `family.Target`."""

    def __init__(
        self, shape: ModelShape, fetch: Fetch, dtype: torch.dtype, format: Format, device: str, positions: int
    ) -> None:
        """Packs the weights that `fetch` gives, tensor by tensor.

        dtype: of activations and KV. format: of the linear layers' weights; with `q4_1` the output layer is `q8_0`,
        as quantised checkpoints keep it. positions: how far the rotary tables reach.
        """
        self.shape = shape
        self._dtype = dtype
        embedding = fetch("model.embed_tokens.weight")
        self._embedding = _dense(embedding).to(device, dtype)
        self._layers = [
            _layer(shape, partial(_fetch_below, fetch, f"model.layers.{layer}."), dtype, format, device)
            for layer in range(shape.layers)
        ]
        self._norm = _dense(fetch("model.norm.weight")).to(device, dtype)
        head = embedding if shape.tie_embeddings else fetch("lm_head.weight")
        self._head = pack(_to(head, device), "q8_0" if format == "q4_1" else format)
        self._cos, self._sin = rotary_tables(shape.rope, shape.head_dim, positions, device)
        self._scale = shape.head_dim**-0.5

    def kv_layout(self) -> list[tuple[KVTensor, ...]]:
        heads = (self.shape.kv_heads, self.shape.head_dim)
        return [(KVTensor("k", heads), KVTensor("v", heads))] * self.shape.layers

    @property
    def weight_bytes(self) -> int:
        packed = [
            part for layer in self._layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)
        ]
        return sum(weight.nbytes for weight in (*packed, self._head))

    def forward(self, rows: Rows, kv: KVCache) -> Tensor:
        with span("embed"):
            residual = self._embedding[rows.tokens]
        eps, hidden = self.shape.rms_norm_eps, None
        for layer, (k_cache, v_cache) in zip(self._layers, kv, strict=True):
            with span("norm"):
                if hidden is None:
                    hidden = rms_norm(residual, layer.attention_norm, eps)
                else:
                    hidden = add_rms_norm_(hidden, residual, layer.attention_norm, eps)
            with span("attention"):
                qkv = linear(hidden, layer.qkv)
                q = rope_kv_write(qkv, self._cos, self._sin, rows.positions, rows.kv_rows, k_cache, v_cache)
                seen = attention(
                    q,
                    k_cache,
                    v_cache,
                    rows.table,
                    rows.slots,
                    rows.prefix,
                    rows.depth,
                    rows.ancestors,
                    self._scale,
                )
                hidden = linear(seen.flatten(2), layer.out)
            with span("norm"):
                hidden = add_rms_norm_(hidden, residual, layer.mlp_norm, eps)
            with span("mlp"):
                hidden = linear(swiglu(linear(hidden, layer.gate_up)), layer.down)
        assert hidden is not None
        with span("norm"):
            return add_rms_norm_(hidden, residual, self._norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        with span("lm_head"):
            return linear(hidden, self._head, torch.float32)


def _fetch_below(fetch: Fetch, prefix: str, name: str) -> Weight:
    return fetch(prefix + name)


def weight_names(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint with its shape, so that a file can be checked before anything is read."""
    hidden, q, kv = shape.hidden_size, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    names: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    projections = {
        "self_attn.q_proj": (q, hidden, shape.attention_bias),
        "self_attn.k_proj": (kv, hidden, shape.attention_bias),
        "self_attn.v_proj": (kv, hidden, shape.attention_bias),
        "self_attn.o_proj": (hidden, q, shape.attention_bias),
        "mlp.gate_proj": (shape.intermediate_size, hidden, shape.mlp_bias),
        "mlp.up_proj": (shape.intermediate_size, hidden, shape.mlp_bias),
        "mlp.down_proj": (hidden, shape.intermediate_size, shape.mlp_bias),
    }
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        names |= {f"{at}input_layernorm.weight": (hidden,), f"{at}post_attention_layernorm.weight": (hidden,)}
        for name, (outputs, inputs, has_bias) in projections.items():
            names[f"{at}{name}.weight"] = (outputs, inputs)
            if has_bias:
                names[f"{at}{name}.bias"] = (outputs,)
    names["model.norm.weight"] = (hidden,)
    if not shape.tie_embeddings:
        names["lm_head.weight"] = (shape.vocab_size, hidden)
    return names


def rotary_tables(rope: Rope, dim: int, positions: int, device: str) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [positions, dim / 2]."""
    inverse = 1.0 / rope.theta ** (torch.arange(0, dim, 2, device=device).float() / dim)
    if rope.scaling == "linear":
        inverse = inverse / rope.factor
    elif rope.scaling == "llama3":
        inverse = _llama3_frequencies(inverse, rope)
    elif rope.scaling == "yarn":
        inverse = _yarn_frequencies(inverse, rope, dim)
    angles = torch.outer(torch.arange(positions, device=device).float(), inverse)
    return angles.cos() * rope.table_scale, angles.sin() * rope.table_scale


def _llama3_frequencies(inverse: Tensor, rope: Rope) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended (Llama 3.1)."""
    turns = rope.original_max_positions * inverse / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return blend * inverse + (1 - blend) * inverse / rope.factor


def _yarn_frequencies(inverse: Tensor, rope: Rope, dim: int) -> Tensor:
    """Blended between kept and stretched over the dimensions that make beta_fast .. beta_slow turns (YaRN, 3.2)."""

    def dimension(turns: float) -> float:
        return (
            dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    stretched = ((torch.arange(dim // 2, device=inverse.device).float() - low) / width).clamp(0, 1)
    return inverse / rope.factor * stretched + inverse * (1 - stretched)


def _layer(shape: ModelShape, fetch: Fetch, dtype: torch.dtype, format: Format, device: str) -> Layer:
    def packed(*names: str, has_bias: bool) -> PackedWeight:
        weight = _stacked([_to(fetch(f"{name}.weight"), device) for name in names])
        bias = torch.cat([_dense(fetch(f"{name}.bias")).to(device) for name in names]) if has_bias else None
        return pack(weight, format, bias)

    def norm(name: str) -> Tensor:
        return _dense(fetch(name)).to(device, dtype)

    attention, mlp = shape.attention_bias, shape.mlp_bias
    return Layer(
        attention_norm=norm("input_layernorm.weight"),
        qkv=packed("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", has_bias=attention),
        out=packed("self_attn.o_proj", has_bias=attention),
        mlp_norm=norm("post_attention_layernorm.weight"),
        gate_up=packed("mlp.gate_proj", "mlp.up_proj", has_bias=mlp),
        down=packed("mlp.down_proj", has_bias=mlp),
    )


def _stacked(parts: list[Weight]) -> Weight:
    """Weights that share their input, one under the other; quantised ones stay so when all have one format."""
    quantised = [part for part in parts if isinstance(part, QuantisedWeight)]
    if len(quantised) == len(parts) and len({part.format for part in quantised}) == 1:
        minima = [part.minimum for part in quantised if part.minimum is not None]
        return QuantisedWeight(
            quantised[0].format,
            torch.cat([part.q for part in quantised]),
            torch.cat([part.scale for part in quantised]),
            torch.cat(minima) if minima else None,
        )
    return torch.cat([_dense(part) for part in parts])


def _dense(weight: Weight) -> Tensor:
    return weight.dequantise() if isinstance(weight, QuantisedWeight) else weight


def _to(weight: Weight, device: str) -> Weight:
    if isinstance(weight, Tensor):
        return weight.to(device)
    minimum = None if weight.minimum is None else weight.minimum.to(device)
    return QuantisedWeight(weight.format, weight.q.to(device), weight.scale.to(device), minimum)
