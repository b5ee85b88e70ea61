"""Prompt lookup: the longest suffix that occurs earlier, the latest of equals, and what followed it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.kernels.lookup import lookup, lookup_reference


def plain(text: list[int], max_suffix: int, count: int) -> tuple[list[int], int]:
    """The contract word for word."""
    for size in range(min(max_suffix, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                grown = list(text)
                for i in range(count):
                    grown.append(grown[end + i])
                return grown[len(text) :], size
    return [], 0


texts = st.integers(1, 4).flatmap(lambda n: st.lists(st.integers(0, n), max_size=60))


@settings(max_examples=300, deadline=None)
@given(batch=st.lists(texts, min_size=1, max_size=4), max_suffix=st.integers(0, 70), count=st.integers(0, 9))
@pytest.mark.parametrize("kernel", [lookup, lookup_reference], ids=["native", "reference"])
def test_it_is_the_longest_suffix_and_the_latest(
    kernel: object, batch: list[list[int]], max_suffix: int, count: int
) -> None:
    assert callable(kernel)
    tokens = torch.full((len(batch) + 1, 64), 1)  # what lies behind a text must not be matched
    slots = torch.arange(len(batch)).flip(0) + 1
    for slot, text in zip(slots.tolist(), batch, strict=True):
        tokens[slot, : len(text)] = torch.tensor(text, dtype=torch.int64)
    draft, matched = kernel(tokens, slots, torch.tensor([len(text) for text in batch]), max_suffix, count)
    assert draft.shape == (len(batch), count)
    for b, text in enumerate(batch):
        want, size = plain(text, max_suffix, count)
        assert matched[b] == size
        if size:
            assert draft[b].tolist() == want
        assert all(
            0 <= token <= 4 for token in draft[b].tolist()
        )  # even an arbitrary draft is made of tokens


def test_a_long_text_that_nearly_repeats_takes_linear_time() -> None:
    """Every position matches half of the text: a search that starts afresh at each would compare 10^11 tokens."""
    n = 400_000
    tokens = torch.zeros(1, 2 * n + 1, dtype=torch.int64)
    tokens[0, n] = 1
    draft, matched = lookup(tokens, torch.tensor([0]), torch.tensor([2 * n + 1]), 10**9, 3)
    assert matched.item() == n
    assert draft.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize(("slot", "length"), [(2, 3), (-1, 3), (0, 11), (0, -1)])
def test_bad_arguments_are_refused(slot: int, length: int) -> None:
    with pytest.raises(RuntimeError, match="out of range"):
        lookup(torch.zeros(2, 10, dtype=torch.int64), torch.tensor([slot]), torch.tensor([length]), 3, 3)
