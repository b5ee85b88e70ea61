"""Break-even against closed forms and the reference case of the design."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.lab.break_even import BreakEven, acceptance_needed, break_even_by_rows, chain_tokens


def test_closed_forms() -> None:
    assert chain_tokens(0.0, 5) == 1
    assert chain_tokens(1.0, 5) == 6
    assert chain_tokens(0.5, 3) == pytest.approx(1.875)
    assert acceptance_needed(1.4, 1) == pytest.approx(0.4)  # one guess: 1 + a
    assert acceptance_needed(1.75, 2) == pytest.approx(0.5)  # 1 + a + a^2
    assert acceptance_needed(0.9, 4) == 0
    assert acceptance_needed(5.0, 4) == pytest.approx(1)
    assert acceptance_needed(5.1, 4) is None


@given(acceptance=st.floats(0.0, 1.0), drafted=st.integers(1, 31))
def test_needed_is_the_inverse_of_tokens(acceptance: float, drafted: int) -> None:
    needed = acceptance_needed(chain_tokens(acceptance, drafted), drafted)
    assert needed is not None
    assert needed == pytest.approx(acceptance, abs=1e-6)


def test_reference_case() -> None:
    """Plain 12.2 ms, verify 30 ms, a chain of 3: 0.68 with a free draft, 0.75 when drafting costs 3.4 ms a cycle."""
    assert BreakEven(3, 30e3, 12.2e3).acceptance == pytest.approx(0.68, abs=0.005)
    assert BreakEven(3, 33.4e3, 12.2e3).acceptance == pytest.approx(0.75, abs=0.005)
    assert chain_tokens(0.38, 3) / 33.4e-3 == pytest.approx(47, abs=0.6)


def test_by_rows() -> None:
    step_us = {1: 10_000.0, 8: 12_000.0, 2: 10_500.0}
    short, long = break_even_by_rows(step_us, speculative_overhead_us=1_000, plain_overhead_us=500)
    assert (short.drafted, long.drafted) == (1, 7)
    assert short.tokens == pytest.approx(11_500 / 10_500)
    assert long.tokens == pytest.approx(13_000 / 10_500)
