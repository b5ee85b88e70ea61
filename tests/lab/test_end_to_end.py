"""`slipstream diagnose` as a user starts it, on the real model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SLIPSTREAM = [sys.executable, "-c", "from slipstream.cli import main; main()"]
PROMPTS = [
    {"kind": "chat", "prompt": "Why do leaves fall in autumn?"},
    {
        "kind": "edit",
        "prompt": "Repeat this list: apple, pear, plum, apple, pear, plum, apple, pear, plum, apple, pear",
    },
]


def prompt_file(folder: Path) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("report")
    argv = [
        "diagnose",
        "--prompts",
        prompt_file(folder),
        "--max-new-tokens",
        "48",
        "--out",
        str(folder),
        "--json",
    ]
    done = subprocess.run([*SLIPSTREAM, *argv], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (folder / "report.html").stat().st_size > 20_000
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def test_everything_is_there(measured: dict[str, Any]) -> None:
    summary = measured["summary"]
    assert not measured["partial"]
    assert set(summary["by_kind"]) == {"chat", "edit"}
    assert set(measured["step_us"]) == {"1", "2", "4", "8", "16", "32"}
    assert summary["verdict"]["sentence"]
    assert measured["provenance"]["torch"]
    assert len(summary["break_even"]) == 5


def test_the_text_is_the_same(measured: dict[str, Any]) -> None:
    assert [result["first_difference"] for result in measured["results"]] == [None, None]
    assert all(result["text"].strip() for result in measured["results"])


def test_parts_explain_the_cycle(measured: dict[str, Any]) -> None:
    """The parts add up to what the clock says within a few per cent, and the named ones are all there."""
    for name in ("plain_cycle", "speculative_cycle"):
        cost = measured[name]
        assert 0.95 < cost["attributed"] <= 1.001, name
        verify = {part["name"] for part in cost["parts"] if part["phase"] == "verify"}
        assert verify >= {"embed", "attention", "mlp", "norm", "lm_head", "rest"}
        assert {part["phase"] for part in cost["parts"]} >= {"verify", "accept", "commit", "host"}


def test_interrupt_in_the_middle(tmp_path: Path) -> None:
    argv = ["diagnose", "--max-new-tokens", "24", "--out", str(tmp_path)]
    process = subprocess.Popen(
        [*SLIPSTREAM, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job ignores it
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("25 %"):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "Interrupted after" in out
    value = json.loads((tmp_path / "diagnosis.json").read_text(encoding="utf-8"))
    assert value["partial"]
    assert 0 < len(value["results"]) < value["prompts_asked"]
