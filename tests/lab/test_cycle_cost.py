"""A cycle's cost from spans: nothing is lost, nothing counted twice, and it survives JSON."""

from __future__ import annotations

import json

import pytest

from slipstream.lab.cycle_cost import CycleCost

SPANS = {
    "host": 40.0,
    "verify": 60.0,
    "draft": 20.0,
    "mlp": 500.0,
    "attention": 300.0,
    "embed": 10.0,
    "norm": 30.0,
    "lm_head": 100.0,
    "accept": 24.0,
    "commit": 16.0,
}


def test_from_spans() -> None:
    cost = CycleCost.from_spans(SPANS, cycles=10, rows=4.5, tokens=2.1, wall_us=1120)
    assert cost.total_us == pytest.approx(110)
    assert cost.attributed == pytest.approx(110 / 112)
    assert cost.phase_us("verify") == pytest.approx(100)
    assert list(cost.by_part()) == [
        "draft",
        "verify.embed",
        "verify.attention",
        "verify.mlp",
        "verify.norm",
        "verify.lm_head",
        "verify.rest",
        "accept",
        "commit",
        "host",
    ]
    assert cost.by_part()["verify.rest"] == pytest.approx(6)


def test_unknown_span_is_kept() -> None:
    cost = CycleCost.from_spans({"verify": 10.0, "surprise": 5.0}, cycles=1, rows=1, tokens=1)
    assert cost.by_part() == {"verify.rest": 10.0, "host.surprise": 5.0}
    assert cost.attributed is None


def test_json_round_trip() -> None:
    cost = CycleCost.from_spans(SPANS, cycles=10, rows=4.5, tokens=2.1, wall_us=1120)
    assert CycleCost.from_json(json.loads(json.dumps(cost.to_json()))) == cost


def test_no_cycles() -> None:
    with pytest.raises(ValueError, match="at least one cycle"):
        CycleCost.from_spans({}, cycles=0, rows=1, tokens=1)
