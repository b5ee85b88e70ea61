"""Tokens from logits: greedy ties, filters without sorting, and draws that are the reference's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from slipstream.kernels import sampling as S

INFINITY = float("inf")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def row_settings(
    rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, ...]:
    return (
        torch.full((rows,), float(temperature)),
        torch.full((rows,), top_k, dtype=torch.int64),
        torch.full((rows,), float(top_p)),
        torch.arange(rows) * 7919 - 50,
        torch.arange(rows) % 97,
    )


def check_draws(logits: Tensor, temperature: float, top_k: int, top_p: float) -> None:
    """Equal to the reference, save where its two best are too near for two ways of computing a logarithm."""
    args = row_settings(len(logits), temperature, top_k, top_p)
    got, want = S.sample(logits, *args), S.sample_reference(logits, *args)
    differ = (got != want).nonzero()[:, 0]
    if len(differ):
        noisy = S.filtered_logits(logits, *args[:3]) + S.gumbel(*args[3:], logits.shape[1])
        best = noisy[differ].topk(2).values
        assert ((best[:, 0] - best[:, 1]) < 1e-4).all(), (differ, got[differ], want[differ])
    assert len(differ) <= 1 + len(logits) // 500


@pytest.mark.parametrize("kernel", [S.argmax, S.argmax_reference], ids=["native", "reference"])
def test_argmax_takes_the_first_of_equals_and_never_a_nan(kernel: object) -> None:
    assert callable(kernel)
    nan = float("nan")
    rows = torch.tensor([[1.0, 3, 3, 2], [nan, 1, nan, 2], [nan, nan, nan, nan], [nan, -INFINITY, 0, nan]])
    assert kernel(rows).tolist() == [1, 3, 0, 2]
    assert kernel(torch.tensor([[nan, -INFINITY], [INFINITY, INFINITY]])).tolist() == [1, 0]
    assert kernel(torch.tensor([[-0.0, 0.0]])).tolist() == [0]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5), width=st.integers(1, 3000), levels=st.integers(1, 400), seed=st.integers(0, 99)
)
def test_argmax_finds_the_first_maximum(rows: int, width: int, levels: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(levels, (rows, width), generator=generator).float()
    assert torch.equal(S.argmax(logits), S.argmax_reference(logits))


def test_argmax_of_a_whole_vocabulary_in_any_number_of_threads() -> None:
    logits = torch.randn(7, 49152).round(decimals=1)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in (1, 2, 3, 7):
            assert torch.equal(S.argmax(logits[:rows]), S.argmax_reference(logits[:rows]))


def test_uniform_noise_is_within_its_bounds_and_flat() -> None:
    u = S.uniform(torch.arange(40), torch.arange(40), 50_000)
    assert float(u.min()) > 0
    assert float(u.max()) < 1
    assert float(S.gumbel(torch.arange(40), torch.arange(40), 50_000).max()) < 16.64
    counts = torch.histc(u, 64, 0, 1)
    assert chisquare(counts.numpy()).pvalue > 1e-4


def test_equal_logits_show_the_noise_itself() -> None:
    """Without logits the token drawn is that of the greatest uniform number: all its bits must agree."""
    logits = torch.zeros(2000, 3001)
    args = row_settings(2000)
    u = S.uniform(*args[3:], 3001)
    assert torch.equal(S.sample(logits, *args), S.argmax_reference(u))


@pytest.mark.parametrize("width", [5, 700, 5000])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        *((1.0, 0, 1.0), (0.2, 0, 1.0), (3.0, 0, 1.0), (0.0, 0, 1.0)),
        *((1.0, 1, 1.0), (1.0, 4, 1.0), (0.7, 200, 1.0), (1.0, -3, 1.0)),
        *((0.8, 0, 0.9), (1.0, 0, 0.3), (1.3, 0, 0.999), (1.0, 0, 0.0)),
        *((0.9, 30, 0.8), (1.0, 10**9, 0.5)),
    ],
)
def test_draws_are_the_references(width: int, temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(400, width, generator=torch.Generator().manual_seed(width)) * 3
    check_draws(logits, temperature, top_k, top_p)


def test_draws_of_a_whole_vocabulary() -> None:
    flat = torch.randn(8, 49152, generator=torch.Generator().manual_seed(0))
    peaked = flat * 2
    peaked[:, 100:150] += torch.linspace(18, 5, 50)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for logits in (flat, peaked, peaked[:1]):
            for top_k, top_p in ((0, 1.0), (50, 1.0), (0, 0.9), (200, 0.95)):
                check_draws(logits, 0.9, top_k, top_p)


@settings(max_examples=150, deadline=None)
@given(
    width=st.integers(1, 120),
    levels=st.integers(1, 12),
    spread=st.sampled_from([0.0, 0.01, 1.0, 30.0]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 130),
    top_p=st.sampled_from([0.05, 0.31, 0.62, 0.93, 1.0]),
    seed=st.integers(0, 99),
)
def test_ties_are_kept_lowest_id_first(
    width: int, levels: int, spread: float, temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    """Many positions of one row: every token that the filters keep, and no other, is drawn sooner or later."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(levels, (width,), generator=generator).float() * spread
    check_draws(row.expand(64, width).contiguous(), temperature, top_k, top_p)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (0, 0.999), (5000, 1.0)])
def test_masked_infinite_and_missing_logits(top_k: int, top_p: float) -> None:
    logits = torch.randn(300, 900)
    logits[:, ::2] = -INFINITY
    logits[:, 5] = float("nan")
    got = S.sample(logits, *row_settings(300, 1.0, top_k, top_p))
    assert (got % 2 == 1).all()
    assert (got != 5).all()
    logits[:, 7] = INFINITY
    assert (S.sample(logits, *row_settings(300, 1.0, top_k, top_p)) == 7).all()
    none = torch.full((2, 40), -INFINITY)
    assert S.sample(none, *row_settings(2, 1.0, top_k, top_p)).tolist() == [0, 0]
    assert S.sample(none * float("nan"), *row_settings(2, 1.0, top_k, top_p)).tolist() == [0, 0]


@pytest.mark.parametrize("kernel", [S.sample, S.sample_reference], ids=["native", "reference"])
def test_draws_follow_softmax(kernel: object) -> None:
    """Chi-square over 24,000 positions; at 1e-4 a right kernel fails once in ten thousand changes of the noise."""
    assert callable(kernel)
    row = torch.tensor([2.0, 1, 0, 0, -1, -2, 1.5, 0.3])
    rows = 24_000
    temperature, top_k, top_p, _, _ = row_settings(rows, temperature=0.8)
    drawn = kernel(
        row.repeat(rows, 1), temperature, top_k, top_p, torch.full((rows,), 1234), torch.arange(rows)
    )
    expected = torch.softmax(row.double() / 0.8, -1) * rows
    counts = torch.bincount(drawn, minlength=8).double()
    assert chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-4


def test_a_row_is_drawn_alike_in_any_company() -> None:
    logits = torch.randn(9, 30_000) * 3
    args = row_settings(9, 0.9, 0, 0.95)
    whole = S.sample(logits, *args)
    for r in range(9):
        assert S.sample(logits[r : r + 1], *(a[r : r + 1] for a in args)).item() == whole[r]


@pytest.mark.parametrize("argument", range(5))
def test_bad_arguments_are_refused(argument: int) -> None:
    for change in (lambda a: a[:2], lambda a: a.to(torch.float64)):
        args = list(row_settings(3))
        args[argument] = change(args[argument])
        with pytest.raises(RuntimeError):
            S.sample(torch.zeros(3, 8), *args)
    with pytest.raises(RuntimeError):
        S.argmax(torch.zeros(3, 8, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError):
        S.argmax(torch.zeros(3, 0))
