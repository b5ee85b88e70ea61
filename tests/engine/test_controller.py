"""The controller: it takes what pays, leaves what does not, and comes back when it pays again."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.controller import Acceptance, Controller, CostModel

FLAT = {1: 1000.0, 8: 1100.0, 32: 1600.0}
STEEP = {1: 1000.0, 2: 2000.0, 32: 32000.0}


def feed(controller: Controller, rate: float, cycles: int, seed: int = 0) -> float:
    """Runs cycles against a drafter with this acceptance a position; tokens a millisecond over plain decoding's."""
    rng, tokens, us = random.Random(seed), 0, 0.0
    for _ in range(cycles):
        size = controller.choose([3])
        right = 0
        while right < 31 and rng.random() < rate:
            right += 1
        if size:
            controller.observe_verified(0, 3, size, range(min(right, size)))
            tokens += 1 + min(right, size)
        else:
            if controller.wants_shadow(0, 3):
                controller.shadow(0, 3, [1] * 31)
            controller.observe_text(0, [1 if rng.random() < rate else 2])
            tokens += 1
        us += controller.costs.us(1, size)
    return tokens / us * controller.costs.us(1, 0)


@pytest.mark.parametrize(("rate", "least"), [(0.95, 6.0), (0.8, 3.0), (0.5, 1.5), (0.0, 0.97)])
def test_flat_costs(rate, least):
    assert feed(Controller(CostModel(FLAT), 31, is_free=True), rate, 800) > least


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6])
def test_steep_costs_are_left_to_plain_decoding(rate):
    assert feed(Controller(CostModel(STEEP), 31, is_free=True), rate, 400) > 0.98


def test_it_comes_back_when_drafts_become_good_again():
    for is_free in (True, False):
        controller = Controller(CostModel(FLAT), 31, is_free=is_free)
        feed(controller, 0.0, 1000)
        assert controller.choose([3]) == 0
        feed(controller, 0.95, 2000)
        assert controller.choose([3]) >= 7


def test_nothing_to_draft_is_plain_decoding():
    assert Controller(CostModel(FLAT), 31, is_free=True).choose([0, 0]) == 0


def test_one_good_request_does_not_make_a_whole_batch_pay():
    costs = CostModel({1: 1000.0, 8: 1100.0, 16: 2500.0, 256: 40000.0})
    controller = Controller(costs, 31, is_free=True)
    feed(controller, 0.9, 300)
    assert controller.choose([3]) > 0
    assert controller.choose([3] + [0] * 7) < controller.choose([3])


def test_costs_follow_a_slower_machine_for_all_shapes():
    costs = CostModel(FLAT)
    before = costs.us(1, 7) / costs.us(1, 0)
    for _ in range(200):
        costs.observe(1, 0, 3000.0)
    assert costs.us(1, 0) == pytest.approx(3000, rel=0.05)
    assert costs.us(1, 7) / costs.us(1, 0) == pytest.approx(before, rel=0.5)


def test_one_outlier_moves_a_cost_little():
    costs = CostModel(FLAT)
    costs.observe(1, 7, 1e9)
    assert costs.us(1, 7) < 1.1 * 1100


@given(st.lists(st.tuples(st.integers(1, 31), st.integers(0, 31)), max_size=200))
def test_expected_tokens_grow_with_size_and_never_exceed_it(observations):
    acceptance = Acceptance(31)
    for tried, right in observations:
        acceptance.observe(2, tried, range(min(right, tried)))
    expected = acceptance.expected_tokens(2)
    assert expected[0] == 1
    assert all(0 <= after - before <= 1 for before, after in pairwise(expected))


@given(
    st.dictionaries(st.integers(1, 64), st.floats(1, 1e6), min_size=2), st.integers(1, 64), st.integers(0, 31)
)
def test_costs_are_positive_everywhere(by_rows, batch, size):
    assert CostModel(by_rows).us(batch, size) > 0
