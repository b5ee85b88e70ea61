"""RMSNorm, alone and fused with the residual addition before it (Zhang & Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels import triton as gpu
from slipstream.kernels.native import native


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] divided by its root mean square (in float32) and multiplied by weight [H]; x's dtype."""
    if x.device.type == "cpu" and (ext := native()) is not None:
        y: Tensor = ext.rms_norm(x, weight, eps)
        return y
    if gpu.runs(x):
        from slipstream.kernels.triton import rows

        return rows.rms_norm(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x [..., H] to `residual` in place (rounded to its dtype), and returns the RMSNorm of that sum."""
    if x.device.type == "cpu" and (ext := native()) is not None:
        y: Tensor = ext.add_rms_norm_(x, residual, weight, eps)
        return y
    if gpu.runs(x):
        from slipstream.kernels.triton import rows

        return rows.rms_norm(x, weight, eps, residual)
    return rms_norm_reference(residual.add_(x), weight, eps)


def rms_norm_heads_(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, kv_heads: int, eps: float) -> None:
    """RMSNorm in place of every q and k head of qkv [..., (H + 2 Hkv) * D], q's heads first; q_norm, k_norm: [D]."""
    if qkv.device.type == "cpu" and (ext := native()) is not None:
        ext.rms_norm_heads_(qkv, q_norm, k_norm, kv_heads, eps)
        return
    if gpu.runs(qkv):
        from slipstream.kernels.triton import rows

        rows.rms_norm_heads_(qkv, q_norm, k_norm, kv_heads, eps)
        return
    rms_norm_heads_reference_(qkv, q_norm, k_norm, kv_heads, eps)


def rms_norm_heads_reference_(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, kv_heads: int, eps: float) -> None:
    heads = qkv.view(*qkv.shape[:-1], -1, len(q_norm))
    first_k = heads.shape[-2] - 2 * kv_heads
    heads[..., :first_k, :] = rms_norm_reference(heads[..., :first_k, :], q_norm, eps)
    k = heads[..., first_k : first_k + kv_heads, :]
    heads[..., first_k : first_k + kv_heads, :] = rms_norm_reference(k, k_norm, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)
