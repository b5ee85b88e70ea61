"""Rotary embedding of q and k fused with the write of K and V into their cache rows (Su et al., arXiv 2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels import triton as gpu
from slipstream.kernels.native import native


def rope_kv_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv_rows: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """Rotates q and k by their positions, writes k and v to the cache rows, returns q.

    qkv: [B, T, (H + 2 Hkv) * D], q's heads first, then k's, then v's. cos, sin: float32 [P, D / 2], by position.
    positions, kv_rows: int64 [B, T]. k_cache, v_cache: [rows, Hkv, D], qkv's dtype. Returns q [B, T, H, D].
    Halves are rotated as Hugging Face's Llama does: element i with i + D / 2. Computed in float32, rounded once.
    """
    if qkv.device.type == "cpu" and (ext := native()) is not None:
        q: Tensor = ext.rope_kv_write(qkv, cos, sin, positions, kv_rows, k_cache, v_cache)
        return q
    if gpu.runs(qkv):
        from slipstream.kernels.triton import rows

        return rows.rope_kv_write(qkv, cos, sin, positions, kv_rows, k_cache, v_cache)
    return rope_kv_write_reference(qkv, cos, sin, positions, kv_rows, k_cache, v_cache)


def rope_kv_write_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv_rows: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    b, t, _ = qkv.shape
    kv_heads, dim = k_cache.shape[1:]
    heads = qkv.view(b, t, -1, dim)
    q, k, v = heads.split([heads.shape[2] - 2 * kv_heads, kv_heads, kv_heads], dim=2)
    c, s = cos[positions][:, :, None], sin[positions][:, :, None]
    k_cache[kv_rows] = rotate(k, c, s)
    v_cache[kv_rows] = v
    return rotate(q, c, s)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., D] by angles whose cos and sin broadcast to [..., D / 2]."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)
