"""What a row goes through by itself: RMSNorm, rotary embedding with the write of its KV, SwiGLU, argmax.

One program a row (or a row's head): its bits depend on the row alone. See the modules of the same names in `kernels/`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.launch import overlap, power_of_two


@triton.jit
def _rms_norm(
    x_ptr, residual_ptr, weight_ptr, y_ptr, width, x_stride, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    is_in = at < width
    weight = tl.load(weight_ptr + at, mask=is_in, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + row * x_stride + at, mask=is_in, other=0.0)
    if HAS_RESIDUAL:
        place = residual_ptr + row * width + at
        x = (tl.load(place, mask=is_in, other=0.0).to(tl.float32) + x.to(tl.float32)).to(x.dtype)
        tl.store(place, x, mask=is_in)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    tl.store(y_ptr + row * width + at, (wide * scale * weight).to(x.dtype), mask=is_in)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """The norm of x [..., H], or of x + residual, which is then kept in `residual`."""
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(rows):
        block = power_of_two(width)
        _rms_norm[(len(rows),)](
            rows, rows if residual is None else residual, weight, y, width, rows.stride(0), eps,
            HAS_RESIDUAL=residual is not None, BLOCK=block, num_warps=_warps(block), **overlap(x),
        )  # fmt: skip
    return y


def _warps(block: int) -> int:
    """Eight elements a thread, as far as a block has so many threads."""
    return min(max(block // 256, 1), 16)


@triton.jit
def _norm_heads(
    qkv_ptr, q_norm_ptr, k_norm_ptr, heads, kv_heads, eps, DIM: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, DIM)
    place = qkv_ptr + (row * (heads + 2 * kv_heads) + head) * DIM + at
    x = tl.load(place)
    wide = x.to(tl.float32)
    q_weight, k_weight = tl.load(q_norm_ptr + at).to(tl.float32), tl.load(k_norm_ptr + at).to(tl.float32)
    weight = tl.where(head < heads, q_weight, k_weight)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / DIM + eps)
    tl.store(place, (wide * scale * weight).to(x.dtype))


def rms_norm_heads_(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, kv_heads: int, eps: float) -> None:
    dim = len(q_norm)
    heads = qkv.shape[-1] // dim - 2 * kv_heads
    rows = qkv.numel() // qkv.shape[-1]
    _norm_heads[(rows, heads + kv_heads)](
        qkv, q_norm, k_norm, heads, kv_heads, eps, DIM=dim, num_warps=1, **overlap(qkv)
    )


@triton.jit
def _rope_kv_write(
    qkv_ptr, cos_ptr, sin_ptr, positions_ptr, kv_rows_ptr, k_ptr, v_ptr, q_ptr, heads, kv_heads,
    HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, HALF)
    source = qkv_ptr + (row * (heads + 2 * kv_heads) + head) * 2 * HALF + at
    low, high = tl.load(source).to(tl.float32), tl.load(source + HALF).to(tl.float32)
    position, kv_row = tl.load(positions_ptr + row), tl.load(kv_rows_ptr + row)
    cos, sin = tl.load(cos_ptr + position * HALF + at), tl.load(sin_ptr + position * HALF + at)
    first, second = low * cos - high * sin, high * cos + low * sin
    dtype = q_ptr.dtype.element_ty
    if head < heads:
        to = q_ptr + (row * heads + head) * 2 * HALF + at
        tl.store(to, first.to(dtype))
        tl.store(to + HALF, second.to(dtype))
    elif head < heads + kv_heads:
        to = k_ptr + (kv_row * kv_heads + head - heads) * 2 * HALF + at
        tl.store(to, first.to(dtype))
        tl.store(to + HALF, second.to(dtype))
    else:
        to = v_ptr + (kv_row * kv_heads + head - heads - kv_heads) * 2 * HALF + at
        tl.store(to, low.to(dtype))
        tl.store(to + HALF, high.to(dtype))


def rope_kv_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv_rows: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    batch, rows, width = qkv.shape
    kv_heads, dim = k_cache.shape[1:]
    heads = width // dim - 2 * kv_heads
    q = torch.empty(batch, rows, heads, dim, dtype=qkv.dtype, device=qkv.device)
    _rope_kv_write[(batch * rows, heads + 2 * kv_heads)](
        qkv, cos, sin, positions.contiguous(), kv_rows.contiguous(), k_cache, v_cache, q, heads, kv_heads,
        HALF=dim // 2, num_warps=1, **overlap(qkv),
    )  # fmt: skip
    return q


@triton.jit
def _latent_rope_write(
    q_ptr, kv_ptr, norm_ptr, cos_ptr, sin_ptr, positions_ptr, kv_rows_ptr, cache_ptr,
    heads, q_width, kv_stride, rank, eps, HALF: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half = tl.arange(0, HALF)
    position = tl.load(positions_ptr + row)
    cos, sin = tl.load(cos_ptr + position * HALF + half), tl.load(sin_ptr + position * HALF + half)
    dtype = cache_ptr.dtype.element_ty
    is_q = head < heads
    source = q_ptr + (row * heads + head + 1) * q_width - 2 * HALF
    if head == heads:  # the program of the latent and its key
        source = kv_ptr + row * kv_stride + rank
    low, high = tl.load(source + half).to(tl.float32), tl.load(source + HALF + half).to(tl.float32)
    first, second = (low * cos - high * sin).to(dtype), (high * cos + low * sin).to(dtype)
    if is_q:
        tl.store(source + half, first)
        tl.store(source + HALF + half, second)
    else:
        to = cache_ptr + tl.load(kv_rows_ptr + row) * (rank + 2 * HALF)
        tl.store(to + rank + half, first)
        tl.store(to + rank + HALF + half, second)
        at = tl.arange(0, BLOCK)
        is_in = at < rank
        wide = tl.load(kv_ptr + row * kv_stride + at, mask=is_in, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / rank + eps)
        weight = tl.load(norm_ptr + at, mask=is_in, other=0.0).to(tl.float32)
        tl.store(to + at, (wide * scale * weight).to(dtype), mask=is_in)


def latent_rope_write(
    q: Tensor,
    kv: Tensor,
    norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv_rows: Tensor,
    cache: Tensor,
) -> None:
    batch, rows, heads, width = q.shape
    if not q.is_contiguous():
        raise ValueError("q is rotated in place, so it must be contiguous")
    kv = kv.reshape(batch * rows, -1)
    _latent_rope_write[(batch * rows, heads + 1)](
        q, kv, norm, cos, sin, positions.contiguous(), kv_rows.contiguous(), cache,
        heads, width, kv.stride(0), len(norm), eps,
        HALF=cos.shape[-1], BLOCK=power_of_two(len(norm)), num_warps=2, **overlap(q),
    )  # fmt: skip


@triton.jit
def _swiglu(x_ptr, y_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = at < width
    gate = tl.load(x_ptr + row * 2 * width + at, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + at, mask=is_in, other=0.0).to(tl.float32)
    tl.store(
        y_ptr + row * width + at, (gate / (1 + tl.exp(-gate)) * up).to(y_ptr.dtype.element_ty), mask=is_in
    )


def swiglu(gate_up: Tensor) -> Tensor:
    width = gate_up.shape[-1] // 2
    y = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    rows = y.numel() // width
    if rows:
        _swiglu[(rows, triton.cdiv(width, 1024))](
            gate_up.contiguous(), y, width, BLOCK=1024, num_warps=4, **overlap(gate_up)
        )
    return y


_PART = 4096
"""Logits that one program looks through."""


@triton.jit
def _part_argmax(
    logits_ptr, top_ptr, at_ptr, stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * stride + at, mask=at < width, other=float("-inf"))
    x = tl.where(x == x, x, float("-inf"))
    top = tl.max(x, 0)
    # At least one logit must exceed -inf to be chosen; a row without any gives 0.
    first = tl.min(tl.where((x == top) & (at < width), at, width), 0)
    tl.store(top_ptr + row * tl.num_programs(1) + part, top)
    tl.store(at_ptr + row * tl.num_programs(1) + part, first)


@triton.jit
def _row_argmax(
    top_ptr, at_ptr, out_ptr, parts, width, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    top = tl.load(top_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
    at = tl.load(at_ptr + row * parts + part, mask=part < parts, other=width)
    first = tl.min(tl.where(top == tl.max(top, 0), at, width), 0)
    tl.store(out_ptr + row, tl.where(first < width, first, 0).to(tl.int64))


def argmax(logits: Tensor) -> Tensor:
    rows, width = logits.shape
    parts = triton.cdiv(width, _PART)
    top = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    at = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        how = overlap(logits)
        _part_argmax[(rows, parts)](logits, top, at, logits.stride(0), width, BLOCK=_PART, num_warps=8, **how)
        _row_argmax[(rows,)](top, at, out, parts, width, BLOCK=power_of_two(parts), num_warps=1, **how)
    return out
