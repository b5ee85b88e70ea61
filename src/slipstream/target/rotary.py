"""Rotary tables: cos and sin of every position, with the ways in which models stretch their context."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.target.shape import Rope


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


def halves_first(rope: Rope, dim: int) -> Tensor:
    """int64 [dim]: the order of a head's rotated outputs in which the kernels rotate them, element i with i + dim / 2.

    Where a checkpoint pairs neighbours instead, its rows are loaded in another order once; scores do not change, as q
    and k are reordered alike.
    """
    order = torch.arange(dim)
    return torch.cat([order[0::2], order[1::2]]) if rope.interleaved else order
