"""What the matrix kernels share: the product, reading ahead, and sums of parts in one order."""

from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MAX_ROWS = 256
"""Rows of one launch; more rows are further launches, so that the workspace stays small."""


_WIDEN = tl.constexpr(INTERPRETED)


@triton.jit
def product(a, b, acc):
    """acc + a b on the tensor cores. The interpreter takes bfloat16 for whole numbers: there it is widened first."""
    if _WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:  # noqa: RET505 - Triton compiles one of the two
        return tl.dot(a, b, acc)


@triton.jit
def prefetch(base, offsets):
    """Asks for the 128-byte lines at base + offsets (int16 or bfloat16 elements) to come to the L2 cache."""
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l",
        [(base + offsets).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def finish(
    acc,
    tile,
    split,
    n,
    r,
    y,
    bias,
    partial,
    counters,
    outputs,
    rows,
    y_stride,
    SPLIT_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Writes acc [BLOCK_N, BLOCK_R] to y [rows, outputs], of which n and r are the places.

    With a split sum the last of the SPLIT_K programs of a tile to arrive adds all parts, always in the order of K;
    it leaves the tile's counter at zero for the next launch.
    """
    inside = (n[:, None] < outputs) & (r[None, :] < rows)
    to = y + r[None, :].to(tl.int64) * y_stride + n[:, None]
    if SPLIT_K == 1:
        if HAS_BIAS:
            acc += tl.load(bias + n, mask=n < outputs, other=0.0)[:, None]
        tl.store(to, acc.to(y.dtype.element_ty), mask=inside)
    else:
        size: tl.constexpr = BLOCK_N * BLOCK_R
        at = tl.arange(0, BLOCK_N)[:, None] * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
        parts = partial + tile.to(tl.int64) * (SPLIT_K * size) + at
        tl.store(parts + split * size, acc)
        tl.debug_barrier()  # every thread has written before one of them tells
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT_K - 1:
            total = tl.load(parts, cache_modifier=".cg")
            for s in tl.static_range(1, SPLIT_K):
                total += tl.load(parts + s * size, cache_modifier=".cg")
            if HAS_BIAS:
                total += tl.load(bias + n, mask=n < outputs, other=0.0)[:, None]
            tl.store(to, total.to(y.dtype.element_ty), mask=inside)
            tl.store(counters + tile, 0)


class Workspace:
    """Memory for the parts of split sums, one a device: launches that use it run one after another, on one stream.

    It grows when a weight is prepared, before any graph is captured; what captured graphs may point to is kept.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kept: list[Tensor] = []
        self.partial = torch.empty(0, dtype=torch.float32, device=device)
        self.counters = torch.zeros(0, dtype=torch.int32, device=device)

    def reserve(self, parts: int, tiles: int) -> None:
        """Makes room for `parts` float32 and `tiles` counters."""
        if parts > len(self.partial):
            self.kept.append(self.partial)
            self.partial = torch.empty(parts, dtype=torch.float32, device=self.device)
        if tiles > len(self.counters):
            self.kept.append(self.counters)
            self.counters = torch.zeros(tiles, dtype=torch.int32, device=self.device)


@functools.cache
def workspace(device: torch.device) -> Workspace:
    return Workspace(device)
