"""`slipstream machine`: what it prints, as text and JSON, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.lab import calibrate, calibrate_all_reduce
from tests.machine.test_topology import PEERS


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))


def status(*argv: str) -> int:
    try:
        main(["machine", *argv])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_the_reference_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("8x-rtx-pro-6000-pcie5") == 0
    printed = capsys.readouterr().out
    for expected in (
        "GPU 0-7",
        "compute capability 12.0",
        "PCIe Gen5 x16",
        "NODE",
        "204.9",
        "62.2",
        "different NUMA",
    ):
        assert expected in printed
    (row,) = [line.split() for line in printed.splitlines() if line.startswith("GPU3 ")]
    assert row[1:] == ["0", "NODE", "NODE", "NODE", "-", "SYS", "SYS", "SYS", "SYS"]


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("8x-h200-nvlink", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["devices"]) == 8
    assert {link["path"] for link in found["links"]} == {"NVL"}
    assert found["meaning"]
    assert found["fingerprint"]
    assert found["ceilings"]["all_reduce"][0]["source"] in found["sources"]


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert status() == 0
    printed = capsys.readouterr().out
    assert "CPU" in printed
    assert "memory" in printed
    assert "nothing measured here yet" in printed


def test_a_topology_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "topo.txt"
    path.write_text(PEERS, encoding="utf-8")
    assert status("--topology", str(path)) == 0
    printed = capsys.readouterr().out
    (row,) = [line.split() for line in printed.splitlines() if line.startswith("GPU0 ")]
    assert row == ["GPU0", "0", "-", "PHB", "SYS!"]
    assert "Pairs 0-2 have no peer access" in printed


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["dgx"], "known are 2x-cpu-gloo"),
        (["--topology", "none.txt"], "none.txt cannot be read"),
        (["--topology", __file__], "not what nvidia-smi topo -m prints"),
        (["--topology", "bytes"], "is not text"),
        (["8x-h200-nvlink", "--topology", "x"], "not both"),
        (["8x-h200-nvlink", "--calibrate"], "the machine it runs on"),
        (["wrong.toml"], "devices.0.memory_bytes: '96 apples' is not a number"),
    ],
)
def test_refused_in_one_line(
    argv: list[str],
    why: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bytes").write_bytes(b"\x7fELF\xff\xfe")
    Path("wrong.toml").write_text('[[devices]]\nindex = 0\nmemory_bytes = "96 apples"\n', encoding="utf-8")
    assert status(*argv) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith("error: ")
    assert why in captured.err


def test_calibrate_measures_keeps_and_is_shown_next_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For real, with small sizes; the ranks are measured in tests/lab."""
    monkeypatch.setattr(calibrate_all_reduce, "BACKENDS", {})
    monkeypatch.setattr(calibrate._cpu_memory, "__defaults__", (2**20,))
    monkeypatch.setattr(calibrate._cpu_matrix, "__defaults__", (128,))
    assert status("--calibrate", "--json") == 0
    captured = capsys.readouterr()
    assert "wrote " in captured.err
    measured = json.loads(captured.out)["ceilings"]
    assert {rate["dtype"] for rate in measured["matrix"]} == {"float32", "bfloat16"}
    assert all(1e8 < rate["bytes_per_s"] < 1e13 for rate in measured["memory_read"])
    assert 0.01 < measured["launch"][0]["us"] < 1000
    assert status("--json") == 0
    assert json.loads(capsys.readouterr().out)["ceilings"] == measured
    assert status("--calibrate") == 0
    assert "replaced " in capsys.readouterr().err
