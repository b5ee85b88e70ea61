"""The cache of calibrations: whole files or none, and never another machine's figures or another version's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.errors import MachineError
from slipstream.machine import cache
from slipstream.machine.machine import Cpu, Machine, Versions

MEASURED = Machine.load("2x-cpu-gloo")
BARE = Machine("bare", cpu=MEASURED.cpu, versions=MEASURED.versions)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "machine"


def test_what_was_kept_comes_back_to_the_same_machine_alone(folder: Path) -> None:
    path = cache.save(MEASURED)
    assert [path] == list(folder.iterdir())  # and nothing half written
    found = cache.with_calibration(BARE)
    assert (found.ceilings, found.sources, found.notes) == (MEASURED.ceilings, MEASURED.sources, ())
    other = cache.with_calibration(replace(BARE, cpu=Cpu(name="another", cores=2)))
    assert other.ceilings.memory_read == ()
    assert "nothing measured here yet" in other.notes[0]


def test_another_version_is_not_used() -> None:
    cache.save(MEASURED)
    found = cache.with_calibration(replace(BARE, versions=Versions(torch="9.0")))
    assert found.ceilings.memory_read == ()
    assert f"torch {MEASURED.versions.torch}" in found.notes[0]


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"format": 0}', "null"])
def test_a_damaged_or_older_file_is_a_note(text: str) -> None:
    path = cache.save(MEASURED)
    path.write_text(text, encoding="utf-8")
    found = cache.with_calibration(BARE)
    assert found.ceilings.memory_read == ()
    assert "--calibrate" in found.notes[0]
    cache.save(MEASURED)
    assert cache.with_calibration(BARE).ceilings == MEASURED.ceilings


def test_a_file_with_wrong_figures_is_a_note() -> None:
    path = cache.save(MEASURED)
    kept = json.loads(path.read_text(encoding="utf-8"))
    kept["ceilings"]["launch"][0]["us"] = "fast"
    path.write_text(json.dumps(kept), encoding="utf-8")
    assert "--calibrate" in cache.with_calibration(BARE).notes[0]


def test_a_folder_that_cannot_be_written(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file", encoding="utf-8")
    with pytest.raises(MachineError, match="cannot be written"):
        cache.save(MEASURED)
