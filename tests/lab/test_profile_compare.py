"""Measuring our own engine, and laying any two costs side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slipstream import Engine, cli
from slipstream.errors import SlipstreamError
from slipstream.lab.compare import compare, load_costs
from slipstream.lab.cycle_cost import CycleCost, Part, Traffic, ordered
from slipstream.lab.profile import profile
from tests.lab import made_traces as made

REPEATING = "one two three four one two three four one two three four"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine("smollm2-135m", draft="ngram")


@pytest.fixture(scope="module")
def measured(engine: Engine) -> dict[str, CycleCost]:
    """SmolLM2 on a text that n-grams can guess."""
    return profile(engine, [REPEATING], rows=4, new_tokens=24)


def test_profile_explains_the_clock(measured: dict[str, CycleCost]) -> None:
    assert list(measured) == ["verify 4 rows", "decode 1 row"]
    for cost, rows in zip(measured.values(), (4, 1), strict=True):
        assert cost.rows == rows
        assert cost.source == "measured"
        assert cost.attributed is not None
        assert 0.95 < cost.attributed <= 1
        parts = cost.by_part()
        assert {
            "draft",
            "verify.attention",
            "verify.mlp",
            "verify.lm_head",
            "accept",
            "commit",
            "host",
        } <= set(parts)
        assert parts["verify.mlp"] > parts["commit"]
        counts = {part.name: part.count for part in cost.parts}
        assert (counts["attention"], counts["mlp"], counts["norm"], counts["lm_head"]) == (30, 30, 61, 1)
        assert "Spans were on" in cost.evidence[0]
    assert measured["decode 1 row"].tokens == 1
    assert measured["verify 4 rows"].tokens is not None
    assert 1 <= measured["verify 4 rows"].tokens <= 4


def test_profile_without_a_drafter_and_wrong_rows(engine: Engine) -> None:
    before = engine.drafter
    engine.use(None)
    assert list(profile(engine, ["Hello"], new_tokens=4)) == ["decode 1 row"]
    with pytest.raises(SlipstreamError, match="rows is 1; a verify step has at least 2"):
        profile(engine, ["Hello"], rows=1)
    with pytest.raises(SlipstreamError, match="nothing was decoded"):
        profile(engine, ["Hello"], new_tokens=1)
    engine.use(before)


def test_profile_leaves_the_drafter_in_place(engine: Engine) -> None:
    before = engine.drafter
    profile(engine, [REPEATING], rows=3, new_tokens=6)
    assert engine.drafter is before
    with pytest.raises(SlipstreamError, match="draft_tokens is 99"):
        profile(engine, [REPEATING], rows=100, new_tokens=6)
    assert engine.drafter is before


def cost(all_reduce_us: float, *, gap_us: float = 0.0, **more: Any) -> CycleCost:
    traffic = Traffic(14_336, all_reduce_us - 5, 15.0, 10.0)
    parts = [
        Part("verify", "gemm", 100.0, count=4),
        Part("verify", "all_reduce", all_reduce_us, "collective", 2, traffic),
        Part("host", "host_sync", gap_us, "host_sync", 1),
    ]
    return CycleCost(ordered(parts), 4, None, 3, "trace", all_reduce_us + gap_us + 100, **more)


def test_compare() -> None:
    a, b = cost(200.0, gap_us=50.0), cost(80.0, gap_us=60.0)
    found = compare(a, b)
    assert found.total.more_us == pytest.approx(b.total_us - a.total_us)
    assert sum(line.more_us for line in found.parts) == pytest.approx(found.total.more_us)
    assert sum(line.more_us for line in found.kinds) == pytest.approx(found.total.more_us)
    assert sum(line.more_us for line in found.phases) == pytest.approx(found.total.more_us)
    assert [line.name for line in found.biggest()] == ["verify.all_reduce", "host.host_sync"]
    wire, skew, hidden = found.traffic
    assert (wire.more_us, skew.more_us, hidden.more_us) == (-120, 0, 0)


def test_compare_keeps_what_only_one_side_has() -> None:
    a = CycleCost((Part("verify", "mlp", 7.0), Part("draft", "draft", 2.0)), 1, 1, 1)
    found = {line.name: (line.a_us, line.b_us) for line in compare(a, cost(10.0)).parts}
    assert next(iter(found)) == "draft"
    assert found["verify.mlp"] == (7.0, None)
    assert found["verify.gemm"] == (None, 100.0)


def test_load_costs(tmp_path: Path) -> None:
    one = cost(10.0)
    path = tmp_path / "cost.json"
    for value, names in (
        (one.to_json(), [""]),
        ({"cycle": one.to_json(), "costs": {"verify 4 rows": one.to_json()}}, ["cycle", "verify 4 rows"]),
        (
            {"plain_cycle": one.to_json(), "speculative_cycle": one.to_json()},
            ["speculative_cycle", "plain_cycle"],
        ),
    ):
        path.write_text(json.dumps(value))
        assert list(load_costs(path)) == names
        assert load_costs(path)[names[0]] == one
    for text, message in (
        ("{}", "holds no cost of a cycle"),
        ("nonsense", "is not a trace"),
        ('{"parts": 3, "cycles": 1}', "not the cost of a cycle"),
    ):
        path.write_text(text)
        with pytest.raises(SlipstreamError, match=message):
            load_costs(path)


def test_command_line(tmp_path: Path) -> None:
    job = made.Job.of(1, layers=8)
    job.verify_steps(4)
    (trace,) = job.write_kineto(tmp_path)
    other = tmp_path / "other.json"
    other.write_text(json.dumps(cost(80.0).to_json()))
    result = CliRunner().invoke(cli.app, ["compare", str(trace), str(other)])
    assert result.exit_code == 0, result.output
    assert "B takes" in result.stdout
    assert "verify: all_reduce" in result.stdout
    as_json = json.loads(CliRunner().invoke(cli.app, ["compare", str(trace), str(other), "--json"]).stdout)
    assert CycleCost.from_json(as_json["b"]) == cost(80.0)
    same = CliRunner().invoke(cli.app, ["compare", str(other), str(other)])
    assert "cost the same in every part" in same.stdout
    with pytest.raises(SlipstreamError, match="has no cycle 'x'; it has verify"):
        CliRunner().invoke(
            cli.app, ["compare", str(trace), str(other), "--cycle-a", "x"], catch_exceptions=False
        )


def test_profile_command_writes_what_compare_reads(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"kind": "chat", "prompt": REPEATING}) + "\n")
    result = CliRunner().invoke(
        cli.app, ["profile", "--prompts", str(prompts), "--rows", "4", "--max-new-tokens", "12", "--json"]
    )
    assert result.exit_code == 0, result.output
    path = tmp_path / "profile.json"
    path.write_text(result.stdout)
    costs = load_costs(path)
    assert list(costs) == ["cycle", "verify 4 rows", "decode 1 row"]
    assert costs["cycle"] == costs["verify 4 rows"]
