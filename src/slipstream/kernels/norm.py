"""RMSNorm, alone and fused with the residual addition before it (Zhang & Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.native import native


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] divided by its root mean square (in float32) and multiplied by weight [H]; x's dtype."""
    if x.device.type == "cpu" and (ext := native()) is not None:
        y: Tensor = ext.rms_norm(x, weight, eps)
        return y
    return rms_norm_reference(x, weight, eps)


def add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x [..., H] to `residual` in place (rounded to its dtype), and returns the RMSNorm of that sum."""
    if x.device.type == "cpu" and (ext := native()) is not None:
        y: Tensor = ext.add_rms_norm_(x, residual, weight, eps)
        return y
    return rms_norm_reference(residual.add_(x), weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)
