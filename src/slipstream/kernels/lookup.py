"""Prompt lookup: find the longest suffix of a text that occurs earlier in it, and propose what followed."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels import triton as gpu
from slipstream.kernels.native import native


def lookup(
    tokens: Tensor, slots: Tensor, lengths: Tensor, max_suffix: int, count: int
) -> tuple[Tensor, Tensor]:
    """Drafts `count` tokens a request from its own text.

    tokens: int64 [S, P], the text of each slot. slots, lengths: int64 [B]; the text is `tokens[slot, :length]`.
    The longest suffix of at most `max_suffix` tokens that ends earlier in the text wins; among equals the latest.
    What followed it is drafted; where that runs into the text's end it goes on through its own continuation (a text
    with period p is drafted periodically). Returns draft int64 [B, count] and matched int64 [B], the length of
    the suffix found; 0 means none, and the draft is then arbitrary.
    """
    if tokens.device.type == "cpu" and (ext := native()) is not None:
        draft, matched = ext.lookup(tokens, slots, lengths, max_suffix, count)
        return draft, matched
    if gpu.runs(tokens):
        from slipstream.kernels.triton import lookup as on_gpu

        return on_gpu.lookup(tokens, slots, lengths, max_suffix, count)
    return lookup_reference(tokens, slots, lengths, max_suffix, count)


def lookup_reference(
    tokens: Tensor, slots: Tensor, lengths: Tensor, max_suffix: int, count: int
) -> tuple[Tensor, Tensor]:
    text = tokens[slots]
    end = (lengths - 1)[:, None]
    at = torch.arange(text.shape[1], device=text.device)[None]
    is_equal = torch.ones_like(text, dtype=torch.bool)
    suffix = torch.zeros_like(text)
    for back in range(max_suffix):
        is_inside = (at >= back) & (at < end)
        here = text.gather(1, (at - back).clamp_min(0).expand_as(text))
        last = text.gather(1, (end - back).clamp_min(0))
        is_equal &= is_inside & (here == last)
        suffix += is_equal
    best = (suffix * text.shape[1] + at).argmax(1, keepdim=True)
    matched = suffix.gather(1, best)
    period = (end - best).clamp_min(1)
    ahead = torch.arange(count, device=text.device)[None] % period
    draft = text.gather(1, (best + 1 + ahead).clamp(max=text.shape[1] - 1))
    return draft, matched[:, 0]
