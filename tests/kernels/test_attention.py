"""Attention over a table of cache rows: right against float64, and each row's bits its own (design rule 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.kernels.attention import attention, attention_reference

BOTH = pytest.mark.parametrize("kernel", [attention, attention_reference], ids=["native", "reference"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
Kernel = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small problems; the tests of threads say how many they want
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Case:
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor
    slots: Tensor
    prefix: Tensor
    depth: Tensor | None
    ancestors: Tensor | None

    def run(self, kernel: Kernel) -> Tensor:
        return kernel(
            self.q,
            self.k_cache,
            self.v_cache,
            self.table,
            self.slots,
            self.prefix,
            self.depth,
            self.ancestors,
            self.scale,
        )

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    def own_rows(self, b: int, t: int) -> Tensor:
        """The cache rows of the keys that a row sees, in order."""
        before = int(self.prefix[b])
        if self.depth is None or self.ancestors is None:
            indices = torch.arange(before + t + 1)
        else:
            path = self.ancestors[b, t, : int(self.depth[b, t]) + 1]
            indices = torch.cat([torch.arange(before), before + path])
        return self.table[self.slots[b]][indices]


def random_tree(rows: int, generator: torch.Generator, width: int) -> tuple[Tensor, Tensor]:
    """depth [rows] and ancestors [rows, width]; unused entries are far out of range, as nothing may read them."""
    paths = [[0]]
    for t in range(1, rows):
        parent = int(torch.randint(t, (1,), generator=generator))
        while len(paths[parent]) >= width:
            parent = paths[parent][-2]
        paths.append([*paths[parent], t])
    ancestors = torch.full((rows, width), 10**12)
    for t, path in enumerate(paths):
        ancestors[t, : len(path)] = torch.tensor(path)
    return torch.tensor([len(path) - 1 for path in paths]), ancestors


def make(
    prefixes: list[int],
    rows: int,
    heads: tuple[int, int] = (9, 3),
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    is_tree: bool = False,
    seed: int = 0,
) -> Case:
    """The table is scattered and just as wide as needed; cache rows that no request owns hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    batch, (h, kv) = len(prefixes), heads
    columns = max(prefixes) + rows
    order = torch.randperm(batch * columns + 5, generator=generator)
    order = torch.where(order == 0, order.max(), torch.where(order == order.max(), 0, order))
    table = order[: batch * columns].view(batch, columns)
    table[0, -1] = torch.where(
        (table == len(order) - 1).any(), table[0, -1], len(order) - 1
    )  # the last cache row
    slots = torch.randperm(batch, generator=generator)
    caches = [torch.full((len(order), kv, dim), float("nan")) for _ in range(2)]
    for b, before in enumerate(prefixes):
        own = table[slots[b], : before + rows]
        for cache in caches:
            cache[own] = torch.randn(len(own), kv, dim, generator=generator)
    q = torch.randn(batch, rows, h, dim, generator=generator) * 2
    depth = ancestors = None
    if is_tree:
        trees = [random_tree(rows, generator, width=max(1, min(rows, 20))) for _ in prefixes]
        depth, ancestors = (torch.stack(part) for part in zip(*trees, strict=True))
    k_cache, v_cache = (cache.to(dtype) for cache in caches)
    return Case(q.to(dtype), k_cache, v_cache, table, slots, torch.tensor(prefixes), depth, ancestors)


def exact(case: Case) -> Tensor:
    """Softmax attention in float64, row by row."""
    out = torch.empty_like(case.q, dtype=torch.float64)
    group = case.q.shape[2] // case.k_cache.shape[1]
    for b in range(case.q.shape[0]):
        for t in range(case.q.shape[1]):
            rows = case.own_rows(b, t)
            k, v = (c[rows].double().repeat_interleave(group, 1) for c in (case.k_cache, case.v_cache))
            weights = torch.softmax(torch.einsum("hd,lhd->hl", case.q[b, t].double(), k) * case.scale, -1)
            out[b, t] = torch.einsum("hl,lhd->hd", weights, v)
    return out


def alone(case: Case, b: int, t: int, company: int = 0) -> Case:
    """The same row with the same keys at other cache rows: one row of decode, or the last of a chain."""
    rows = case.own_rows(b, t)
    count = len(rows)
    company = min(company, count - 1)
    place = torch.arange(count).flip(0) * 2 + 1
    caches = []
    for cache in (case.k_cache, case.v_cache):
        moved = torch.full((2 * count + 1, *cache.shape[1:]), float("nan"), dtype=cache.dtype)
        moved[place] = cache[rows]
        caches.append(moved)
    q = torch.cat(
        [torch.randn(1, company, *case.q.shape[2:]).to(case.q.dtype), case.q[b : b + 1, t : t + 1]], 1
    )
    zero = torch.zeros(1, dtype=torch.int64)
    return Case(q, *caches, place[None], zero, torch.tensor([count - 1 - company]), None, None)


def check(case: Case, kernel: Kernel) -> None:
    got, want = case.run(kernel), exact(case)
    assert got.dtype == case.q.dtype
    tolerance = 4e-6 if got.dtype == torch.float32 else 2.0**-8
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@BOTH
@DTYPES
@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("prefix", [0, 1, 62, 63, 64, 65, 127, 128, 200])
def test_it_is_softmax_attention_at_block_borders(
    kernel: Kernel, dtype: torch.dtype, is_tree: bool, prefix: int
) -> None:
    for rows in (1, 2, 9) if kernel is attention else (3,):
        check(make([prefix], rows, dtype=dtype, is_tree=is_tree, seed=prefix), kernel)


@DTYPES
@pytest.mark.parametrize("dim", [2, 8, 16, 40, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (6, 3), (32, 1)])
def test_any_head_dimension_and_grouping(dtype: torch.dtype, dim: int, heads: tuple[int, int]) -> None:
    check(make([70, 3], 5, heads, dim, dtype, is_tree=True, seed=dim), attention)


@DTYPES
def test_a_chain_is_torchs_causal_attention(dtype: torch.dtype) -> None:
    case = make([0], 150, dtype=dtype)
    k, v = (
        c[case.table[case.slots[0]]].float().repeat_interleave(3, 1) for c in (case.k_cache, case.v_cache)
    )
    q = case.q[0].float()
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
    ).transpose(0, 1)
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(case.run(attention)[0].float(), want, rtol=tolerance, atol=tolerance)


@BOTH
@DTYPES
@settings(max_examples=10, deadline=None)
@given(
    prefix=st.one_of(st.sampled_from([0, 1, 48, 60, 63, 64, 65, 127, 128]), st.integers(0, 300)),
    rows=st.integers(1, 33),
    seed=st.integers(0, 1000),
)
def test_a_tree_row_has_the_bits_of_plain_decoding(
    kernel: Kernel, dtype: torch.dtype, prefix: int, rows: int, seed: int
) -> None:
    case = make([prefix, seed % 90], rows, dtype=dtype, is_tree=True, seed=seed)
    out = case.run(kernel)
    some = {0, rows // 2, rows - 1} if kernel is attention else {rows - 1}
    for b, t in [(b, t) for b in (0, 1) for t in some]:
        assert torch.equal(out[b, t], alone(case, b, t).run(kernel)[0, 0])
        assert torch.equal(out[b, t], alone(case, b, t, company=seed % 40).run(kernel)[0, -1])


@DTYPES
def test_a_row_of_a_chain_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    case = make([100, 0, 63, 290], 33, dtype=dtype)
    whole = case.run(attention)
    for rows in range(1, 34):
        part = replace(case, q=case.q[:, :rows])
        assert torch.equal(part.run(attention), whole[:, :rows]), rows
    for b in range(4):
        one = replace(case, q=case.q[b : b + 1], slots=case.slots[b : b + 1], prefix=case.prefix[b : b + 1])
        assert torch.equal(one.run(attention)[0], whole[b]), b


@DTYPES
@pytest.mark.parametrize(
    ("prefixes", "rows", "is_tree"),
    [([4000], 1, False), ([1500], 8, True), ([1000, 3, 700], 2, True), ([0], 400, False), ([30], 300, False)],
)
def test_bits_do_not_depend_on_the_number_of_threads(
    dtype: torch.dtype, prefixes: list[int], rows: int, is_tree: bool
) -> None:
    case = make(prefixes, rows, dtype=dtype, is_tree=is_tree)
    torch.set_num_threads(1)
    want = case.run(attention)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        for _ in range(3):
            assert torch.equal(case.run(attention), want)
    for b in range(len(prefixes)):
        for t in {0, rows - 1}:
            assert torch.equal(want[b, t], alone(case, b, t).run(attention)[0, 0])


def test_weights_are_exact_where_one_key_takes_all() -> None:
    case = make([130], 2)
    case.k_cache[case.table[0, 17]] = 100 * case.q[0, 1, ::3].sign()
    case.q[:, :, :] = case.q[:, :, ::3].repeat_interleave(3, 2)
    torch.testing.assert_close(
        case.run(attention)[0, 1, ::3], case.v_cache[case.table[0, 17]], rtol=1e-6, atol=1e-6
    )


def test_scores_far_below_the_maximum_vanish() -> None:
    case = make([200], 1)
    case.k_cache[case.table[0, :150]] *= 1e4
    check(case, attention)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefix": torch.tensor([37])}, "columns"),
        ({"prefix": torch.tensor([40])}, "prefix"),
        ({"prefix": torch.tensor([-1])}, "prefix"),
        ({"slots": torch.tensor([1])}, "slots"),
        ({"slots": torch.tensor([0], dtype=torch.int32)}, "slots"),
        ({"table": torch.full((1, 40), 45)}, "table"),
        ({"table": torch.full((1, 40), -1)}, "table"),
        ({"depth": torch.tensor([[0, 1, 2, 9]])}, "depth"),
        ({"ancestors": torch.full((1, 4, 4), 4)}, "ancestors"),
        ({"ancestors": None}, "together"),
        ({"q": torch.zeros(1, 4, 9, 64, dtype=torch.bfloat16)}, "k_cache"),
        ({"q": torch.zeros(1, 4, 8, 64)}, "multiple"),
        ({"q": torch.zeros(1, 4, 9, 32)}, "q must"),
        ({"k_cache": torch.zeros(3, 45, 64).transpose(0, 1)}, "contiguous"),
        ({"v_cache": torch.zeros(44, 3, 64)}, "alike"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, Tensor], message: str) -> None:
    case = make([36], 4, is_tree=True)
    assert case.k_cache.shape[0] == 45
    case.run(attention)
    with pytest.raises(RuntimeError, match=message):
        replace(case, **change).run(attention)
