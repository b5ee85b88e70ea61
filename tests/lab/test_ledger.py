"""The ledger: nothing is lost, nothing is changed, two processes do not disturb each other."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.errors import SlipstreamError
from slipstream.lab.ledger import Ledger, Outcome, Sample

RECORD = {"versions": {"torch": "2.13"}, "settings": {"weights": "int8"}, "predicted": 0.7}


def fill(path: Path) -> None:
    """Two trials that ended and one that did not."""
    with Ledger(path) as ledger:
        for item, verdict, measured in (("int8", "kept", 0.72), ("threads", "reverted", 1.4)):
            trial = ledger.begin(item, "a box", "abcd1234", RECORD)
            for arm, us in (("best", 100.0), ("trial", 100.0 * measured)):
                ledger.add(trial, Sample(arm, us, {"prompt": 1}))
            ledger.end(trial, Outcome(verdict, "why", measured, 0.9 * measured, 1.1 * measured, (0.5, 0.51)))
        ledger.add(ledger.begin("adaptive", "another box", "ffff0000", RECORD), Sample("best", 9.5))


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "ledger.sqlite"
    fill(path)
    with Ledger(path, read_only=True) as ledger:
        kept, reverted, open_ = ledger.entries()
        assert [entry.item for entry in ledger.entries(verdict="interrupted")] == ["adaptive"]
        assert [entry.id for entry in ledger.entries(topology="abcd", last=1)] == [2]
        assert ledger.entries(item="threads", since="2020-01-01") == [reverted]
        assert ledger.entries(since="2999-01-01") == []
        assert ledger.entry(3) == open_
        with pytest.raises(SlipstreamError, match="has no trial 4"):
            ledger.entry(4)
    assert kept.record == RECORD
    assert kept.samples == (Sample("best", 100.0, {"prompt": 1}), Sample("trial", 72.0, {"prompt": 1}))
    assert kept.outcome == Outcome("kept", "why", 0.72, 0.9 * 0.72, 1.1 * 0.72, (0.5, 0.51))
    assert (open_.outcome.verdict, open_.ended, len(open_.samples)) == ("interrupted", None, 1)


def test_nothing_can_be_changed_or_removed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    fill(path)
    database = sqlite3.connect(path, isolation_level=None)
    for statement in (
        "DELETE FROM samples",
        "UPDATE verdicts SET verdict = 'kept'",
        "UPDATE trials SET item = 'x'",
    ):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            database.execute(statement)
    with Ledger(path) as ledger, pytest.raises(SlipstreamError, match="UNIQUE"):
        ledger.end(1, Outcome("reverted", "changed my mind"))
    database.close()


WRITER = """
import sys
from pathlib import Path
from slipstream.lab.ledger import Ledger, Outcome, Sample
with Ledger(Path(sys.argv[1])) as ledger:
    for number in range(int(sys.argv[3])):
        trial = ledger.begin(sys.argv[2], "box", "hash", {"number": number})
        for index in range(3):
            ledger.add(trial, Sample("best", index + 0.5))
        ledger.end(trial, Outcome("kept", str(number), 0.5))
        print(number, flush=True)
"""


def start(path: Path, name: str, trials: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), name, str(trials)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_two_processes_at_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    writers = [start(path, name, 40) for name in ("a", "b")]
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    with Ledger(path, read_only=True) as ledger:
        for name in ("a", "b"):
            found = ledger.entries(item=name)
            assert [entry.record["number"] for entry in found] == list(range(40))
            assert all(len(entry.samples) == 3 and entry.outcome.verdict == "kept" for entry in found)
        assert len({entry.id for entry in ledger.entries()}) == 80


def test_a_killed_process_loses_nothing_that_it_reported(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    writer = start(path, "killed", 100_000)
    assert writer.stdout is not None
    reported = [int(writer.stdout.readline()) for _ in range(5)][-1]
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate(timeout=30)
    assert writer.returncode == -signal.SIGKILL
    with Ledger(path) as ledger:
        found = ledger.entries()
        assert [entry.outcome.note for entry in found[: reported + 1]] == [
            str(n) for n in range(reported + 1)
        ]
        assert all(entry.outcome.verdict == "kept" for entry in found[:-1])
        ledger.begin("after", "box", "hash", {})  # it can still be written
    database = sqlite3.connect(path)
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.close()


def one_line(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(argv))
    written = capsys.readouterr()
    assert stop.value.code == 1
    assert written.out == ""
    assert written.err.startswith("error: ")
    assert written.err.count("\n") == 1
    return written.err


def test_read_only_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ledger.sqlite"
    fill(path)
    path.chmod(0o444)
    with pytest.raises(SlipstreamError, match="read-only; name another with --ledger"):
        Ledger(path)
    with pytest.raises(SystemExit) as stop:
        main(["ledger", "list", "--ledger", str(path)])
    assert not stop.value.code
    assert "adaptive" in capsys.readouterr().out
    with Ledger(path, read_only=True) as ledger, pytest.raises(SlipstreamError, match="cannot be written"):
        ledger.begin("x", "box", "hash", {})


def test_what_is_no_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, other, later, empty = (tmp_path / name for name in ("text", "other", "later", "empty"))
    text.write_text("not a database at all, but long enough to look like one\n" * 40)
    for path, statement in ((other, "CREATE TABLE songs (id)"), (later, "PRAGMA user_version = 99")):
        database = sqlite3.connect(path)
        database.execute(statement)
        database.commit()
        database.close()
    empty.touch()
    for path, message in (
        (text, "it is not a ledger"),
        (other, "something else"),
        (later, "later slipstream"),
        (empty, "is empty"),
        (tmp_path / "missing", "there is no ledger"),
        (tmp_path, "error: the ledger"),
    ):
        assert message in one_line(capsys, "ledger", "list", "--ledger", str(path))
    with pytest.raises(SlipstreamError, match="cannot be made"):
        Ledger(text / "below" / "ledger")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = tmp_path / "ledger.sqlite", tmp_path / "out.csv"
    fill(path)
    monkeypatch.setenv("SLIPSTREAM_LEDGER", str(path))

    def run(*argv: str) -> str:
        with pytest.raises(SystemExit) as stop:
            main(["ledger", *argv])
        assert not stop.value.code
        return capsys.readouterr().out

    table = run()
    assert "-28.0 %" in table
    assert "interrupted" in table
    assert "int8" not in run("list", "--verdict", "reverted")
    assert "No trial matches" in run("list", "--item", "nothing")
    assert json.loads(run("list", "--json"))[1]["outcome"]["measured"] == 1.4
    assert "a box, topology abcd1234" in run("show", "1")
    assert json.loads(run("show", "1", "--json"))["record"] == RECORD
    lines = run("export").splitlines()
    assert [json.loads(line)["item"] for line in lines] == ["int8", "threads", "adaptive"]
    run("export", "--format", "csv", "--out", str(out))
    rows = list(csv.DictReader(io.StringIO(out.read_text())))
    assert (rows[0]["measured"], rows[0]["verdict"], rows[2]["measured"]) == ("0.72", "kept", "")


def test_an_unknown_verdict_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ledger.sqlite"
    fill(path)
    error = one_line(capsys, "ledger", "list", "--verdict", "fine", "--ledger", str(path))
    assert "--verdict fine: known are kept" in error
