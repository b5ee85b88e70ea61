"""What an EAGLE-3 drafter is, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.target.shape import Rope


@dataclass(frozen=True)
class Eagle3Shape:
    """One Llama layer over twice its width, an output layer over a part of the target's vocabulary."""

    hidden_size: int
    """Of the drafter and of the target's embedding."""
    target_hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    """The target's."""
    draft_vocab_size: int
    rms_norm_eps: float
    rope: Rope
    taps: tuple[int, ...]
    """The target's states that it reads: boundaries between layers (0 is the embedding)."""
    max_positions: int = 2048
    norm_before_residual: bool = False
    """The residual is the normed state instead of the raw one."""
    norm_output: bool = False
    """The normed state goes into the next step instead of the raw one (EAGLE-3.1)."""


def default_taps(layers: int) -> tuple[int, int, int]:
    """The states that EAGLE's own trainer reads: entering layers 2, n / 2 and n - 3."""
    return (2, layers // 2, layers - 3)
