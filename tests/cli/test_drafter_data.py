"""`slipstream drafter data`: what it writes, what it refuses, and that no end loses or doubles a line."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import slipstream
from slipstream.cli import main
from slipstream.engine.request import SamplingParams
from slipstream.target.load import load
from slipstream.train.data_file import DataFile
from slipstream.train.regenerate import read_talks, regenerate
from slipstream.train.samples import LOOPING, loops, read_samples
from slipstream.train.writing import Wishes
from tests.target.tiny import write_llama

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    '{% for m in messages %}{{ m.role[0] }}: {{ m.content }} "\n{% endfor %}'
    "{% if add_generation_prompt %}a: {% endif %}"
)
"""The token " ends a turn, as the tiny models' config says."""
SHORT = ("--max-new-tokens", "12", "--temperature", "2", "--greedy-share", "0.4")


FORGETFUL = TEMPLATE.replace("m.content", "m.content if loop.last or m.role == 'user' else 'x'")
"""Rewrites earlier answers, as templates do that leave out what was thought."""


def write_chatty(folder: Path, template: str = TEMPLATE, **changes: float) -> Path:
    """A tiny model that has a chat template."""
    write_llama(folder, **changes)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _one_thread():
    """Models this small gain nothing from more, and lose much beside other work."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_chatty(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(folder):
    return slipstream.Engine(str(folder), draft=None, dtype="float32", max_length=200, max_batch=3)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Conversations of one to three turns; the answers in them are not what any model said."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = []
    for i in range(120):
        messages = []
        for turn in range(1 + i % 3):
            messages.append({"from": "human", "value": f"{'abcdefghij'[i % 10]}{i} q{turn}"})
            messages.append({"from": "gpt", "value": "given"})
        if i % 7 == 0:
            messages.pop()
        lines.append(json.dumps({"id": f"talk-{i}", "conversations": messages}))
    path.write_text("\n".join(lines) + "\n\n" + '{"prompt": "last one"}\n')
    return path


def status(*argv: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["drafter", "data", *map(str, argv)])
    return int(stop.value.code or 0)


def read(path: Path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def fails(capsys, *argv: object) -> str:
    """The one line of the error."""
    capsys.readouterr()
    assert status(*argv) == 1
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if "%" not in line]
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    assert "defect" not in lines[0]
    return lines[0]


def both_ways(folder, prompts):
    return {
        "given": ("--model", folder, "--from", prompts, "--batch", 2, *SHORT),
        "invented": (
            *("--model", folder, "--conversations", 150, "--batch", 4, "--user-tokens", 20, *SHORT),
        ),
    }


@pytest.mark.parametrize("way", ["given", "invented"])
def test_a_killed_run_continues_to_the_same_bytes(folder, prompts, tmp_path, way):
    options = both_ways(folder, prompts)[way]
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    assert status(*options, "--out", whole) == 0
    command = [sys.executable, "-c", "from slipstream.cli import main; main()", "drafter", "data"]
    with subprocess.Popen(
        [*command, *map(str, options), "--out", str(killed)],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as run:
        until = time.monotonic() + 60
        while time.monotonic() < until and not (killed.exists() and killed.stat().st_size):
            time.sleep(0.002)
        run.send_signal(signal.SIGKILL)
    before = killed.read_bytes()
    assert 0 < len(before) < whole.stat().st_size
    with killed.open("ab") as file:  # what a kill in the middle of a line leaves
        file.write(b'{"id":"torn","index":12,"conv')
    assert status(*options, "--out", killed) == 0
    assert killed.read_bytes() == whole.read_bytes()
    assert status(*options, "--out", killed) == 0  # nothing is left to do
    assert killed.read_bytes() == whole.read_bytes()
    lines = read(whole)
    assert len(lines) > 20
    assert {line["finish"] for line in lines} == {"stop", "length"}


@pytest.mark.parametrize("template", [TEMPLATE, FORGETFUL], ids=["plain", "forgetful"])
def test_a_file_continues_from_any_place(prompts, tmp_path, template):
    """Cut off behind any line or in it, also between the several lines of one conversation."""
    folder, out = write_chatty(tmp_path / "model", template), tmp_path / "some.jsonl"
    options = ("--model", folder, "--from", prompts, "--batch", 1, "--conversations", 9, *SHORT, "--out", out)
    assert status(*options) == 0
    whole = out.read_bytes()
    lines = [json.loads(line) for line in whole.splitlines()]
    several = {line["index"] for line in lines if sum(line["index"] == each["index"] for each in lines) > 1}
    assert bool(several) == (template is FORGETFUL)
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    for end in [*ends, ends[0] - 1, ends[3] + 20, 0]:
        out.write_bytes(whole[:end])
        assert status(*options) == 0
        assert out.read_bytes() == whole
    samples, report = read_samples(out, load(str(folder), positions=64).tokenizer, 500)
    assert report.kept == len(lines)
    assert report.loss_tokens == sum(end - begin for line in lines for begin, end in line["loss"])
    assert len(samples) == len(lines)


def test_regenerated_answers_are_the_engines(folder, engine, prompts, tmp_path):
    """Every answer is what the engine says to the regenerated history, alone and as a list of messages."""
    out = tmp_path / "some.jsonl"
    options = ("--greedy-share", 1, "--max-new-tokens", 12, "--keep-loops", "--dtype", "float32")
    assert status("--model", folder, "--from", prompts, "--conversations", 12, "--out", out, *options) == 0
    lines = read(out)
    assert lines[0]["id"] == "talk-0"
    checked = 0
    for line in lines:
        told, params = line["conversations"], SamplingParams(max_new_tokens=12)
        answers = [at for at, message in enumerate(told) if message["role"] == "assistant"]
        for at, (begin, end) in zip(answers[-len(line["loss"]) :], line["loss"], strict=True):
            said = engine.generate(told[:at], params)
            assert line["tokens"][:begin] == engine.tokens_of(told[:at])
            assert line["tokens"][begin:end] == said.token_ids
            assert told[at]["content"] == said.text
            checked += 1
        assert line["finish"] == said.finish_reason
        assert told[0]["content"] in prompts.read_text()
    assert checked >= 12
    samples, report = read_samples(out, engine.model.tokenizer, 500)
    assert (report.read, report.kept) == (len(lines), len(lines))
    assert samples.sample(0)[0].tolist() == lines[0]["tokens"]


def test_greedy_answers_of_the_real_model(tmp_path):
    smollm2 = slipstream.Engine(draft=None, max_length=128, max_batch=2)
    path = tmp_path / "asked.jsonl"
    path.write_text(
        '{"prompt": "Name a colour."}\n{"messages": [{"role": "user", "content": "Say hello."}]}\n'
    )
    wishes = Wishes(greedy_share=1.0, max_new_tokens=10)
    [(lines, tally)] = regenerate(smollm2, read_talks(path), wishes, 4)
    assert (tally.lines, tally.conversations) == (2, 2)
    for line in lines:
        said = smollm2.generate(line["conversations"][0]["content"], SamplingParams(max_new_tokens=10))
        [[begin, end]] = line["loss"]
        assert line["tokens"][begin:end] == said.token_ids
        assert line["conversations"][1] == {"role": "assistant", "content": said.text}


def test_invented_conversations_read_back(folder, tmp_path, capsys):
    out = tmp_path / "deep" / "made.jsonl"
    options = ("--model", folder, "--conversations", 40, "--batch", 16, "--user-tokens", 20, *SHORT)
    assert status(*options, "--out", out) == 0
    printed = capsys.readouterr().out
    lines = read(out)
    assert f"{len(lines)} conversations, 0 of them from before" in printed
    assert f"{sum(e - b for line in lines for b, e in line['loss'])} answer tokens" in printed
    assert all(int(line["id"]) == line["index"] < 40 for line in lines)
    tokenizer = load(str(folder), positions=64).tokenizer
    for line in lines:
        [[begin, end]] = line["loss"]
        assert end == len(line["tokens"])
        assert (line["finish"] == "stop") == (line["tokens"][-1] == 1)
        answer = line["tokens"][begin : end - (line["finish"] == "stop")]
        assert line["conversations"][1]["content"] == tokenizer.decode(answer)
        assert loops(line["tokens"][begin:end]) <= LOOPING
    more = tmp_path / "more.jsonl"
    for count in (40, 56):  # more of the same: the limit is no setting
        assert status(*options, "--out", more, "--conversations", count) == 0
    assert more.read_bytes().startswith(out.read_bytes())
    assert len(read(more)) > len(lines)


def test_loops_are_left_out_and_counted(prompts, tmp_path, capsys):
    """A model with small weights, greedy: each token follows from the one before, so that most answers are loops."""
    folder = write_chatty(tmp_path / "model", initializer_range=0.02)
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{'abcdefghij'[i % 10]}{i}"}) + "\n" for i in range(40)))
    options = ("--model", folder, "--from", path, "--greedy-share", 1, "--max-new-tokens", 100)
    assert status(*options, "--out", tmp_path / "without.jsonl") == 0
    printed = capsys.readouterr().out
    assert status(*options, "--out", tmp_path / "with.jsonl", "--keep-loops") == 0
    assert "repeat themselves" not in capsys.readouterr().out
    everything = read(tmp_path / "with.jsonl")
    lively = [line for line in everything if loops(line["tokens"][line["loss"][0][0] :]) <= LOOPING]
    assert 0 < len(lively) < len(everything) == 40
    assert read(tmp_path / "without.jsonl") == lively
    assert f"Answers left out because they repeat themselves: {40 - len(lively)}." in printed


def test_conversations_that_do_not_fit_end_there(folder, tmp_path, capsys):
    path, out = tmp_path / "asked.jsonl", tmp_path / "some.jsonl"
    talk = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": ""}]
    long = [{"role": "user", "content": "x" * 150}]
    path.write_text(json.dumps({"messages": talk + long}) + "\n" + json.dumps({"messages": long}) + "\n")
    options = ("--max-new-tokens", 60, "--max-length", 100, "--keep-loops")
    assert status("--model", folder, "--from", path, "--out", out, *options) == 0
    [line] = read(out)
    assert [each["role"] for each in line["conversations"]] == ["user", "assistant"]
    assert "the next answer would not fit: " in capsys.readouterr().out


def test_other_settings_do_not_mix(folder, tmp_path, capsys):
    out = tmp_path / "some.jsonl"
    options = ("--model", folder, "--conversations", 8, "--batch", 8, "--user-tokens", 12, *SHORT)
    assert status(*options, "--out", out) == 0
    kept = out.read_bytes()
    error = fails(capsys, *options, "--out", out, "--seed", 1)
    assert "was made with seed 0, now it is 1; take another --out, or begin anew with --overwrite" in error
    assert out.read_bytes() == kept
    assert status(*options, "--out", out, "--seed", 1, "--overwrite") == 0
    assert out.read_bytes() != kept
    Path(f"{out}.json").write_text("no settings")
    assert "is damaged" in fails(capsys, *options, "--out", out)
    Path(f"{out}.json").unlink()
    assert "without the settings" in fails(capsys, *options, "--out", out)
    with DataFile(tmp_path / "busy.jsonl", {}):
        error = fails(capsys, *options, "--out", tmp_path / "busy.jsonl")
        assert "is being written by another process" in error


def test_a_changed_prompt_file_is_another_setting(folder, tmp_path, capsys):
    path, out = tmp_path / "asked.jsonl", tmp_path / "some.jsonl"
    path.write_text('{"prompt": "ab"}\n')
    options = ("--model", folder, "--from", path, "--out", out, *SHORT, "--keep-loops")
    assert status(*options) == 0
    path.write_text('{"prompt": "cd"}\n')
    assert "was made with sha256" in fails(capsys, *options)


def test_what_cannot_be_done_is_one_line(folder, tmp_path, capsys):
    out = tmp_path / "some.jsonl"
    path = tmp_path / "asked.jsonl"
    path.write_text('{"prompt": "ab"}\n\n{"text": "cd"}\n')
    asked = ("--model", folder, "--from", path, "--out", out)
    assert f'{path} line 3: has none of "conversations", "messages" or "prompt"' in fails(capsys, *asked)
    assert "cannot be read" in fails(capsys, "--from", tmp_path / "nowhere", "--out", out)
    assert "cannot be written" in fails(capsys, "--out", path / "below.jsonl")
    assert "is not a file" in fails(capsys, "--out", tmp_path)
    assert "temperature is -1" in fails(capsys, "--out", out, "--temperature", -1)
    assert "unknown model" in fails(capsys, "--out", out, "--model", "nobody")
    assert "it must be cpu or cuda" in fails(capsys, "--out", out, "--device", "tpu")
    if not torch.cuda.is_available():
        assert "no GPU" in fails(capsys, "--out", out, "--device", "cuda")
    assert "do not fit" in fails(capsys, "--model", folder, "--out", out, "--max-new-tokens", 300)
    write_llama(tmp_path / "bare")
    assert "no chat template" in fails(
        capsys, "--model", tmp_path / "bare", "--out", tmp_path / "other.jsonl"
    )


def test_the_out_file_is_not_the_prompt_file(folder, prompts, capsys):
    kept = prompts.read_bytes()
    for more in ((), ("--overwrite",)):
        assert "is what --from reads" in fails(
            capsys, "--model", folder, "--from", prompts, "--out", prompts, *more
        )
    assert prompts.read_bytes() == kept


def test_minutes_end_it_in_time(folder, tmp_path, capsys):
    out = tmp_path / "some.jsonl"
    options = ("--model", folder, "--batch", 4, "--user-tokens", 12, "--minutes", 0.01, *SHORT)
    start = time.monotonic()
    assert status(*options, "--out", out) == 0
    assert time.monotonic() - start < 10
    assert read(out)


def test_an_interrupt_keeps_what_is_done(folder, prompts, tmp_path, monkeypatch, capsys):
    out = tmp_path / "some.jsonl"
    options = (
        "--model",
        folder,
        "--from",
        prompts,
        "--batch",
        2,
        "--conversations",
        24,
        *SHORT,
        "--out",
        out,
    )
    grow, calls = DataFile.append, []

    def interrupted(self, lines):
        calls.append(len(lines))
        if len(calls) == 2:
            raise KeyboardInterrupt
        grow(self, lines)

    monkeypatch.setattr(DataFile, "append", interrupted)
    assert status(*options) == 130
    captured = capsys.readouterr()
    assert f"{calls[0]} conversations" in captured.out
    assert "interrupted; the same command continues" in captured.err
    assert len(read(out)) == calls[0]


def test_a_full_disk_keeps_what_fits(tmp_path):
    """A limit on the size of files stands in for the disk; the line that does not fit leaves nothing."""
    path = tmp_path / "some.jsonl"
    lines = [{"index": i, "text": "x" * 100} for i in range(40)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with DataFile(path, {}) as file:
        file.append(lines[:10])
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 500, before[1]))
        try:
            with pytest.raises(slipstream.SlipstreamError, match=r"could not grow .* is kept") as error:
                file.append(lines[10:])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(error.value)
    count = len(read(path))
    assert 10 < count < 40
    with DataFile(path, {}) as file:
        assert (file.lines, file.last_index, file.last_count) == (count, count - 1, 1)
        file.append(lines[count:])
    assert read(path) == lines


def test_help_is_quick_and_whole() -> None:
    code = (
        "import sys\nfrom slipstream.cli import main\n"
        "try:\n main(['drafter', 'data', '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True, env=os.environ
    )
    for option in ("--from", "--greedy-share", "--keep-loops", "--overwrite", "--minutes"):
        assert option in done.stdout
