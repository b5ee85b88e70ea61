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

from slipstream.kernels import triton as gpu
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
    extent: int = 0,
) -> Tensor:
    """softmax(q K^T * scale) V for every row over its own keys.

    q: [B, T, H, D]. k_cache, v_cache: [rows, Hkv, D], H a multiple of Hkv. table: int64 [S, P], the cache row of
    each (slot, index). slots: int64 [B]. prefix: int64 [B], keys before the tree's root. depth: int64 [B, T], the
    root's is 0. ancestors: int64 [B, T, A], the tree rows on the path from the root to each row, root first, itself
    last (at `depth`), the rest unused. A chain (and a prefill) passes None for both: row t's depth is t.
    extent: an upper bound of the keys that any row sees, for devices that must know it beforehand (0: the table's
    width). Returns [B, T, H, D] in q's dtype; sums in float32.
    """
    if q.device.type == "cpu" and (ext := native()) is not None:
        out: Tensor = ext.attention(q, k_cache, v_cache, table, slots, prefix, depth, ancestors, scale)
        return out
    if gpu.runs(q):
        from slipstream.kernels.triton import attention as on_gpu

        if on_gpu.takes(k_cache, v_cache):
            return on_gpu.attention(
                q, k_cache, v_cache, table, slots, prefix, depth, ancestors, scale, extent
            )
    if q.device.type != "cpu":
        return _eager(q, k_cache, v_cache, table, slots, prefix, depth, ancestors, scale, extent)
    return attention_reference(q, k_cache, v_cache, table, slots, prefix, depth, ancestors, scale)


def _eager(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    slots: Tensor,
    prefix: Tensor,
    depth: Tensor | None,
    ancestors: Tensor | None,
    scale: float,
    extent: int,
) -> Tensor:
    """The device library's own attention over gathered keys; bits depend on the shapes, so rule 3 does not hold."""
    rows = q.shape[1]
    length = min(extent or table.shape[1], table.shape[1])
    cache_rows = table[slots, :length]
    index = (
        torch.arange(length, device=q.device) - prefix[:, None]
    )  # of a key within the tree; negative before it
    if depth is None or ancestors is None:
        visible = index[:, None] <= torch.arange(rows, device=q.device)[:, None]
    else:
        on_path = torch.arange(ancestors.shape[2], device=q.device) <= depth[..., None]
        nodes = torch.zeros(len(q), rows, rows + 1, dtype=torch.bool, device=q.device)
        nodes.scatter_(2, torch.where(on_path, ancestors, rows), True)
        nodes[..., rows] = False
        within = index.clamp(0, rows)[:, None].expand(-1, rows, -1)
        visible = (index < 0)[:, None] | nodes.gather(2, within)
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k_cache[cache_rows].transpose(1, 2),
        v_cache[cache_rows].transpose(1, 2),
        attn_mask=visible[:, None],
        scale=scale,
        enable_gqa=q.shape[2] != k_cache.shape[1],
    )
    return out.transpose(1, 2)


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
