"""The diagnosis on an engine with known answers: order, comparison, interruption, and what follows from it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipstream.lab.diagnosis import Diagnosis, diagnose, first_difference
from slipstream.lab.prompts import KINDS, Prompt
from slipstream.lab.report import to_json
from slipstream.lab.summary import summarise
from slipstream.lab.verdict import verdict
from tests.lab.fake import FakeEngine

PROMPTS = [Prompt(kind, f"{kind} {'x' * number}") for number in range(4) for kind in KINDS]


def run(engine: FakeEngine, prompts: list[Prompt] = PROMPTS, **options: Any) -> Diagnosis:
    return diagnose(engine, prompts, provenance={}, settings={}, max_new_tokens=64, **options)


def case(engine: FakeEngine) -> tuple[str, str]:
    diagnosis = run(engine)
    found = verdict(diagnosis, summarise(diagnosis))
    assert "\n" not in found.sentence
    return found.case, found.sentence


def test_measures_both_ways_in_turn() -> None:
    engine = FakeEngine()
    said: list[tuple[str, int, int]] = []
    diagnosis = run(engine, progress=lambda *call: said.append(call))
    order = [speculate for _, speculate in engine.calls[2:]]
    assert order == [False, True, True, False] * (len(PROMPTS) // 2)
    assert [result.number for result in diagnosis.results] == list(range(1, len(PROMPTS) + 1))
    assert not diagnosis.partial
    assert not diagnosis.mismatches
    assert [done for _, done, _ in said] == sorted(done for _, done, _ in said)
    assert said[-1] == ("done", said[0][2], said[0][2])


def test_figures() -> None:
    diagnosis = run(FakeEngine())
    summary = summarise(diagnosis)
    assert list(summary.by_kind) == list(KINDS)
    assert summary.by_kind["chat"].speedup == pytest.approx(1)
    assert summary.by_kind["edit"].speedup == pytest.approx(64 * 10 / (20 * 12))
    assert summary.by_kind["edit"].tokens_per_cycle == pytest.approx(64 / 20)
    assert summary.overall is not None
    assert summary.overall.low <= summary.overall.speedup <= summary.overall.high
    assert summary.verify_ratio[8] == pytest.approx(1.14)
    assert [entry.drafted for entry in summary.break_even] == [1, 3, 7, 15, 31]
    first, second = summary.acceptance[:2]
    assert second.cumulative == pytest.approx(first.conditional * second.conditional)


def test_cycle_parts_add_up_to_the_clock() -> None:
    diagnosis = run(FakeEngine())
    for cost in (diagnosis.plain_cycle, diagnosis.speculative_cycle):
        assert cost is not None
        assert cost.cycles == 20
        assert cost.attributed == pytest.approx(1, abs=0.05)
    assert "draft" not in diagnosis.plain_cycle.by_part()  # type: ignore[union-attr]
    assert diagnosis.speculative_cycle.rows > 1  # type: ignore[union-attr]


def test_json_round_trip() -> None:
    diagnosis = run(FakeEngine())
    value = json.loads(json.dumps(to_json(diagnosis)))
    assert Diagnosis.from_json(value) == diagnosis
    assert value["summary"]["verdict"]["case"] == "pays for some"
    with pytest.raises(ValueError, match="not a slipstream"):
        Diagnosis.from_json(value | {"schema": "other"})


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [5]) == 0


@pytest.mark.parametrize(("after", "complete"), [(0, 0), (2, 0), (3, 0), (7, 2), (len(PROMPTS) * 2 + 1, 15)])
def test_interruption_keeps_what_was_measured(after: int, complete: int) -> None:
    diagnosis = run(FakeEngine(interrupt_after=after))
    assert diagnosis.partial
    assert len(diagnosis.results) == complete
    sentence = verdict(diagnosis, summarise(diagnosis)).sentence
    assert sentence.startswith(f"Interrupted after {complete} of 16 prompts")
    assert Diagnosis.from_json(json.loads(json.dumps(to_json(diagnosis)))) == diagnosis


def test_prompt_that_does_not_fit_is_listed() -> None:
    diagnosis = run(FakeEngine(), [Prompt("chat", "TOO LONG"), *PROMPTS])
    assert diagnosis.failed == {1: "the prompt has 9000 tokens; the limit is 2048"}
    assert len(diagnosis.results) == len(PROMPTS)


def test_verdict_mismatch() -> None:
    found, sentence = case(FakeEngine(wrong="edit xx"))
    assert found == "mismatch"
    assert "different text for 2 of 16 prompts" in sentence


def test_verdict_pays_for_all_and_for_some() -> None:
    found, sentence = case(FakeEngine(gain=dict.fromkeys(KINDS, 2.0)))
    assert found == "pays"
    assert "1.67 times as fast" in sentence
    found, sentence = case(FakeEngine())
    assert found == "pays for some"
    assert "edit prompts 2.67 times as fast" in sentence
    assert "chat prompts show no clear gain" in sentence


def test_verdict_does_not_pay_and_why() -> None:
    assert case(FakeEngine(gain=dict.fromkeys(KINDS, 2.0), cycle_ms=30))[0] == "too dear"
    assert case(FakeEngine(gain=dict.fromkeys(KINDS, 1.1), cycle_ms=15))[0] == "too poor"


def test_verdict_even() -> None:
    found, sentence = case(FakeEngine(gain=dict.fromkeys(KINDS, 1.0)))
    assert found == "even"
    assert "too few guesses are right" in sentence


def test_verdict_plain_only() -> None:
    diagnosis = run(FakeEngine(draft=None))
    summary = summarise(diagnosis)
    assert verdict(diagnosis, summary).case == "plain only"
    assert all(result.speculative is None for result in diagnosis.results)
    assert diagnosis.speculative_cycle is None
