"""Packing: every sample once an epoch, rows that are full but not too full, and an order that a seed decides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.train.packing import batch_of, count_updates, pack_epoch, updates
from tests.train.toy import CPU, samples_of

LENGTHS = st.lists(st.integers(0, 40), max_size=60)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(0, 2**30), st.integers(0, 50), st.integers(1, 30))
def test_every_sample_once_and_no_row_too_long(lengths, seed, epoch, window):
    from slipstream.train import packing

    before, packing._WINDOW = packing._WINDOW, window
    try:
        rows = pack_epoch(lengths, 40, seed, epoch)
        again = pack_epoch(lengths, 40, seed, epoch)
    finally:
        packing._WINDOW = before
    assert rows == again
    assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
    assert all(row and sum(lengths[sample] for sample in row) <= 40 for row in rows)


@pytest.mark.parametrize("kind", ["uniform", "mostly short", "never short"])
def test_rows_are_full(kind):
    draw = torch.Generator().manual_seed(0)
    share = torch.rand(6000, generator=draw)
    share = {"uniform": share, "mostly short": share**3, "never short": 0.05 + 0.5 * share}[kind]
    lengths = (16 + share * 1008).long().tolist()
    rows = pack_epoch(lengths, 1024, 3, 0)
    assert sum(lengths) / (1024 * len(rows)) > 0.9


def test_the_order_is_that_of_seed_and_epoch():
    lengths = list(range(1, 33)) * 4
    orders = [pack_epoch(lengths, 64, seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len({str(order) for order in orders}) == len(orders)
    for order in orders:  # best fit begins with the longest; what is trained on must not
        firsts = [lengths[row[0]] for row in order]
        assert firsts != sorted(firsts, reverse=True)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.booleans(), max_size=12), min_size=1, max_size=12), st.integers(12, 30))
def test_a_batch_holds_its_samples_where_it_says(masks, width):
    samples = samples_of(masks)
    rows = pack_epoch(samples.lengths.tolist(), width, 0, 0)
    batch = batch_of(samples, rows, width, CPU)
    assert batch.samples == [sample for row in rows for sample in row]
    is_free = torch.ones(len(rows), width, dtype=torch.bool)
    for number, (sample, row, place) in enumerate(zip(batch.samples, batch.rows, batch.places, strict=True)):
        tokens, mask = samples.sample(sample)
        span = slice(place, place + len(tokens))
        assert torch.equal(batch.tokens[row, span], tokens.long())
        assert torch.equal(batch.mask[row, span], mask)
        assert bool((batch.documents[row, span] == number).all())
        assert bool(is_free[row, span].all())
        is_free[row, span] = False
    assert bool((batch.documents[is_free] == -1).all())
    assert not bool(batch.mask[is_free].any() | batch.tokens[is_free].any())


def test_updates_leave_out_what_does_not_fill_one():
    samples = samples_of([[True] * (1 + i % 7) for i in range(50)])
    every = list(updates(samples, 16, 3, seed=5, epochs=2))
    assert len(every) == count_updates(samples, 16, 3, seed=5, epochs=2)
    assert all(len(rows) == 3 for rows in every)
    for epoch in range(2):
        rows = pack_epoch(samples.lengths.tolist(), 16, 5, epoch)
        whole = len(rows) // 3
        part = every[:whole] if epoch == 0 else every[-whole:]
        assert [row for update in part for row in update] == rows[: 3 * whole]
    assert not list(updates(samples_of([]), 16, 1, 0, 2))
    assert not list(updates(samples, 16, 1000, 0, 2))
