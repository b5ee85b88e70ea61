"""`slipstream drafter check` and `convert` as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slipstream.cli import main
from slipstream.draft.eagle3.checkpoint import load, read, save
from slipstream.draft.eagle3.drafter import SMOLLM2_HEAD

FEW = ("--target", "smollm2-135m", "--prompts", "few.txt", "--max-new-tokens", "32")


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path, _threads):
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("slipstream.train.doctor_search.FAULTS", 1)
    Path("few.txt").write_text("Why is the sky blue?\nName three fruits and say why you like them.\n")


def status(*argv: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["drafter", *argv])
    return int(stop.value.code or 0)


def refused(capsys, *argv: str) -> str:
    assert status(*argv) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("error: ")
    return lines[-1]


def test_a_healthy_drafter(capsys):
    assert status("check", "eagle3", *FEW) == 0
    shown = capsys.readouterr().out
    for part in (
        "✓ ok",
        "hidden size",
        "d2t in range",
        "rope theta",
        "right, given all before",
        "claimed",
        "Read otherwise",
    ):
        assert part in shown
    assert shown.strip().splitlines()[-1].startswith("The drafter is healthy: acceptance at position 1 is ")


def test_a_broken_one_is_mended(capsys):
    good = read(SMOLLM2_HEAD)
    save(Path("broken"), good.changed({"d2t": good.target_ids}))
    assert status("check", "broken", "--mend", "mended", "--json", *FEW) == 1
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert not found["healthy"]
    assert found["verdict"].startswith(
        "d2t was read as offsets; read as absolute ids, acceptance at position 1"
    )
    assert found["cured"]["tokens_a_cycle"] > found["acceptance"]["tokens_a_cycle"]
    assert [fact["status"] for fact in found["facts"] if fact["name"] == "d2t in range"] == ["fail"]
    assert any(trial["kept"] for trial in found["trials"])
    assert "mended/model.safetensors" in said.err
    mended = load(Path("mended"))
    assert (mended.dialect, mended.shape) == (good.dialect, good.shape)
    assert all(torch.equal(mended.tensors[name], tensor) for name, tensor in good.tensors.items())


def test_bad_input_is_one_line(capsys):
    assert "nowhere is not a drafter" in refused(capsys, "check", "nowhere", *FEW)
    assert "few.txt" in refused(capsys, "check", "eagle3", *FEW, "--mend", "few.txt")
    Path("full").mkdir()
    Path("full/file").touch()
    assert "not empty" in refused(capsys, "check", "eagle3", *FEW, "--mend", "full")
    assert "unknown model" in refused(capsys, "check", "eagle3", "--target", "nobody")
    assert "cannot read the prompt file" in refused(
        capsys, "check", "eagle3", "--target", "smollm2-135m", "--prompts", "no"
    )
    assert status("check", "eagle3") == 2


def test_convert_around_the_circle(capsys):
    now = "eagle3"
    for dialect in ("eagle", "speculators", "modelopt", "specforge"):
        target = ("--target", "smollm2-135m") if dialect == "eagle" else ()
        assert status("convert", now, dialect, "--to", dialect, *target) == 0
        shown = capsys.readouterr().out
        assert f"as {dialect}: {dialect}/config.json" in shown
        assert ("holds no layer ids" in shown) == (dialect == "eagle")
        assert ("holds no t2d" in shown) == (dialect == "modelopt")
        now = dialect
    good, last = read(SMOLLM2_HEAD), load(Path("specforge"))
    assert all(torch.equal(last.tensors[name], tensor) for name, tensor in good.tensors.items())


def test_what_convert_refuses(capsys):
    Path("full").mkdir()
    Path("full/other.safetensors").touch()
    assert "holds other files" in refused(capsys, "convert", "eagle3", "full", "--to", "specforge")
    assert "other.safetensors" in refused(
        capsys, "convert", "eagle3", "full", "--to", "specforge", "--overwrite"
    )
    assert "is a file" in refused(capsys, "convert", "eagle3", "few.txt", "--to", "specforge")
    assert "name the target" in refused(capsys, "convert", "eagle3", "out", "--to", "eagle")
    assert not Path("out").exists()
    assert status("convert", "eagle3", "out", "--to", "nobody") == 2
    assert status("convert", "eagle3", "out", "--to", "modelopt") == 0
    assert status("convert", "eagle3", "out", "--to", "specforge", "--overwrite") == 0
    assert "is the drafter itself" in refused(
        capsys, "convert", "out", "out", "--to", "modelopt", "--overwrite"
    )
