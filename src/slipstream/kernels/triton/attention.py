"""Attention of a few rows over long contexts, split over the keys (flash-decoding, Dao et al. 2023).

Where the keys are split depends on their index alone (`split_start`), every split is reduced in blocks of `BLOCK` keys
from its start, and the splits are added in order: so a row's bits depend on neither the rows beside it nor the extent
(design rule 3). Splits that lie wholly before the tree are the same keys for all rows of a request, which then share
one pass over them; in those that hold tree rows, each row of a tree has keys of its own and goes alone. One shape of
block is used for all: another shape would add in another order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.launch import overlap

BLOCK_M = 64
"""Query rows of one block: a tree row times the heads that share a KV head."""
BLOCK = 64
_CHUNK = 16
"""Splits that are added at once."""


@triton.jit
def split_start(split):
    """The first key of a split: 128 keys each up to 4096, 512 up to 32768, 2048 from there."""
    near = split * 128
    middle = 4096 + (split - 32) * 512
    far = 32768 + (split - 88) * 2048
    return tl.where(split < 32, near, tl.where(split < 88, middle, far))


@triton.jit
def _split_of(key):
    """The split that holds a key."""
    near = key // 128
    middle = 32 + (key - 4096) // 512
    far = 88 + (key - 32768) // 2048
    return tl.where(key < 4096, near, tl.where(key < 32768, middle, far))


def splits_within(extent: int) -> int:
    """The splits that hold the first `extent` keys."""
    last = max(extent, 1) - 1
    if last < 4096:
        return last // 128 + 1
    if last < 32768:
        return 32 + (last - 4096) // 512 + 1
    return 88 + (last - 32768) // 2048 + 1


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, table_ptr, slots_ptr, prefix_ptr, depth_ptr, ancestors_ptr, acc_ptr, stat_ptr,
    scale_log2, table_width, rows, ancestors_width,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, DR: tl.constexpr, IS_SHARED: tl.constexpr,
    IS_TREE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request, head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    split, tile = tl.program_id(1), tl.program_id(2)
    begin = split_start(split)
    end = split_start(split + 1)
    slot = tl.load(slots_ptr + request)
    before = tl.load(prefix_ptr + request).to(tl.int32)
    m = tl.arange(0, M)
    tiles = (rows * GROUP + M - 1) // M
    is_own = tile >= tiles
    each = (GROUP + M - 1) // M
    own_row = (tile - tiles) // each
    flat = tile * M + m
    row = tl.where(is_own, own_row, flat // GROUP)
    member = tl.where(is_own, (tile - tiles) % each * M + m, flat % GROUP)
    is_here = (row < rows) & (member < GROUP)
    if IS_TREE:
        taken = tl.where(is_own, end - before, before + 1 - end)  # own keys go alone, common ones together
        is_here = is_here & (taken + 0 * row > 0)
        depth = tl.load(depth_ptr + request * rows + row, mask=is_here, other=0).to(tl.int32)
    else:
        depth = row
    length = tl.where(is_here, before + depth + 1, 0)
    end = tl.minimum(end, tl.max(length, 0))

    DK: tl.constexpr = DV + DR
    dv = tl.arange(0, DV)
    heads = KV_HEADS * GROUP
    q_at = ((request * rows + row) * heads + head * GROUP + member).to(tl.int64)
    q = tl.load(q_ptr + q_at[:, None] * DK + dv[None, :], mask=is_here[:, None], other=0.0)
    if DR > 0:
        dr = tl.arange(0, DR)
        q_rest = tl.load(q_ptr + q_at[:, None] * DK + DV + dr[None, :], mask=is_here[:, None], other=0.0)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DV], tl.float32)
    for first in range(begin, end, N):
        key = first + tl.arange(0, N)
        index = key
        if IS_TREE:
            up = key - before
            up = tl.where(is_own, up, -1)
            on_path = (up >= 0) & (up < ancestors_width)
            at = (request * rows + own_row) * ancestors_width + up
            node = tl.load(ancestors_ptr + at, mask=on_path, other=0).to(tl.int32)
            index = tl.where(up >= 0, before + node, key)
        kv_row = tl.load(table_ptr + slot * table_width + index, mask=key < end, other=0)
        k_at = (kv_row * KV_HEADS + head) * DK
        k = tl.load(k_ptr + k_at[:, None] + dv[None, :])
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if DR > 0:
            k_rest = tl.load(k_ptr + k_at[:, None] + DV + dr[None, :])
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        scores = tl.where(key[None, :] < length[:, None], scores * scale_log2, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(weights, 1)
        v = k if IS_SHARED else tl.load(v_ptr + k_at[:, None] + dv[None, :])
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        top = higher
    out = q_at * tl.num_programs(1) + split
    is_seen = is_here & (begin < length)
    tl.store(acc_ptr + out[:, None] * DV + dv[None, :], acc, mask=is_seen[:, None])
    tl.store(stat_ptr + out * 2, top, mask=is_seen)
    tl.store(stat_ptr + out * 2 + 1, total, mask=is_seen)


@triton.jit
def _combine(
    acc_ptr, stat_ptr, prefix_ptr, depth_ptr, out_ptr, rows, heads, splits,
    DV: tl.constexpr, IS_TREE: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at, head = tl.program_id(0), tl.program_id(1)
    request, row = at // rows, at % rows
    depth = tl.load(depth_ptr + at).to(tl.int32) if IS_TREE else row
    count = _split_of(tl.load(prefix_ptr + request).to(tl.int32) + depth) + 1
    q_at = (at * heads + head).to(tl.int64)
    part, dv = tl.arange(0, CHUNK), tl.arange(0, DV)
    base, total, acc = float("-inf"), 0.0, tl.zeros([DV], tl.float32)
    for first in range(0, count, CHUNK):
        here = q_at * splits + first + part
        is_in = first + part < count
        tops = tl.load(stat_ptr + here * 2, mask=is_in, other=float("-inf"))
        sums = tl.load(stat_ptr + here * 2 + 1, mask=is_in, other=0.0)
        parts = tl.load(acc_ptr + here[:, None] * DV + dv[None, :], mask=is_in[:, None], other=0.0)
        higher = tl.maximum(base, tl.max(tops, 0))
        decay, weight = tl.exp2(base - higher), tl.exp2(tops - higher)
        total = total * decay + tl.sum(weight * sums, 0)
        acc = acc * decay + tl.sum(weight[:, None] * parts, 0)
        base = higher
    tl.store(out_ptr + q_at * DV + dv, (acc / total).to(out_ptr.dtype.element_ty))


def takes(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether heads of this size fit the blocks: powers of two, or a latent with a smaller rotated part behind it."""
    dim = k_cache.shape[-1]
    values = _values(dim)
    return values >= 16 and (
        dim == values or (k_cache is v_cache and _values(dim - values) == dim - values >= 16)
    )


def _values(dim: int) -> int:
    """The largest power of two in it."""
    return 1 << (dim.bit_length() - 1)


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
    """See `slipstream.kernels.attention`. Where K and V are one latent, returns its first power of two elements."""
    batch, rows, heads, dim = q.shape
    kv_heads, values = k_cache.shape[1], _values(dim)
    group = heads // kv_heads
    splits = splits_within(min(extent or table.shape[1], table.shape[1]))
    is_tree = depth is not None and ancestors is not None
    tiles = triton.cdiv(rows * group, BLOCK_M)
    if is_tree:
        tiles += rows * triton.cdiv(group, BLOCK_M)
    acc = torch.empty(batch, rows, heads, splits, values, dtype=torch.float32, device=q.device)
    stat = torch.empty(batch, rows, heads, splits, 2, dtype=torch.float32, device=q.device)
    out = torch.empty(batch, rows, heads, values, dtype=q.dtype, device=q.device)
    q, how = q.contiguous(), overlap(q)
    no_tree = prefix  # not read
    depth_ = depth.contiguous() if is_tree and depth is not None else no_tree
    ancestors_ = ancestors.contiguous() if is_tree and ancestors is not None else no_tree
    _attend[(batch * kv_heads, splits, tiles)](
        q, k_cache, v_cache, table, slots, prefix, depth_, ancestors_, acc, stat,
        scale * 1.4426950408889634, table.stride(0), rows, ancestors_.shape[-1],
        KV_HEADS=kv_heads, GROUP=group, DV=values, DR=dim - values, IS_SHARED=k_cache is v_cache,
        IS_TREE=is_tree, M=BLOCK_M, N=BLOCK,
        num_warps=8 if values > 128 else 4, num_stages=2 if values > 128 else 3, **how,
    )  # fmt: skip
    _combine[(batch * rows, heads)](
        acc, stat, prefix, depth_, out, rows, heads, splits,
        DV=values, IS_TREE=is_tree, CHUNK=_CHUNK, num_warps=4, **how,
    )  # fmt: skip
    return out
