"""The command line with an invented engine: what is printed where, which status comes back, what is refused."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.cli import main
from slipstream.cli.unsupported import UNSUPPORTED
from slipstream.errors import ModelError
from slipstream.target.named import names
from tests.lab.fake import FakeEngine

ROOT = Path(__file__).parents[2]
PROMPTS = "".join(
    json.dumps({"kind": kind, "prompt": f"{kind} {'x' * n}"}) + "\n"
    for n in (1, 2)
    for kind in ("chat", "edit")
)


class Made:
    """Stands in for `slipstream.Engine`: remembers how it was made, and is the fake engine."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.asked: dict[str, Any] = {}

    def __call__(self, model: str, **asked: Any) -> FakeEngine:
        self.asked = {"model": model} | asked
        if model == "unknown":
            raise ModelError("no model\nis called unknown")
        return FakeEngine(**({"draft": asked["draft"]} | self.options))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Made:
    made = Made()
    monkeypatch.setitem(vars(slipstream), "Engine", made)  # setattr would import the real one first
    monkeypatch.chdir(tmp_path)
    Path("some.jsonl").write_text(PROMPTS, encoding="utf-8")
    return made


def status(*argv: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(argv))
    return int(stop.value.code or 0)


def diagnose(*more: str) -> int:
    return status("diagnose", "--prompts", "some.jsonl", "--max-new-tokens", "16", *more)


def one_error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The only line of the standard error, which must be an error; nothing on the standard output."""
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    return lines[0]


def test_help_needs_no_heavy_import() -> None:
    code = (
        "import sys\nfrom slipstream.cli import main\ntry:\n main(['diagnose', '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'numpy', 'jinja2'} & set(sys.modules)\nassert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--version") == 0
    assert capsys.readouterr().out.startswith("slipstream 0.")


def test_diagnose_prints_and_writes(engine: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnose("--threads", "2", "--weights", "int8") == 0
    captured = capsys.readouterr()
    assert "Speculative decoding pays for some kinds of work here" in captured.out
    assert "verify: attention" in captured.out
    assert "Same text, token for token: 4 of 4 prompts." in captured.out
    assert "\x1b" not in captured.out + captured.err
    assert "wrote slipstream-report/report.html" in captured.err
    assert Path("slipstream-report/diagnosis.json").exists()
    assert engine.asked == {
        "model": "smollm2-135m",
        "draft": "ngram",
        "dtype": "auto",
        "weights": "int8",
        "max_length": None,
        "threads": 2,
        "tp": 1,
        "all_reduce": "auto",
    }
    assert diagnose() == 0
    assert "replaced slipstream-report/report.html" in capsys.readouterr().err


def test_diagnose_json_is_all_of_stdout(engine: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnose("--json", "--out", "here") == 0
    value = json.loads(capsys.readouterr().out)
    assert value == json.loads(Path("here/diagnosis.json").read_text(encoding="utf-8"))
    assert value["settings"]["max_new_tokens"] == 16


def test_diagnose_without_draft(engine: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnose("--draft", "none") == 0
    assert engine.asked["draft"] is None
    assert "Without speculation the model writes" in capsys.readouterr().out


def test_diagnose_mismatch_is_an_error(engine: Made, capsys: pytest.CaptureFixture[str]) -> None:
    engine.options["wrong"] = "edit xx"
    assert diagnose() == 1
    captured = capsys.readouterr()
    assert "error: the speculative text differs from the plain text for prompt 4" in captured.err
    assert "Do not trust these speeds" in captured.out
    assert "differs from the plain text" in Path("slipstream-report/report.html").read_text(encoding="utf-8")


def test_diagnose_prompt_too_long(engine: Made, capsys: pytest.CaptureFixture[str]) -> None:
    Path("some.jsonl").write_text(PROMPTS + '{"kind": "chat", "prompt": "TOO LONG"}\n', encoding="utf-8")
    assert diagnose() == 1
    assert "error: prompt 5 was not run: the prompt has 9000 tokens" in capsys.readouterr().err


def test_diagnose_interrupted(engine: Made, capsys: pytest.CaptureFixture[str]) -> None:
    engine.options["interrupt_after"] = 5
    assert diagnose() == 130
    assert "Interrupted after 1 of 4 prompts" in capsys.readouterr().out
    assert json.loads(Path("slipstream-report/diagnosis.json").read_text(encoding="utf-8"))["partial"]


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["diagnose", "unknown"], "no model is called unknown"),
        (["diagnose", "--prompts", "none.jsonl"], "cannot read the prompt file none.jsonl"),
        (["diagnose", "--prompts", "bad.jsonl"], "bad.jsonl, line 1: not JSON"),
        (["diagnose", "--out", "some.jsonl"], "cannot write the report to some.jsonl"),
        (["diagnose", "--out", "/proc/x"], "cannot write the report to /proc/x"),
        (["diagnose", "--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["generate", "hi", "--temperature", "-1"], "temperature is -1.0"),
        (["generate", "hi", "--temperature", "nan"], "temperature is nan"),
        (["generate", "hi", "--top-p", "1.5"], "top_p is 1.5"),
        (["generate", "hi", "--stop", ""], "a stop string is empty"),
        (["generate", " "], "the prompt is empty"),
        (["generate", "hi", "--model", "unknown"], "no model is called unknown"),
    ],
)
def test_bad_input_is_one_line(
    engine: Made, capsys: pytest.CaptureFixture[str], argv: list[str], what: str
) -> None:
    Path("bad.jsonl").write_text("{oops\n", encoding="utf-8")
    loads_model = "unknown" in argv and argv[0] == "diagnose"
    assert status(*argv) == 1
    if loads_model:  # the line that says what is being loaded comes before
        assert f"error: {what}" in capsys.readouterr().err.splitlines()
    else:
        assert what in one_error_line(capsys)


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
@pytest.mark.parametrize("form", [[], ["=1"], [" 1"]])
def test_unsupported_options_are_refused_by_name(
    engine: Made, capsys: pytest.CaptureFixture[str], name: str, form: list[str]
) -> None:
    argv = [name, "1"] if form == [" 1"] else [name + "".join(form)]
    assert status("generate", "hi", *argv) == 1
    line = one_error_line(capsys)
    assert line.startswith(f"error: {name}: ")
    assert "not supported yet" in line


@pytest.mark.parametrize(
    "argv",
    [
        ["nothing"],
        ["generate"],
        ["generate", "hi", "--bogus"],
        ["diagnose", "--threads", "0"],
    ],
)
def test_wrong_usage(engine: Made, capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert status(*argv) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_generate_streams(engine: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("generate", "edit this", "--stats", "--max-new-tokens", "32") == 0
    captured = capsys.readouterr()
    assert captured.out == "firstxxxxx\n"
    assert "tokens a cycle" in captured.err
    assert status("generate", "edit this", "--no-speculate", "--raw", "--stop", "a", "--stop", "b") == 0
    assert capsys.readouterr() == ("firstxxxxx\n", "")


def test_generate_json(engine: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("generate", "hi", "--json", "--max-new-tokens", "3") == 0
    value = json.loads(capsys.readouterr().out)
    assert value["token_ids"] == [0, 1, 2]
    assert value["finish_reason"] == "length"
    assert value["stats"]["new_tokens"] == 3


def test_prompt_from_stdin(
    engine: Made, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("grüße".encode())))
    assert status("generate", "-", "--json") == 0
    assert "grüße" in json.loads(capsys.readouterr().out)["text"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    assert status("generate", "-") == 1
    assert "not UTF-8 text (byte 2)" in one_error_line(capsys)


RUN_FAKE = """
import sys, time, slipstream
from slipstream.cli import main
from tests.lab.fake import FakeEngine
class Slow(FakeEngine):
    def generate(self, *args, **kwargs):
        time.sleep(0.05)
        return super().generate(*args, **kwargs)
slipstream.Engine = lambda model, **options: Slow()
main()
"""


def test_real_interrupt_signal(tmp_path: Path) -> None:
    """SIGINT in the middle of the measuring: the figures so far are on disk, the status is 130."""
    argv = [sys.executable, "-c", RUN_FAKE, "diagnose", "--out", str(tmp_path)]
    process = subprocess.Popen(
        argv,
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job ignores it
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines = []
    while not (lines and lines[-1].startswith("25 %")):
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "Interrupted after" in out
    value = json.loads((tmp_path / "diagnosis.json").read_text(encoding="utf-8"))
    assert value["partial"]
    assert 0 < len(value["results"]) < value["prompts_asked"]
    assert (tmp_path / "report.html").exists()


def test_broken_pipe_is_quiet() -> None:
    argv = [sys.executable, "-c", RUN_FAKE, "generate", "hi"]
    process = subprocess.Popen(
        argv,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(60) != 0


@pytest.mark.parametrize("name", names())
def test_shape_prints_a_table_of_every_name(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status("shape", name, "--tp", "1")
    out = capsys.readouterr().out
    assert "parameters" in out
    assert "weights read" in out


def test_shape_counts_the_all_reduces_of_kimi(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("shape", "kimi-k2.5", "--tp", "8", "--rows", "8", "--json") == 0
    found = json.loads(capsys.readouterr().out)["pass"]
    assert found["layer_all_reduces"] == {"count": 122, "bytes_each": 114688}
    assert [each["place"] for each in found["other_collectives"]] == ["embed", "logits"]


def test_shape_lists_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("shape") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in names())


@pytest.mark.parametrize("argv", [["shape", "nothing"], ["shape", "qwen3-8b", "--tp", "3"]])
def test_shape_refuses_in_one_line(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert status(*argv) == 1
    one_error_line(capsys)
