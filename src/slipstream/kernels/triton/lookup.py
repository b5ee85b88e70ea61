"""Prompt lookup on a GPU: every position of a text at once, see `slipstream.kernels.lookup`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.launch import overlap, power_of_two

_BLOCK = 256


@triton.jit
def _best_in_block(
    text_ptr, slots_ptr, lengths_ptr, best_ptr, width,
    SUFFIX: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The longest suffix that ends in this block, the latest among equals: suffix * width + position."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request, block = tl.program_id(0), tl.program_id(1)
    text = text_ptr + tl.load(slots_ptr + request) * width
    end = tl.load(lengths_ptr + request) - 1
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    suffix = tl.zeros([BLOCK], tl.int64)
    if block * BLOCK < end:
        is_equal = at < end
        for back in tl.static_range(SUFFIX):
            here = tl.load(text + at - back, mask=is_equal & (at >= back), other=-1)
            last = tl.load(text + tl.maximum(end - back, 0))
            is_equal = is_equal & (at >= back) & (here == last)
            suffix += is_equal.to(tl.int64)
    found = tl.max(tl.where(suffix > 0, suffix * width + at, 0), 0)
    tl.store(best_ptr + request * tl.num_programs(1) + block, found)


@triton.jit
def _follow(
    text_ptr, slots_ptr, lengths_ptr, best_ptr, draft_ptr, matched_ptr, width, blocks, count,
    BLOCKS: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0)
    text = text_ptr + tl.load(slots_ptr + request) * width
    end = tl.load(lengths_ptr + request) - 1
    block = tl.arange(0, BLOCKS)
    best = tl.max(tl.load(best_ptr + request * blocks + block, mask=block < blocks, other=0), 0)
    matched, at = best // width, best % width
    period = tl.maximum(end - at, 1)
    ahead = tl.arange(0, COUNT)
    source = tl.minimum(at + 1 + ahead % period, width - 1)
    token = tl.load(text + source, mask=ahead < count, other=0)
    tl.store(draft_ptr + request * count + ahead, token, mask=ahead < count)
    tl.store(matched_ptr + request, matched)


def lookup(
    tokens: Tensor, slots: Tensor, lengths: Tensor, max_suffix: int, count: int
) -> tuple[Tensor, Tensor]:
    batch, width = len(slots), tokens.shape[1]
    blocks = triton.cdiv(width, _BLOCK)
    best = torch.empty(batch, blocks, dtype=torch.int64, device=tokens.device)
    draft = torch.empty(batch, count, dtype=torch.int64, device=tokens.device)
    matched = torch.empty(batch, dtype=torch.int64, device=tokens.device)
    how = overlap(tokens)
    _best_in_block[(batch, blocks)](
        tokens, slots, lengths, best, width, SUFFIX=max_suffix, BLOCK=_BLOCK, num_warps=4, **how
    )
    _follow[(batch,)](
        tokens, slots, lengths, best, draft, matched, width, blocks, count,
        BLOCKS=power_of_two(blocks), COUNT=power_of_two(count), num_warps=1, **how,
    )  # fmt: skip
    return draft, matched
