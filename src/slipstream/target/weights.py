"""The weights of a model: their names in a checkpoint, and how the layers take them from there, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.kernels.linear import (
    Format,
    PackedWeight,
    QuantisedWeight,
    Weight,
    dense,
    pack,
    pack_many,
)
from slipstream.target.shape import ModelShape


@dataclass(frozen=True)
class Part:
    """A piece of a weight [N, K] (or a bias [N]): its outputs (dim 0) or its inputs (dim 1) from start to stop - 1."""

    dim: int
    start: int
    stop: int

    def widened(self, block: int) -> Part:
        """The same of inputs, out to whole blocks."""
        if self.dim == 0:
            return self
        return Part(1, self.start // block * block, -(-self.stop // block) * block)

    def scaled(self, block: int) -> Part:
        """What of a tensor with one element for every `block` inputs belongs to this (whole blocks)."""
        return self if self.dim == 0 else Part(1, self.start // block, self.stop // block)


def cut(weight: Weight, part: Part | None, widened: Part | None) -> Weight:
    """The piece that was asked for, of the one that was read; dense where it does not end between groups."""
    if part is None or widened is None or part == widened:
        return weight
    return dense(weight)[:, part.start - widened.start : part.stop - widened.start]


Fetch = Callable[[str], Weight]
"""A checkpoint: a tensor by its Hugging Face name."""


@dataclass(frozen=True)
class Loader:
    """Fetches, converts and packs; what was fetched is let go before the next tensor comes."""

    fetch: Fetch
    dtype: torch.dtype
    """Of activations and norms."""
    format: Format
    """Of the linear layers."""
    device: str
    prefix: str = ""

    def below(self, prefix: str) -> Loader:
        """The same for the names that begin with a further prefix."""
        return replace(self, prefix=self.prefix + prefix)

    def weight(self, name: str) -> Weight:
        """A tensor as the checkpoint has it, on the device."""
        found = self.fetch(self.prefix + name)
        if isinstance(found, Tensor):
            return found.to(self.device)
        minimum = None if found.minimum is None else found.minimum.to(self.device)
        return QuantisedWeight(found.format, found.q.to(self.device), found.scale.to(self.device), minimum)

    def dense(self, name: str) -> Tensor:
        """A tensor as numbers, on the device."""
        return dense(self.weight(name))

    def kept(self, name: str) -> Tensor:
        """A tensor in the activations' dtype; a copy, as what was fetched may be a view of the file."""
        return self.dense(name).to(self.dtype, copy=True)

    def norm(self, name: str) -> Tensor:
        """A norm's weight."""
        return self.kept(f"{name}.weight")

    def linear(self, *names: str, has_bias: bool = False) -> PackedWeight:
        """Layers that share their input, packed one under the other."""
        weight = [self.weight(f"{name}.weight") for name in names]
        bias = torch.cat([self.dense(f"{name}.bias") for name in names]) if has_bias else None
        return pack(weight, self.format, bias)

    def many(self, count: int, fetch: Callable[[int], Weight | Sequence[Weight]]) -> PackedWeight:
        """`count` weights of one shape, packed one behind the other."""
        return pack_many(count, fetch, self.format)


def with_rows(weight: Weight, rows: Tensor) -> Weight:
    """The weight with its outputs in another order (int64 [N])."""
    if isinstance(weight, Tensor):
        return weight[rows]
    minimum = None if weight.minimum is None else weight.minimum[rows]
    return QuantisedWeight(weight.format, weight.q[rows], weight.scale[rows], minimum)


def weight_names(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint with its shape, so that a file can be checked before anything is read."""
    hidden = shape.hidden_size
    names: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        names |= {f"{at}input_layernorm.weight": (hidden,), f"{at}post_attention_layernorm.weight": (hidden,)}
        attention = _latent_names(shape) if shape.latent else _grouped_names(shape)
        names |= {f"{at}self_attn.{name}": size for name, size in attention.items()}
        mlp = _experts_names(shape) if shape.has_experts(layer) else _mlp_names(shape)
        names |= {f"{at}mlp.{name}": size for name, size in mlp.items()}
    names["model.norm.weight"] = (hidden,)
    if not shape.tie_embeddings:
        names["lm_head.weight"] = (shape.vocab_size, hidden)
    return names


Names = dict[str, tuple[int, ...]]


def _linear_names(name: str, outputs: int, inputs: int, has_bias: bool = False) -> Names:
    weight: Names = {f"{name}.weight": (outputs, inputs)}
    return weight | {f"{name}.bias": (outputs,)} if has_bias else weight


def _grouped_names(shape: ModelShape) -> Names:
    hidden, q, kv = shape.hidden_size, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    names = {
        **_linear_names("q_proj", q, hidden, shape.attention_bias),
        **_linear_names("k_proj", kv, hidden, shape.attention_bias),
        **_linear_names("v_proj", kv, hidden, shape.attention_bias),
        **_linear_names("o_proj", hidden, q, shape.attention_bias),
    }
    if shape.qk_norm:
        names |= {"q_norm.weight": (shape.head_dim,), "k_norm.weight": (shape.head_dim,)}
    return names


def _latent_names(shape: ModelShape) -> Names:
    part, hidden, heads, bias = shape.latent, shape.hidden_size, shape.heads, shape.attention_bias
    assert part is not None
    q = heads * shape.head_dim
    if part.q_rank is None:
        names = _linear_names("q_proj", q, hidden)
    else:
        names = {
            **_linear_names("q_a_proj", part.q_rank, hidden, bias),
            "q_a_layernorm.weight": (part.q_rank,),
            **_linear_names("q_b_proj", q, part.q_rank),
        }
    return names | {
        **_linear_names("kv_a_proj_with_mqa", part.kv_rank + part.rope_dim, hidden, bias),
        "kv_a_layernorm.weight": (part.kv_rank,),
        **_linear_names("kv_b_proj", heads * (part.nope_dim + part.value_dim), part.kv_rank),
        **_linear_names("o_proj", hidden, heads * part.value_dim, bias),
    }


def _mlp_names(
    shape: ModelShape, size: int | None = None, prefix: str = "", bias: bool | None = None
) -> Names:
    size, has_bias = size or shape.intermediate_size, shape.mlp_bias if bias is None else bias
    return {
        **_linear_names(f"{prefix}gate_proj", size, shape.hidden_size, has_bias),
        **_linear_names(f"{prefix}up_proj", size, shape.hidden_size, has_bias),
        **_linear_names(f"{prefix}down_proj", shape.hidden_size, size, has_bias),
    }


def _experts_names(shape: ModelShape) -> Names:
    experts = shape.experts
    assert experts is not None
    names: Names = {"gate.weight": (experts.count, shape.hidden_size)}
    if experts.has_bias:
        names["gate.e_score_correction_bias"] = (experts.count,)
    for expert in range(experts.count):
        names |= _mlp_names(shape, experts.intermediate_size, f"experts.{expert}.", bias=False)
    if experts.shared_intermediate_size:
        names |= _mlp_names(shape, experts.shared_intermediate_size, "shared_experts.", bias=False)
    return names
