"""A layer's attention: grouped-query (Llama, Qwen3) and multi-head latent (DeepSeek-V3, Kimi-K2)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from slipstream.kernels.attention import attention
from slipstream.kernels.latent import latent_rope_write
from slipstream.kernels.linear import PackedWeight, dense, linear, linear_heads, pack
from slipstream.kernels.norm import rms_norm, rms_norm_heads_
from slipstream.kernels.rope import rope_kv_write
from slipstream.target.rotary import halves_first, rotary_tables
from slipstream.target.rows import KVTensor, Rows
from slipstream.target.shape import ModelShape
from slipstream.target.weights import Loader, with_rows


class Rotary:
    """The tables that all layers share: cos and sin, float32 [positions, rotated dimensions / 2]."""

    def __init__(self, shape: ModelShape, positions: int, device: str) -> None:
        dim = shape.latent.rope_dim if shape.latent else shape.head_dim
        self.cos, self.sin = rotary_tables(shape.rope, dim, positions, device)


class Attention(Protocol):
    """What a layer does to a row with the rows before it."""

    layout: tuple[KVTensor, ...]
    """The KV tensors of one row."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one row reads."""
        ...

    def __call__(self, hidden: Tensor, rows: Rows, kv: tuple[Tensor, ...]) -> Tensor:
        """[B, T, H] to the same; writes the rows' KV."""
        ...


class GroupedAttention:
    """Several heads share one head of K and V (arXiv 2305.13245); Qwen3 norms q and k before it rotates them."""

    def __init__(self, load: Loader, shape: ModelShape, rotary: Rotary) -> None:
        self._kv_heads, self._scale, self._eps = shape.kv_heads, shape.attention_scale, shape.rms_norm_eps
        self._rotary = rotary
        self._qkv = load.linear("q_proj", "k_proj", "v_proj", has_bias=shape.attention_bias)
        self._out = load.linear("o_proj", has_bias=shape.attention_bias)
        self._norms = (load.norm("q_norm"), load.norm("k_norm")) if shape.qk_norm else None
        heads = (shape.kv_heads, shape.head_dim)
        self.layout: tuple[KVTensor, ...] = (KVTensor("k", heads), KVTensor("v", heads))

    @property
    def weight_bytes(self) -> int:
        return self._qkv.nbytes + self._out.nbytes

    def __call__(self, hidden: Tensor, rows: Rows, kv: tuple[Tensor, ...]) -> Tensor:
        k_cache, v_cache = kv
        qkv = linear(hidden, self._qkv)
        if self._norms:
            rms_norm_heads_(qkv, *self._norms, self._kv_heads, self._eps)
        q = rope_kv_write(
            qkv, self._rotary.cos, self._rotary.sin, rows.positions, rows.kv_rows, k_cache, v_cache
        )
        return linear(_attend(q, k_cache, v_cache, rows, self._scale).flatten(2), self._out)


class LatentAttention:
    """K and V of all heads are one latent a token, from which each head makes its own (arXiv 2405.04434, 2.1).

    The absorbed form: instead of making every head's K and V from all latents, q is taken into the latent's space and
    the result out of it, so the cache holds the latent and one rotated key, and attention runs over these alone: as
    one KV head, whose values are the first `kv_rank` elements of its keys.
    """

    _EPS = 1e-6
    """Of the norms inside, whatever the config's own is: so these models are trained."""

    def __init__(self, load: Loader, shape: ModelShape, rotary: Rotary) -> None:
        part = shape.latent
        assert part is not None
        self._part, self._heads, self._scale, self._rotary = part, shape.heads, shape.attention_scale, rotary
        self._q_norm = load.norm("q_a_layernorm") if part.q_rank else None
        self._kv_norm = load.norm("kv_a_layernorm")
        self._down = self._load_down(load, shape)
        self._q_up = self._load_q_up(load, shape) if part.q_rank else None
        self._k_up, self._v_up = self._load_kv_up(load)
        self._out = load.linear("o_proj", has_bias=shape.attention_bias)
        self.layout: tuple[KVTensor, ...] = (KVTensor("latent", (1, part.kv_rank + part.rope_dim)),)

    @property
    def weight_bytes(self) -> int:
        packed = (self._down, self._q_up, self._k_up, self._v_up, self._out)
        return sum(weight.nbytes for weight in packed if weight)

    def __call__(self, hidden: Tensor, rows: Rows, kv: tuple[Tensor, ...]) -> Tensor:
        part, (cache,) = self._part, kv
        kv_width = part.kv_rank + part.rope_dim
        down = linear(hidden, self._down)
        q, latent = down.split([down.shape[-1] - kv_width, kv_width], dim=-1)
        if self._q_up is not None:
            assert self._q_norm is not None
            q = linear(rms_norm(q, self._q_norm, self._EPS), self._q_up)
        q = q.unflatten(-1, (self._heads, part.nope_dim + part.rope_dim))
        latent_rope_write(
            q,
            latent,
            self._kv_norm,
            self._EPS,
            self._rotary.cos,
            self._rotary.sin,
            rows.positions,
            rows.kv_rows,
            cache,
        )
        absorbed = q.new_empty(*q.shape[:-1], kv_width)
        linear_heads(q[..., : part.nope_dim], self._k_up, out=absorbed[..., : part.kv_rank])
        absorbed[..., part.kv_rank :] = q[..., part.nope_dim :]
        seen = _attend(absorbed, cache, cache, rows, self._scale)[..., : part.kv_rank]
        return linear(linear_heads(seen, self._v_up).flatten(2), self._out)

    def _load_down(self, load: Loader, shape: ModelShape) -> PackedWeight:
        """q's way down (or q itself) and the latent's, which share their input."""
        part, q_name = self._part, "q_a_proj" if self._part.q_rank else "q_proj"
        q = load.weight(f"{q_name}.weight")
        if not part.q_rank:
            q = with_rows(q, self._rotated_rows(shape))
        kv_rows = torch.cat(
            [torch.arange(part.kv_rank), part.kv_rank + halves_first(shape.rope, part.rope_dim)]
        )
        kv = with_rows(load.weight("kv_a_proj_with_mqa.weight"), kv_rows)
        bias = None
        if shape.attention_bias:
            q_bias = (
                load.dense("q_a_proj.bias") if part.q_rank else torch.zeros(len(self._rotated_rows(shape)))
            )
            bias = torch.cat([q_bias.float(), load.dense("kv_a_proj_with_mqa.bias").float()[kv_rows]])
        return pack([q, kv], load.format, bias)

    def _load_q_up(self, load: Loader, shape: ModelShape) -> PackedWeight:
        return pack(with_rows(load.weight("q_b_proj.weight"), self._rotated_rows(shape)), load.format)

    def _load_kv_up(self, load: Loader) -> tuple[PackedWeight, PackedWeight]:
        """By head: from q's part without rotation to the latent, and from the latent to the value."""
        part = self._part
        both = dense(load.weight("kv_b_proj.weight")).unflatten(0, (self._heads, -1))
        k, v = both.split([part.nope_dim, part.value_dim], dim=1)
        return load.many(self._heads, lambda head: k[head].T), load.many(self._heads, lambda head: v[head])

    def _rotated_rows(self, shape: ModelShape) -> Tensor:
        """q's outputs, those of each head that are rotated with their halves together."""
        part = self._part
        one = torch.cat(
            [torch.arange(part.nope_dim), part.nope_dim + halves_first(shape.rope, part.rope_dim)]
        )
        return (torch.arange(self._heads)[:, None] * len(one) + one).flatten()


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Rows, scale: float) -> Tensor:
    return attention(
        q,
        k_cache,
        v_cache,
        rows.table,
        rows.slots,
        rows.prefix,
        rows.depth,
        rows.ancestors,
        scale,
        rows.extent,
    )


def make_attention(load: Loader, shape: ModelShape, rotary: Rotary) -> Attention:
    """The attention of a layer."""
    return LatentAttention(load, shape, rotary) if shape.latent else GroupedAttention(load, shape, rotary)
