"""The GPU's kernels against their references; without a GPU through Triton's interpreter, in float32 and small."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed on this kind of machine")

from slipstream.draft.tree import Tree
from slipstream.kernels import activation, latent, lookup, norm, rope, sampling
from slipstream.kernels.attention import attention_reference
from slipstream.kernels.triton import attention as on_gpu
from slipstream.kernels.triton import linear
from slipstream.kernels.triton import lookup as lookup_on_gpu
from slipstream.kernels.triton import rows as rows_on_gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXAMPLES = settings(max_examples=8, deadline=None)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


class Attended:
    """A random cache behind a random table, with a tree of rows on each of its texts."""

    def __init__(
        self, seed: int, batch: int, rows: int, heads: tuple[int, int], dim: int, context: int
    ) -> None:
        torch.manual_seed(seed)
        self.slots = torch.randperm(batch + 1, device=DEVICE)[:batch]
        width = context + 2 * rows
        self.table = torch.randperm((batch + 1) * width, device=DEVICE).view(batch + 1, width)
        self.k = normal(self.table.numel(), heads[1], dim)
        self.v = self.k if heads[1] == 1 and dim & (dim - 1) else normal(*self.k.shape)
        self.q = normal(batch, rows, heads[0], dim)
        self.prefix = torch.randint(max(context - 70, 0), context, (batch,), device=DEVICE)
        parents = [[int(torch.randint(0, i + 1, ())) for i in range(rows - 1)] for _ in range(batch)]
        nodes = torch.tensor(parents, device=DEVICE).view(batch, rows - 1)
        tree = Tree(nodes, torch.ones_like(nodes, dtype=torch.bool), nodes, rows - 1)
        self.depth, self.ancestors = tree.paths

    def run(self, attend, is_tree: bool, *extent: int) -> Tensor:
        shape = (self.depth, self.ancestors) if is_tree else (None, None)
        return attend(
            self.q, self.k, self.v, self.table, self.slots, self.prefix, *shape, 0.17, *extent
        )  # fmt: skip


@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize(
    ("batch", "rows", "heads", "dim", "context"),
    [(1, 2, (4, 1), 16, 5), (2, 5, (6, 2), 16, 300), (1, 3, (8, 1), 48, 150), (1, 2, (2, 1), 16, 4200)],
    ids=["start", "groups", "latent", "long"],
)
def test_attention(
    batch: int, rows: int, heads: tuple[int, int], dim: int, context: int, is_tree: bool
) -> None:
    case = Attended(dim + context, batch, rows, heads, dim, context)
    wanted = case.run(attention_reference, is_tree)
    found = case.run(on_gpu.attention, is_tree, case.table.shape[1])
    assert error(found, wanted[..., : found.shape[-1]]) < 1e-6


def test_a_row_of_a_tree_has_the_bits_that_it_has_alone() -> None:
    case = Attended(3, 1, 5, (4, 2), 16, 130)
    case.prefix[0] = 127  # the tree lies across the border between two splits
    whole = case.run(on_gpu.attention, True, case.table.shape[1])
    for row in range(5):
        path = case.ancestors[0, row, : int(case.depth[0, row]) + 1]
        own = case.table.clone()
        slot = int(case.slots[0])
        own[slot, 127 : 127 + len(path)] = case.table[slot, 127 + path]
        alone = on_gpu.attention(
            case.q[:, row : row + 1].contiguous(), case.k, case.v, own, case.slots,
            case.prefix + len(path) - 1, None, None, 0.17, 127 + len(path),
        )  # fmt: skip
        assert torch.equal(alone[0, 0], whole[0, row])


def test_splits_follow_each_other() -> None:
    """The count of splits that the host launches is the one that the device's borders give."""
    borders = [0]
    while borders[-1] < 200_000:
        borders.append(borders[-1] + (128 if borders[-1] < 4096 else 512 if borders[-1] < 32768 else 2048))
    for split, border in enumerate(borders[1:], 1):
        assert on_gpu.splits_within(border) == split
        assert on_gpu.splits_within(border + 1) == split + 1
    assert on_gpu.splits_within(0) == 1


@pytest.mark.parametrize("width", [1, 100, 576])
def test_norms(width: int) -> None:
    torch.manual_seed(width)
    x, weight, residual = normal(3, width), normal(width), normal(3, width)
    assert error(rows_on_gpu.rms_norm(x, weight, 1e-5), norm.rms_norm_reference(x, weight, 1e-5)) < 1e-6
    summed = residual + x
    found = rows_on_gpu.rms_norm(x, weight, 1e-5, residual)
    assert error(found, norm.rms_norm_reference(summed, weight, 1e-5)) < 1e-6
    assert torch.equal(residual, summed)


def test_heads_rotation_and_latent() -> None:
    torch.manual_seed(0)
    batch, rows, heads, kv_heads, dim = 2, 3, 4, 2, 16
    qkv, weights = normal(batch, rows, (heads + 2 * kv_heads) * dim), (normal(dim), normal(dim))
    other = qkv.clone()
    rows_on_gpu.rms_norm_heads_(qkv, *weights, kv_heads, 1e-6)
    norm.rms_norm_heads_reference_(other, *weights, kv_heads, 1e-6)
    assert error(qkv, other) < 1e-6
    cos, sin = normal(40, dim // 2), normal(40, dim // 2)
    positions = torch.randint(0, 40, (batch, rows), device=DEVICE)
    places = torch.randperm(30, device=DEVICE)[: batch * rows].view(batch, rows)
    caches = [torch.zeros(30, kv_heads, dim, device=DEVICE) for _ in range(4)]
    found = rows_on_gpu.rope_kv_write(qkv, cos, sin, positions, places, *caches[:2])
    wanted = rope.rope_kv_write_reference(qkv, cos, sin, positions, places, *caches[2:])
    assert max(error(found, wanted), error(caches[0], caches[2]), error(caches[1], caches[3])) < 1e-6
    q, kv, weight = normal(batch, rows, heads, 12 + dim), normal(batch, rows, 24 + dim), normal(24)
    other, mine, theirs = q.clone(), *(torch.zeros(30, 1, 24 + dim, device=DEVICE) for _ in range(2))
    rows_on_gpu.latent_rope_write(q, kv, weight, 1e-6, cos, sin, positions, places, mine)
    latent.latent_rope_write_reference(other, kv, weight, 1e-6, cos, sin, positions, places, theirs)
    assert max(error(q, other), error(mine, theirs)) < 1e-6


def test_swiglu() -> None:
    x = normal(3, 2 * 1100)
    assert error(rows_on_gpu.swiglu(x), activation.swiglu_reference(x)) < 1e-6


def test_argmax_takes_the_lowest_of_equals_and_never_a_nan() -> None:
    torch.manual_seed(1)
    logits = normal(6, 9000).round(decimals=1)
    logits[1] = float("nan")
    logits[2, ::2] = float("nan")
    logits[3] = float("-inf")
    logits[4, [7, 8000]] = 99
    logits[5] = float("-inf")
    logits[5, 5000] = -3
    assert torch.equal(rows_on_gpu.argmax(logits), sampling.argmax_reference(logits))


@EXAMPLES
@given(st.integers(0, 2**32), st.integers(1, 300), st.integers(1, 300), st.integers(2, 5))
def test_lookup(seed: int, first: int, second: int, alphabet: int) -> None:
    torch.manual_seed(seed)
    tokens = torch.randint(0, alphabet, (3, 300), device=DEVICE)
    slots, lengths = torch.tensor([2, 0], device=DEVICE), torch.tensor([first, second], device=DEVICE)
    draft, matched = lookup_on_gpu.lookup(tokens, slots, lengths, 15, 31)
    wanted, suffix = lookup.lookup_reference(tokens, slots, lengths, 15, 31)
    assert torch.equal(matched, suffix)
    assert torch.equal(draft[matched > 0], wanted[suffix > 0])


@EXAMPLES
@given(st.integers(0, 2**32), st.integers(1, 150), st.integers(1, 300), st.booleans())
def test_linear(seed: int, outputs: int, inputs: int, has_bias: bool) -> None:
    """Against float64, and with the bits of every row whatever the number of rows."""
    torch.manual_seed(seed)
    weight, x = normal(outputs, inputs).bfloat16(), normal(37, inputs).bfloat16()
    bias = normal(outputs) if has_bias else None
    linear.prepare(outputs, inputs, weight.device)
    found = linear.linear(x, weight, bias, torch.float32)
    wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert error(found, wanted) < 1e-5
    for rows in (1, 17):
        assert torch.equal(linear.linear(x[:rows], weight, bias, torch.float32), found[:rows])


def test_a_long_sum_is_cut_in_the_same_places_for_all_rows() -> None:
    torch.manual_seed(5)
    weight, x = normal(70, 2048).bfloat16(), normal(20, 2048).bfloat16()
    assert linear.plan_for(70, 2048).split_k > 1
    linear.prepare(70, 2048, weight.device)
    found = linear.linear(x, weight, None, torch.float32)
    assert error(found, x.double() @ weight.double().T) < 1e-5
    assert torch.equal(linear.linear(x[3:4], weight, None, torch.float32), found[3:4])
