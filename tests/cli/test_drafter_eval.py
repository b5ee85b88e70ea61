"""`slipstream drafter eval`: its tables and its JSON, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from slipstream.cli import main
from tests.cli.test_drafter_data import TEMPLATE
from tests.draft.heads import made
from tests.train.toy import make_forgetful


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model that has a chat template, loves to repeat itself, and its drafter."""
    folder = tmp_path_factory.mktemp("tiny")
    made(folder)
    make_forgetful(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"kind": kind, "prompt": f"{kind} {n}"} for n in range(3) for kind in ("chat", "code")]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Six samples, of which one answer repeats itself."""
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    lines = []
    for n in range(6):
        answer = [40 + i % 2 for i in range(30)] if n == 3 else [(7 * i + n) % 90 + 5 for i in range(30)]
        lines.append({"tokens": [9, 8, 7, *answer], "loss": [[3, 33]]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def status(*argv: object) -> int:
    try:
        main(["drafter", "eval", *map(str, argv)])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def options(folder: Path, *more: object):
    return (folder / "head", "--target", folder, "--dtype", "float32", "--max-length", 200, *more)


def test_prompts(folder, prompts, capsys):
    asked = options(folder, "--prompts", prompts, "--limit", 5, "--chain", 3, "--tree", "2,3,6")
    assert status(*asked, "--max-new-tokens", 90, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [found["test"], found["count"], found["different"]] == ["prompts", 5, []]
    assert [shape["name"] for shape in found["shapes"]] == ["chain of 3", "tree of 2,3,6"]
    for shape in found["shapes"]:
        answers = shape["answers"]
        assert [n + 1 for n, each in enumerate(answers) if each["loops"] > 0.6] == found["looping"]
        kept = [each for each in answers if each["loops"] <= 0.6]
        for case, some in (("all", answers), ("without_loops", kept)):
            cycles = sum(each["cycles"] for each in some)
            tokens = sum(each["new_tokens"] for each in some)
            assert shape[case]["tokens_a_cycle"] == (tokens / cycles if cycles else 0)
        assert {kind: each["answers"] for kind, each in shape["by_kind"].items()} == {"chat": 3, "code": 2}
    assert status(*asked, "--max-new-tokens", 90) == 0
    captured = capsys.readouterr()
    assert "100 %" in captured.err
    assert "tokens a cycle, bonus counted (papers' τ)" in captured.out
    assert "Same text as plain decoding, token for token: 5 of 5 answers." in captured.out
    assert found["looping"]
    assert f"{len(found['looping'])} of 5 answers repeat themselves" in captured.out
    tree = found["shapes"][1]
    assert f"{tree['all']['tokens_a_cycle']:.2f}" in captured.out


def test_data(folder, data, capsys):
    asked = options(folder, "--data", data, "--chain", 3)
    assert status(*asked, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [found["test"], found["count"], found["looping"]] == ["data", 6, [4]]
    assert found["all"]["sums"]["seen"] == [6 * 30] * 2 + [6 * 29]  # the drafts begin behind token 0
    assert found["without_loops"]["sums"]["seen"] == [5 * 30] * 2 + [5 * 29]
    assert status(*asked) == 0
    out = capsys.readouterr().out
    for who in ("papers' τ", "SpecForge simulated_acc_len", "TorchSpec", "speculators cond_acc"):
        assert who in out
    assert "Without the 1 that repeat" in out
    assert "1 of 6 samples repeat themselves" in out
    assert status(*options(folder, "--data", data, "--limit", 2)) == 0
    assert "None of 2 samples repeats itself." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--prompts", "a", "--data", "b"), "exclude each other"),
        (("--tree", "4,6"), "three whole numbers"),
        (("--tree", "1,6,9"), "at least 2 nodes"),
        (("--tree", "2,1,9"), "cannot be"),
        (("--chain", "40"), "cannot be"),
        (("--chain", "0", "--tree", "0"), "nothing to draft"),
        (("--data", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--prompts", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--temperature", "-1"), "temperature"),
        (("--device", "tpu"), "cpu or cuda"),
    ],
)
def test_what_cannot_be_is_one_line(folder, capsys, more, named):
    assert status(*options(folder, *more)) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    line = captured.err.splitlines()[-1]
    assert line.startswith("error: ")
    assert named in line
    assert "defect" not in line


def test_a_folder_without_drafter(folder, tmp_path, capsys):
    assert status(tmp_path, "--target", folder) == 1
    assert "is not a drafter" in capsys.readouterr().err
