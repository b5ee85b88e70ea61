"""A cycle's cost from spans: nothing is lost, nothing counted twice, and it survives JSON."""

from __future__ import annotations

import json

import pytest

from slipstream.lab.cycle_cost import CycleCost, Part, Traffic, ordered

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


def test_collectives_and_waits_survive_json() -> None:
    parts = ordered(
        [
            Part("host", "host", 3.0, "host"),
            Part("verify", "launch_gap", 40.0, "launch_gap", count=300),
            Part(
                "verify", "all_reduce", 900.0, "collective", 122, Traffic(14_336, 800.0, 150.0, 50.0, "NCCL")
            ),
            Part("verify", "gemm", 500.0, count=244),
            Part("draft", "host_sync", 7.0, "host_sync", count=1),
        ]
    )
    cost = CycleCost(parts, None, None, 0, "predicted", ranks=8, evidence=("a calibrated curve",))
    assert CycleCost.from_json(json.loads(json.dumps(cost.to_json()))) == cost
    assert [part.name for part in cost.parts] == ["host_sync", "all_reduce", "gemm", "launch_gap", "host"]
    assert [part.count for part in cost.collectives()] == [122]
    assert cost.collectives("draft") == ()
    assert (cost.kind_us("launch_gap"), cost.kind_us("launch_gap", "draft")) == (40.0, 0)


def test_json_of_before() -> None:
    """Reports written before parts had kinds still open."""
    old = {"parts": [{"phase": "verify", "name": "mlp", "us": 5.0}], "rows": 1.0, "tokens": 1.0, "cycles": 2}
    assert CycleCost.from_json(old | {"source": "measured", "wall_us": 5.5}).by_part() == {"verify.mlp": 5.0}


@pytest.mark.parametrize("value", [{}, {"parts": 1}, {"parts": [{"name": "x"}]}, {"parts": ["x"]}])
def test_json_of_something_else(value: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not the cost of a cycle"):
        CycleCost.from_json(value)


def test_from_spans_counts_and_traffic() -> None:
    wire = Traffic(1152, by="gloo")
    cost = CycleCost.from_spans(
        {"verify": 10.0, "all_reduce": 60.0, "host": 4.0},
        cycles=2,
        rows=4,
        tokens=2,
        calls={"all_reduce": 120},
        traffic={"all_reduce": wire},
        ranks=2,
    )
    assert cost.collectives() == (Part("verify", "all_reduce", 30.0, "collective", 60, wire),)
    assert (cost.kind_us("host"), cost.kind_us("compute"), cost.ranks) == (2, 5, 2)
