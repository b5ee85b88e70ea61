"""`slipstream drafter train` as a user runs it: killed, interrupted, on several ranks, on a full disk, on bad data."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipstream.cli import main
from slipstream.draft.eagle3.checkpoint import load
from tests.cli.test_drafter_data import ROOT, write_chatty
from tests.train.toy import make_forgetful

SHAPE = ("--vocabulary", 40, "--taps", "1,2,3")
RECIPE = ("--steps", 3, "--row-length", 64, "--rows", 2)
COMMON = (*RECIPE, "--dtype", "float32", "--device", "cpu", "--weights", "float32", "--save-every", 4)
WORLD = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(autouse=True)
def _alone():
    """What the command sets for its process is taken back."""
    torch.set_num_threads(1)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)  # before what else is made for the module: the same bits need the same threads
    folder = write_chatty(tmp_path_factory.mktemp("tiny"))
    make_forgetful(folder)
    return folder


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    """Conversations in letters of which some are rare."""
    path = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    draw = torch.Generator().manual_seed(0)

    def words(most: int) -> str:
        count = int(torch.randint(3, most, (1,), generator=draw))
        return "".join(chr(40 + int(86 * each**3)) for each in torch.rand(count, generator=draw))

    lines = []
    for number in range(160):
        messages = [{"role": "user", "content": words(9)}, {"role": "assistant", "content": words(18)}]
        lines.append(json.dumps({"id": str(number), "messages": messages * (1 + number % 2)}))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def tuned(folder, talks):
    """What a fine-tuning is asked for."""
    return ("--target", folder, "--data", talks, *COMMON)


@pytest.fixture(scope="module")
def asked(tuned):
    return (*tuned, *SHAPE)


def status(*argv: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["drafter", "train", *map(str, argv)])
    return int(stop.value.code or 0)


def fails(capsys, *argv: object) -> str:
    """The one line of the error."""
    capsys.readouterr()
    assert status(*argv) == 1
    captured = capsys.readouterr()
    assert not captured.out
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert captured.err.splitlines()[-1:] == errors, captured.err
    assert "defect" not in errors[0]
    return errors[0]


def start(*argv: object, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """The command in a process of its own, and in a session of its own with all that it starts."""
    return subprocess.Popen(
        [sys.executable, *before, "-m", "slipstream", "drafter", "train", *map(str, argv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def ends(run: subprocess.Popen[str], code: int = 0) -> str:
    """Its standard error, once it has ended with that status."""
    _, said = run.communicate(timeout=120)
    assert run.returncode == code, said
    return said


def lines_of(out: Path) -> list[dict[str, object]]:
    path = out / "updates.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait_for(out: Path, update: int, run: subprocess.Popen[str]) -> None:
    """Until it has come so far."""
    until = time.monotonic() + 90
    while time.monotonic() < until and run.poll() is None:
        if any(line["update"] == update for line in lines_of(out)):
            return
        time.sleep(0.002)
    raise AssertionError(f"it never came to update {update}: {run.communicate()[1]}")


def kill(run: subprocess.Popen[str]) -> None:
    """kill -9, and all that it has started."""
    children = [run.pid]
    for pid in children:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            children += map(int, task.read_text().split())
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    run.communicate()


def figures(out: Path) -> dict[str, object]:
    """What is no time of training.json."""
    facts = json.loads((out / "training.json").read_text())
    return {
        key: each for key, each in facts.items() if key not in ("trained_s", "tokens_a_second", "peak_gb")
    }


def assert_same_training(out: Path, whole: Path) -> None:
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert (out / "config.json").read_bytes() == (whole / "config.json").read_bytes()
    assert figures(out) == figures(whole)
    told, expected = (
        [{**line, "tokens_a_second": 0} for line in lines_of(each) if line["of"] == "train"]
        for each in (out, whole)
    )
    assert told == expected


@pytest.fixture(scope="module")
def whole(asked, tmp_path_factory):
    """A training that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole") / "drafter"
    assert status(*asked, "--out", out, "--epochs", 3) == 0
    return out


@pytest.mark.slow
def test_killed_and_interrupted_it_goes_on(asked, whole, tmp_path, capsys):
    """kill -9 after a saved state, then Ctrl-C, then to the end: not a bit differs."""
    out = tmp_path / "drafter"
    options = (*asked, "--out", out, "--epochs", 3)
    run = start(*options)
    wait_for(out, 6, run)
    kill(run)
    assert not (out / "model.safetensors").exists()
    with (out / "updates.jsonl").open("a") as file:  # as a kill in the middle of a line leaves it
        file.write('{"update": 99, "of": "tr')
    run = start(*options)
    wait_for(out, 10, run)
    run.send_signal(signal.SIGINT)
    said = ends(run, 130)
    assert "160 conversations read, 160 samples kept" in said
    assert "40 draft tokens cover " in said
    assert "going on after update " in said
    assert "interrupted after update " in said
    assert "the same command goes on" in said
    done = json.loads((out / "training.json").read_text())
    assert done["interrupted"]
    assert 10 <= done["updates"] < done["of"]
    assert load(out).shape == load(whole).shape  # what was trained so far is a drafter
    assert status(*options) == 0
    assert f"going on after update {done['updates']} of {done['of']}" in capsys.readouterr().err
    assert_same_training(out, whole)


@pytest.mark.slow
def test_two_ranks(asked, tmp_path):
    """They share rows and weights; killed and continued not a bit differs, and one rank with their rows agrees."""
    short = (*asked, "--epochs", 1, "--eval-every", 4)
    whole, out, one = tmp_path / "whole", tmp_path / "drafter", tmp_path / "one"
    said = ends(start(*short, "--out", whole, "--states", tmp_path / "states", before=WORLD))
    assert said.count("wrote ") == 2
    assert json.loads((whole / "training.json").read_text())["ranks"] == 2
    run = start(*short, "--out", out, before=WORLD)
    wait_for(out, 6, run)
    kill(run)
    assert not (out / "model.safetensors").exists()
    assert "going on after update 4 of " in ends(start(*short, "--out", out, before=WORLD))
    assert_same_training(out, whole)
    assert status(*short, "--out", one, "--rows", 4) == 0
    found, expected = (load_file(each / "model.safetensors") for each in (whole, one))
    assert torch.equal(found["d2t"], expected["d2t"])
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-4, msg=name)
    ours, theirs = figures(whole), figures(one)
    for name in ("updates", "coverage", "loss_tokens"):
        assert ours[name] == theirs[name]
    assert ours["accepted"] == pytest.approx(theirs["accepted"], abs=0.02)


def test_ranks_do_not_mix(asked, whole, capsys, tmp_path, monkeypatch):
    shutil.copytree(whole, tmp_path / "drafter")
    error = fails(capsys, *asked, "--out", tmp_path / "drafter", "--epochs", 4, "--rows", 3)
    assert "other settings (epochs was 3 and is 4; rows was 2 and is 3); go on with those, or begin" in error
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "error: " in fails(capsys, *asked, "--out", tmp_path / "x", "--device", "tpu")


def test_fine_tuning_keeps_the_map(asked, tuned, whole, tmp_path, capsys):
    out = tmp_path / "tuned"
    capsys.readouterr()
    assert status(*tuned, "--out", out, "--from", whole, "--epochs", 1, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["recipe"]["lr"] == 3e-5
    before, after = load(whole), load(out)
    assert after.config == before.config
    for name in ("d2t", "t2d"):
        assert torch.equal(after.tensors[name], before.tensors[name])
    assert not torch.equal(after.tensors["lm_head.weight"], before.tensors["lm_head.weight"])
    assert status(*tuned, "--out", tmp_path / "same", "--from", whole, "--epochs", 1, "--lr", 0) == 0
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == (
        whole / "model.safetensors"
    ).read_bytes()
    assert "is the drafter that --from names" in fails(capsys, *tuned, "--out", whole, "--from", whole)
    error = fails(capsys, *asked, "--out", out, "--from", whole)
    assert error.endswith(f"--from keeps the shape of {whole}; leave out --vocabulary, --taps")


def test_figures_are_printed(asked, whole, tmp_path, capsys):
    """A training that has ended is said again, without training anything."""
    out = tmp_path / "drafter"
    shutil.copytree(whole, out)
    capsys.readouterr()
    assert status(*asked, "--out", out, "--epochs", 3) == 0
    captured = capsys.readouterr()
    done = figures(whole)
    assert f"going on after update {done['of']} of {done['of']}" in captured.err
    for part in ("updates", "peak memory", "draft vocabulary covers", "held out, accepted at position 3"):
        assert part in captured.out
    assert_same_training(out, whole)
    assert status(*asked, "--out", out, "--epochs", 3, "--minutes", 0, "--overwrite") == 0
    assert json.loads((out / "training.json").read_text())["updates"] == 1


def test_a_full_disk_keeps_what_was_there(asked, tmp_path, capsys):
    """A limit on the size of files stands in for the disk."""
    out = tmp_path / "drafter"
    options = (*asked, "--out", out, "--epochs", 3)
    assert status(*options, "--minutes", 0) == 0
    names = ("training.state", "model.safetensors", "config.json", "training.json")
    kept = {name: (out / name).read_bytes() for name in names}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The state does not fit; then not even the figures do.
    for limit, name in ((len(kept["training.state"]) - 1000, "training.state"), (900, "updates.jsonl")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            error = fails(capsys, *options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert f"{name} cannot be written" in error
        assert "is kept" in error
        assert {name: (out / name).read_bytes() for name in names} == kept
        assert not list(out.glob(".*"))
    assert status(*options) == 0


def test_a_full_disk_at_the_drafter(asked, tmp_path, capsys, monkeypatch):
    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    out = tmp_path / "drafter"
    with monkeypatch.context() as patch:
        patch.setattr("slipstream.draft.eagle3.checkpoint.save_file", full_disk)
        error = fails(capsys, *asked, "--out", out, "--epochs", 1)
    assert "No space left on device); the state of the training is kept there" in error
    assert status(*asked, "--out", out, "--epochs", 1) == 0
    assert load(out).shape.draft_vocab_size == 40


def test_what_cannot_be_done_is_one_line(tuned, talks, whole, tmp_path, capsys):
    out = tmp_path / "drafter"

    def refused(*options: object, **data: str) -> str:
        """With a data file of one line instead, if one is given."""
        for name, line in data.items():
            path = tmp_path / f"{name}.jsonl"
            path.write_text(talks.read_text() + line + "\n")
            options = (*options, "--data", path)
        asked = tuned if "--from" in options else (*tuned, *SHAPE)
        return fails(capsys, *asked, "--out", out, *options)

    assert "torn.jsonl line 161: is not JSON" in refused(torn='{"messages": [')
    assert "empty.jsonl line 161: the conversation is empty" in refused(empty='{"messages": []}')
    assert "line 161: token 96 is out of range" in refused(tokens='{"tokens": [1, 96]}')
    assert "cannot be read" in refused("--data", tmp_path / "nowhere.jsonl")
    (tmp_path / "nothing.jsonl").touch()
    assert "nothing.jsonl is empty" in refused("--data", tmp_path / "nothing.jsonl")
    assert "samples are longer than 4 tokens" in refused("--row-length", 4)
    assert "does not fill one update of 3000 rows" in refused("--rows", 3000)
    assert "unknown model" in refused("--target", "nobody")
    assert "must be auto, cpu or cuda" in refused("--device", "tpu")
    assert "--taps is 'a'; it must be numbers" in refused("--taps", "a")
    assert "--taps" in refused("--taps", "0,1")
    assert "--weights is bfloat16 or float32" in refused("--weights", "int4")
    assert "lr cannot be -1" in refused("--lr", -1)
    assert "unknown norm flag 'x'" in refused("--flags", "x")
    assert "cannot be made" in refused("--out", talks / "below")
    assert "is not a drafter" in refused("--from", tmp_path)
    if not torch.cuda.is_available():
        assert "no GPU" in refused("--device", "cuda")
    broken = tmp_path / "broken"
    shutil.copytree(whole, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    assert "may be truncated" in refused("--from", broken)
    state = broken / "training.state"
    state.write_bytes(state.read_bytes()[:-9])
    assert "training.state cannot be read" in refused("--out", broken, "--epochs", 3)
    state.unlink()
    assert "holds a drafter that cannot be gone on with" in refused("--out", broken)
    other = write_chatty(tmp_path / "other", vocab_size=97)
    assert "for a target of vocabulary 96, this one's is 97" in refused("--from", whole, "--target", other)


def test_what_is_left_out_is_counted(asked, talks, tmp_path, capsys):
    path = tmp_path / "talks.jsonl"
    long = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 90}]}
    silent = {"messages": [{"role": "user", "content": "a"}]}
    path.write_text(talks.read_text() + f"{json.dumps(long)}\n{json.dumps(silent)}\n{json.dumps(silent)}\n")
    assert status(*asked[:2], "--data", path, *COMMON, *SHAPE, "--out", tmp_path / "out", "--minutes", 0) == 0
    said = capsys.readouterr().err
    assert "163 conversations read, 160 samples kept" in said
    assert "left out: 1 longer than 64 tokens, " in said


def test_help_is_quick_and_whole() -> None:
    code = (
        "import sys\nfrom slipstream.cli import main\n"
        "try:\n main(['drafter', 'train', '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True, env=os.environ
    )
    for option in (
        "--from",
        "--states",
        "--accumulate",
        "--precision",
        "--overwrite",
        "--minutes",
        "torchrun",
    ):
        assert option in done.stdout
