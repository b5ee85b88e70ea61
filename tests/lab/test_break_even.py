"""Break-even against closed forms and the reference case of the design."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.cli import main
from slipstream.errors import SlipstreamError
from slipstream.lab.break_even import (
    BreakEven,
    Costs,
    acceptance_needed,
    best_tree,
    break_even_by_rows,
    chain,
    chain_tokens,
    full_tree,
    speed_up,
    verify_us_that_pays,
)
from slipstream.lab.break_even_plot import draw


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


REFERENCE = Costs(plain_us=12.2e3, verify_us=30e3, rows=4)
"""Plain 12.2 ms, a verify step of 30 ms for a chain of 3, drafting for nothing."""
REFERENCE_DRAFT = replace(REFERENCE, draft_us=3.4e3, depth=3)


def test_reference_case_acceptance_needed() -> None:
    assert BreakEven(3, 30e3, 12.2e3).tokens == pytest.approx(2.46, abs=0.005)
    assert BreakEven(3, 30e3, 12.2e3).acceptance == pytest.approx(0.68, abs=0.005)
    assert BreakEven(3, 33.4e3, 12.2e3).acceptance == pytest.approx(0.75, abs=0.005)
    needed = {length: acceptance_needed(30 / 12.2, length) for length in (3, 5, 7)}
    assert needed == pytest.approx({3: 0.68, 5: 0.62, 7: 0.60}, abs=0.006)


def test_reference_case_speeds() -> None:
    cycle_s = REFERENCE_DRAFT.cycle_us(3, 3) / 1e6
    assert chain(3).tokens(0.38) / cycle_s == pytest.approx(47, abs=0.6)
    assert 60 * cycle_s == pytest.approx(2.0, abs=0.01)  # tokens a cycle of the drafter trained from scratch
    assert 41 * REFERENCE.cycle_us(3, 3) / 1e6 == pytest.approx(1.23, abs=0.005)  # of the free n-gram draft


def test_reference_case_verify_that_pays() -> None:
    assert verify_us_that_pays(REFERENCE, chain(3), 0.38) == pytest.approx(19.27e3, abs=10)
    pays_us = verify_us_that_pays(REFERENCE_DRAFT, chain(3), 0.38)
    assert pays_us == pytest.approx(15.87e3, abs=10)
    assert speed_up(replace(REFERENCE_DRAFT, verify_us=pays_us), chain(3), 0.38) == pytest.approx(1)


@given(
    plain_us=st.floats(1, 1e5),
    verify_us=st.floats(1, 1e5),
    draft_us=st.floats(0, 1e4),
    acceptance=st.floats(0, 1),
    length=st.integers(1, 16),
)
def test_break_even_is_where_the_speed_up_is_one(
    plain_us: float, verify_us: float, draft_us: float, acceptance: float, length: int
) -> None:
    costs = Costs(plain_us, verify_us, rows=length + 1, draft_us=draft_us, depth=length)
    needed = chain(length).needed(costs.cycle_us(length, length) / plain_us)
    if needed is None:
        assert speed_up(costs, chain(length), 1.0) < 1
    elif needed > 0:
        assert speed_up(costs, chain(length), needed) == pytest.approx(1)
    worse = replace(costs, verify_us=verify_us * 1.1)
    assert speed_up(worse, chain(length), acceptance) < speed_up(costs, chain(length), acceptance)


@given(acceptance=st.floats(0, 1), nodes=st.integers(1, 24), depth=st.integers(1, 6))
def test_the_best_tree_is_at_least_a_chain_and_every_full_tree(
    acceptance: float, nodes: int, depth: int
) -> None:
    best = best_tree(nodes, depth).tokens(acceptance)
    assert best >= chain_tokens(acceptance, min(nodes, depth)) - 1e-9
    assert best <= depth + 1 + 1e-9
    for widths in ((2, 2), (3, 1, 1), (1, 2, 1)):
        full = full_tree(widths)
        if full.drafted <= nodes and full.depth <= depth:
            assert best >= full.tokens(acceptance) - 1e-9


def test_trees_by_hand() -> None:
    assert full_tree((3, 2)).drafted == 9
    assert full_tree((1, 1, 1)).tokens(0.6) == pytest.approx(chain_tokens(0.6, 3))
    # Two candidates: 0.5, and of the other half 0.25.
    assert full_tree((2,)).tokens(0.5) == pytest.approx(1.625)
    assert full_tree((2, 2)).tokens(0.5) == pytest.approx(1 + 0.625 + 0.625**2)
    assert best_tree(2, 4).tokens(0.5) == pytest.approx(1.75)  # a second step beats a second candidate
    assert best_tree(2, 1).tokens(0.5) == pytest.approx(1.625)


def test_trees_against_what_was_measured() -> None:
    """The shipped EAGLE-3 drafter (docs/log.md, 2026-12-03): a chain of 4, trees of 7 and 15."""
    chance = acceptance_needed(2.01, 4)
    assert chance is not None
    assert best_tree(7, 6).tokens(chance) == pytest.approx(2.37, rel=0.06)
    assert best_tree(15, 6).tokens(chance) == pytest.approx(2.64, rel=0.06)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_plot_is_written(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"plot{suffix}"
    draw(REFERENCE_DRAFT, [chain(3), best_tree(7, 4)], 0.38, path)
    start = path.read_bytes()[:8]
    assert start == b"\x89PNG\r\n\x1a\n" if suffix == ".png" else start.startswith(b"<?xml")
    with pytest.raises(SlipstreamError, match=r"\.png, \.svg, \.pdf"):
        draw(REFERENCE_DRAFT, [chain(3)], None, tmp_path / "plot.txt")


def run(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["breakeven", *options])
    written = capsys.readouterr()
    return int(stop.value.code or 0), written.out, written.err


STORY = ("--baseline-ms", "12.2", "--verify-ms", "30", "--draft-ms", "3.4", "--chain", "3")


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    drawn = tmp_path / "plot.png"
    options = ("--acceptance", "0.38", "--speed", "60", "--tree", "4,2,1", "--out", str(drawn))
    status, out, err = run(capsys, *STORY, "--acceptance", "0.38")
    assert status == 0
    assert not err
    assert "0.75" in out
    assert "47.3" in out
    assert "15.9 ms" in out
    status, out, err = run(capsys, *STORY, *options, "--json")
    facts = json.loads(out)
    assert (status, facts["asked"]["shape"], facts["asked"]["drafted"]) == (0, "tree 4,2,1", 20)
    by_name = {each["shape"]: each for each in facts["shapes"]}
    assert {f"chain of {length}" for length in range(1, 9)} <= set(by_name)
    assert facts["seen"]["tokens"] == pytest.approx(2.0, abs=0.01)
    assert drawn.exists()
    assert str(drawn) in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--baseline-ms", "0", "--verify-ms", "30"), "--baseline-ms is 0"),
        (("--baseline-ms", "nan", "--verify-ms", "30"), "--baseline-ms is nan"),
        ((*STORY, "--draft-ms", "-1"), "--draft-ms is -1"),
        ((*STORY, "--tree", "x"), "--tree is 'x'"),
        ((*STORY, "--tree", "64,64,64"), "4096 are the most"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str) -> None:
    status, out, err = run(capsys, *options)
    assert (status, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1


def test_by_rows() -> None:
    step_us = {1: 10_000.0, 8: 12_000.0, 2: 10_500.0}
    short, long = break_even_by_rows(step_us, speculative_overhead_us=1_000, plain_overhead_us=500)
    assert (short.drafted, long.drafted) == (1, 7)
    assert short.tokens == pytest.approx(11_500 / 10_500)
    assert long.tokens == pytest.approx(13_000 / 10_500)
