"""The plan as a document, the case study, and both commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.lab.case_study import case_study
from slipstream.lab.cases import make_case, reference_case
from slipstream.lab.plan import make_plan, split, to_markdown
from tests.lab.boxes import cases, cpu

ROOT = Path(__file__).parents[2]
REFERENCE = (
    *("--machine", "8x-rtx-pro-6000-pcie5", "--shape", "kimi-k2.5", "--tp", "8", "--eager-verify"),
    *("--draft-ms", "3.4", "--acceptance", "0.38"),
)


@pytest.mark.parametrize("name", sorted(cases()))
def test_every_case_has_a_plan(name: str) -> None:
    plan = make_plan(cases()[name])
    text = to_markdown(plan)
    for heading in (
        "Where things stand",
        "What would help",
        "How to do it",
        "expected end state",
        "rests on",
    ):
        assert heading in text
    for one in plan.ranking:
        assert one.item.title in text
    for one in plan.helpful:
        for how in one.item.how.values():
            assert how in text
        for risk in one.item.risks:
            assert risk in text
    assert text.count("\n| ") > 5


def test_the_breakdown_adds_up() -> None:
    for cost in (reference_case().plain_cost, reference_case().fast_cost):
        assert sum(split(cost).values()) == pytest.approx(cost.total_us)


def test_tables_are_well_formed() -> None:
    for line in to_markdown(make_plan(reference_case())).splitlines():
        if line.startswith("|---"):
            width = line.count("|")
        elif line.startswith("|") and "\\|" not in line:
            cells = line.count("|")
            assert cells >= 3
            assert line.endswith("|")
    assert width


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *argv])
    written = capsys.readouterr()
    return int(stop.value.code or 0), written.out, written.err


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *REFERENCE)
    assert status == 0
    assert "wrote fast-verify-plan.md" in err
    assert "graph_verify" in out
    text = Path("fast-verify-plan.md").read_text()
    assert "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE=1" in text
    status, out, err = run(capsys, *REFERENCE)
    assert "replaced fast-verify-plan.md" in err
    status, out, err = run(capsys, *REFERENCE, "--json")
    facts = json.loads(out)
    assert {one["feasible"] for one in facts["ranking"]} == {"yes", "no", "untested"}
    assert facts["end_states"][0]["plain_tokens_per_s"] > facts["plain_tokens_per_s"]


def test_costs_that_were_measured_move_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    case = make_case(cpu(), "smollm2-135m", tp=2)
    path = tmp_path / "cycle.json"
    path.write_text(json.dumps(case.fast_cost.to_json()))
    options = ("--machine", "2x-cpu-gloo", "--tp", "2", "--threads", "1", "--json")
    before = json.loads(run(capsys, *options)[1])
    after = json.loads(run(capsys, *options, "--cost", str(path))[1])
    assert after["plain_tokens_per_s"] == before["plain_tokens_per_s"]
    verify_us = sum(part["us"] for part in after["speculative"]["parts"] if part["phase"] == "verify")
    assert verify_us == pytest.approx(case.fast_cost.phase_us("verify"), rel=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [("not json", "is not JSON"), ("[1]", "neither"), ('{"parts": 3}', "not the cost of a cycle")],
)
def test_bad_costs(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    status, out, err = run(capsys, *REFERENCE, "--cost", str(path), "--out", str(tmp_path / "plan.md"))
    assert (status, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1
    assert "cannot be read" in run(capsys, *REFERENCE, "--cost", str(tmp_path / "missing"))[2]
    assert "cannot write" in run(capsys, *REFERENCE, "--out", str(tmp_path / "no" / "plan.md"))[2]


def test_the_case_study_in_the_docs_is_the_one_that_the_command_writes() -> None:
    text = case_study()
    assert (ROOT / "docs" / "case-study.md").read_text(encoding="utf-8") == text
    for figure in (
        "| a free draft | 2.46 | 0.68 |",
        "| 2.74 | 0.75 | 47 | 15.9 |",
        "2.00 tokens a cycle",
        "1.23",
    ):
        assert figure in text
