"""Skinny matrix products in bfloat16: y[R, N] = x[R, K] W[N, K]^T + b for a few rows, at the speed of reading W.

The weight takes the tensor cores' 64-wide side and the rows their narrow one, so that one instruction (wgmma, K = 16)
serves every number of rows. Each output is summed in float32 along K, 16 inputs at a time; a long K is cut into
`split_k` parts that several programs sum, added in the order of K. Where it is cut, and so a row's bits, depends on
N and K alone (design rule 3); how many rows and outputs a program takes does not change them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.kernels.triton.launch import overlap
from slipstream.kernels.triton.pieces import MAX_ROWS, finish, prefetch, product, workspace


@triton.jit
def _dense(
    w,
    x,
    w_tiles,
    x_tiles,
    bias,
    y,
    partial,
    counters,
    outputs,
    inputs,
    rows,
    x_stride,
    y_stride,
    SPLIT_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BY_TILES: tl.constexpr,
    PDL: tl.constexpr,
    AHEAD: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile [BLOCK_N, BLOCK_R] of y^T over one part of K. Programs that read the same weights are neighbours.

    EACH: blocks of K that one part takes. BY_TILES: tiles come through tensor descriptors (w_tiles, x_tiles), else
    through pointers. What lies beyond K counts as zero.
    """
    row_blocks = tl.cdiv(rows, BLOCK_R)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    first_n = (tile // row_blocks) * BLOCK_N
    first_r = (tile % row_blocks) * BLOCK_R
    n = first_n + tl.arange(0, BLOCK_N)
    r = first_r + tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    start = split * EACH
    read_n = tl.where(n < outputs, n, 0).to(tl.int64)  # beyond the end row 0 is read and not used
    if PDL and AHEAD > 0:
        lines: tl.constexpr = AHEAD * BLOCK_K // 64
        line = start * BLOCK_K + tl.arange(0, lines) * 64
        prefetch(w, read_n[:, None] * inputs + tl.minimum(line, inputs - 1)[None, :])
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    w_at = w + read_n[:, None] * inputs + k[None, :]
    x_at = x + r[:, None].to(tl.int64) * x_stride + k[None, :]
    is_row = r[:, None] < rows
    acc = tl.zeros([BLOCK_N, BLOCK_R], dtype=tl.float32)
    for step in range(EACH):
        at = (start + step) * BLOCK_K
        if BY_TILES:
            w_part = w_tiles.load([first_n, at])
            x_part = x_tiles.load([first_r, at])
        elif EVEN_K:
            w_part = tl.load(w_at + at)
            x_part = tl.load(x_at + at, mask=is_row, other=0.0)
        else:
            w_part = tl.load(w_at + at, mask=(k < inputs - at)[None, :], other=0.0)
            x_part = tl.load(x_at + at, mask=is_row & (k < inputs - at)[None, :], other=0.0)
        acc = product(w_part, x_part.T, acc)
    finish(
        acc, tile, split, n, r, y, bias, partial, counters, outputs, rows, y_stride,
        SPLIT_K, HAS_BIAS, BLOCK_N, BLOCK_R,
    )  # fmt: skip


@dataclass(frozen=True)
class Tiles:
    """How one launch goes about it; none of this changes a bit."""

    block_n: int
    """Outputs of a program, a multiple of 64."""
    stages: int
    """Blocks of K on their way at once."""
    warps: int
    """4 for each 64 or 128 outputs."""
    by_tiles: bool = False
    """Through tensor descriptors (Hopper's bulk copies), where rows of the weight are multiples of 16 bytes."""
    ahead: int = 0
    """Blocks of K that are asked to the L2 cache while the kernel before still runs; a power of two, or 0."""


@dataclass(frozen=True)
class Plan:
    """How a product of one (N, K) is computed.

    `block_k` and `split_k`, on which bits depend, are the same for all rows.
    """

    split_k: int
    block_k: int = 64
    few: Tiles = field(default_factory=lambda: Tiles(64, 8, 4))
    """Up to 16 rows."""
    some: Tiles = field(default_factory=lambda: Tiles(64, 6, 4, True))
    """Up to 32."""
    many: Tiles = field(default_factory=lambda: Tiles(64, 6, 4, True))
    """Up to 64."""
    most: Tiles = field(default_factory=lambda: Tiles(128, 3, 8))
    """Beyond."""

    def tiles(self, rows: int) -> tuple[int, Tiles]:
        """Rows that one program takes, and the rest of it."""
        for block_r, tiles in ((16, self.few), (32, self.some), (64, self.many)):
            if rows <= block_r:
                return block_r, tiles
        return 128, self.most


_WIDE = Tiles(128, 5, 4, True)
PLANS: dict[tuple[int, int], Plan] = {
    (6144, 4096): Plan(1),
    (28672, 4096): Plan(1),
    (128256, 4096): Plan(1, few=_WIDE, many=Tiles(128, 4, 4, True)),
}
"""Measured choices by (N, K), on an H200 (bench/gpu_linear.py); other shapes take `default_plan`."""


@functools.cache
def default_plan(n: int, k: int) -> Plan:
    """About two programs for each of a large GPU's 132 processors, each with at least 512 inputs."""
    split_k, tiles = 1, triton.cdiv(n, 64)
    while tiles * split_k < 192 and k // (split_k * 2) >= 512:
        split_k *= 2
    return Plan(split_k)


def plan_for(n: int, k: int) -> Plan:
    return PLANS.get((n, k)) or default_plan(n, k)


def prepare(n: int, k: int, device: torch.device, plan: Plan | None = None) -> None:
    """Makes room for the parts of a split sum; called when a weight is packed, before any graph is captured."""
    plan = plan or plan_for(n, k)
    if plan.split_k > 1:
        tiles = triton.cdiv(n, 128) * 2 * (MAX_ROWS // 16)
        workspace(device).reserve(plan.split_k * (n + 256) * MAX_ROWS, tiles)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """x [..., K] times weight [N, K] (contiguous), plus bias float32 [N]: [..., N] in `out_dtype` (default: x's).

    Computed in bfloat16 with float32 sums; a row's bits depend on that row alone. Call `prepare` first.
    """
    n, k = weight.shape
    plan = plan or plan_for(n, k)
    rows = x.reshape(-1, k).to(torch.bfloat16)
    if rows.stride(1) != 1 or rows.stride(0) % 8 or rows.data_ptr() % 16:
        rows = rows.contiguous()
    y = torch.empty(len(rows), n, dtype=out_dtype or x.dtype, device=x.device)
    for begin_row in range(0, len(rows), MAX_ROWS):
        some = slice(begin_row, begin_row + MAX_ROWS)
        launch(rows[some], weight, bias, y[some], plan)
    return y.view(*x.shape[:-1], n)


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, plan: Plan, compile_only: bool = False
) -> None:
    """One launch over at most MAX_ROWS rows: x [R, K] in bfloat16 with aligned rows, y [R, N]."""
    (n, k), rows = weight.shape, len(x)
    block_r, tiles = plan.tiles(rows)
    by_tiles = tiles.by_tiles and k % 8 == 0
    space = workspace(x.device)
    grid = (triton.cdiv(n, tiles.block_n) * triton.cdiv(rows, block_r), plan.split_k)
    _dense.run(
        weight,
        x,
        TensorDescriptor.from_tensor(weight, [tiles.block_n, plan.block_k]) if by_tiles else None,
        TensorDescriptor.from_tensor(x, [block_r, plan.block_k]) if by_tiles else None,
        bias,
        y,
        space.partial,
        space.counters,
        n,
        k,
        rows,
        x.stride(0),
        y.stride(0),
        SPLIT_K=plan.split_k,
        HAS_BIAS=bias is not None,
        EVEN_K=k % (plan.block_k * plan.split_k) == 0,
        BY_TILES=by_tiles,
        AHEAD=tiles.ahead,
        EACH=triton.cdiv(k, plan.block_k * plan.split_k),
        BLOCK_N=tiles.block_n,
        BLOCK_R=block_r,
        BLOCK_K=plan.block_k,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        grid=grid,
        warmup=compile_only,
        **overlap(x),
    )
