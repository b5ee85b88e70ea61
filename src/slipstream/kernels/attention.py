"""Attention of a few rows over a KV cache that is reached through a (request, position) -> row table.

The rows of one request are a tree whose root is its last committed token. Row t sees the committed keys and its own
ancestors, itself included, and nothing else. The key of an ancestor at depth d counts as index `prefix + d`, so a row
reduces over the very sequence of keys that plain decoding would have at its position, in blocks of `BLOCK` keys that
start at multiples of `BLOCK`: the bits of a row depend on neither the tree around it, nor the batch, nor the extent
(design rule 3). Online softmax: Milakov & Gimelshein 2018 (arXiv 1805.02867).
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.native import native

BLOCK = 64
"""Keys reduced together before the running maximum is updated."""


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    slots: Tensor,
    prefix: Tensor,
    depth: Tensor | None,
    ancestors: Tensor | None,
    scale: float,
) -> Tensor:
    """softmax(q K^T * scale) V for every row over its own keys.

    q: [B, T, H, D]. k_cache, v_cache: [rows, Hkv, D], H a multiple of Hkv. table: int64 [S, P], the cache row of
    each (slot, index). slots: int64 [B]. prefix: int64 [B], keys before the tree's root. depth: int64 [B, T], the
    root's is 0. ancestors: int64 [B, T, A], the tree rows on the path from the root to each row, root first, itself
    last (at `depth`), the rest unused. A chain (and a prefill) passes None for both: row t's depth is t.
    Returns [B, T, H, D] in q's dtype; sums in float32.
    """
    if q.device.type == "cpu" and (ext := native()) is not None:
        out: Tensor = ext.attention(q, k_cache, v_cache, table, slots, prefix, depth, ancestors, scale)
        return out
    return attention_reference(q, k_cache, v_cache, table, slots, prefix, depth, ancestors, scale)


def attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    slots: Tensor,
    prefix: Tensor,
    depth: Tensor | None,
    ancestors: Tensor | None,
    scale: float,
) -> Tensor:
    out = torch.empty_like(q)
    group = q.shape[2] // k_cache.shape[1]
    for b in range(q.shape[0]):
        slot_rows, before = table[slots[b]], int(prefix[b])
        for t in range(q.shape[1]):
            if ancestors is None or depth is None:
                indices = torch.arange(before + t + 1, device=q.device)
            else:
                path = before + ancestors[b, t, : int(depth[b, t]) + 1]
                indices = torch.cat([torch.arange(before, device=q.device), path])
            rows = slot_rows[indices]
            keys = k_cache[rows].float().repeat_interleave(group, dim=1)  # [L, H, D]
            values = v_cache[rows].float().repeat_interleave(group, dim=1)
            out[b, t] = _one_row(q[b, t].float(), keys, values, scale).to(q.dtype)
    return out


def _one_row(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """q [H, D], keys and values [L, H, D] -> [H, D], block by block in key order."""
    running_max = q.new_full((q.shape[0], 1), float("-inf"))
    total, acc = torch.zeros_like(running_max), torch.zeros_like(q)
    for start in range(0, keys.shape[0], BLOCK):
        k, v = keys[start : start + BLOCK], values[start : start + BLOCK]
        scores = (q[None] * k).sum(-1).T * scale  # [H, block]
        new_max = torch.maximum(running_max, scores.amax(-1, keepdim=True))
        weights, decay = torch.exp(scores - new_max), torch.exp(running_max - new_max)
        total = total * decay + weights.sum(-1, keepdim=True)
        acc = acc * decay + (weights.T[..., None] * v).sum(0)
        running_max = new_max
    return acc / total
