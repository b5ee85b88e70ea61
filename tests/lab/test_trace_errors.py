"""What is no trace, is damaged or does not belong together: one line each, and what to do."""

from __future__ import annotations

import gzip
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slipstream import cli
from slipstream.errors import SlipstreamError
from slipstream.lab.traces import read_traces
from tests.lab import made_traces as made


def fails(paths: list[Path], message: str) -> None:
    with pytest.raises(SlipstreamError, match=message) as caught:
        read_traces(paths)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"hello", "is not a trace"),
        (b"\x00\x01\x02" * 50, "is not a trace"),
        (b'{"a": 1}', "is not a trace: it holds no traceEvents"),
        (b'{"traceEvents": 3}', "is not a trace"),
        (b'{"traceEvents": []}', "holds no GPU kernels: it is empty"),
        (b"[]", "holds no GPU kernels: it is empty"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1}]}', "holds no GPU kernels; profile"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "na', "is not a trace: it is not JSON"),
        (b"\x1f\x8bnot really gzip", "is cut off or damaged"),
        (b"SQLite format 3\x00 and then nothing", "is damaged or not an Nsight Systems export"),
    ],
)  # fmt: skip
def test_not_a_trace(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    fails([path], message)


def test_missing_and_folder(tmp_path: Path) -> None:
    fails([tmp_path / "nowhere.json"], "cannot read .*nowhere.json: No such file")
    fails([tmp_path], "is a folder; give the trace files in it")


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.9, 0.999])
def test_truncated(tmp_path: Path, keep: float) -> None:
    """Cut anywhere, packed or not, it is an error: half a trace would give wrong medians."""
    job = made.Job.of(1, layers=8)
    job.verify_steps(5)
    for packed in (True, False):
        (path,) = job.write_kineto(tmp_path, packed=packed)
        path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
        fails([path], "is cut off or damaged|ends too early or is not JSON|is not a trace: it is not JSON")


def test_a_database_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE trials (id INTEGER)")
    db.close()
    fails([path], "holds no GPU kernels: it is not an Nsight Systems export")


def test_no_step(tmp_path: Path) -> None:
    rank = made.Rank(0, 1)
    for index in range(30):
        rank.kernel(f"kernel_{index}", 5.0, rank.call("cudaLaunchKernel", 4.0))
    fails(made.Job([rank]).write_kineto(tmp_path), "no step was found in .*30 GPU events")


def two(folder: Path, layers: int = 8, **document: Any) -> list[Path]:
    job = made.Job.of(2, layers=layers)
    job.verify_steps(4)
    return job.write_kineto(folder, **document)


def test_ranks_that_do_not_belong_together(tmp_path: Path) -> None:
    first = two(tmp_path / "a")
    fails([first[0], first[0]], "the same file was given twice")
    fails([first[0], two(tmp_path / "b")[0]], "are both rank 0")
    other = two(tmp_path / "c", distributedInfo={"rank": 1, "world_size": 8})
    fails([first[0], other[1]], "their jobs have 2 and 8 ranks")
    fails([first[0], two(tmp_path / "d", layers=9)[1]], "makes 16 collectives and .* 18")


def test_a_broken_event_among_others_is_left_out(tmp_path: Path) -> None:
    """Producers write odd things: events without times, names that are numbers, categories that are null."""
    job = made.Job.of(1, layers=8)
    job.verify_steps(5)
    document = made.kineto(job.ranks[0])
    expected = read_traces(job.write_kineto(tmp_path)).cost
    odd: list[dict[str, Any]] = [
        {"ph": "X", "cat": "kernel", "name": 7, "ts": None, "dur": 1},
        {"ph": "X", "cat": None, "name": "x", "ts": 1, "dur": 1},
        {"ph": "M", "name": "process_name", "pid": "Spans", "args": {"name": "}, {"}},
        {"ph": "s", "id": 1, "cat": "ac2g", "ts": 1},
        {"ph": "X", "cat": "cpu_op", "name": "}, {\"ph\"", "ts": 1e12, "dur": "3", "args": {"stream": [], "grid": {}}},
    ]  # fmt: skip
    document["traceEvents"][3:3] = odd
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(document))
    assert read_traces([path]).cost == expected


def test_the_array_alone(tmp_path: Path) -> None:
    """Chrome's other format, of which the closing bracket may be missing."""
    job = made.Job.of(1, layers=8)
    job.verify_steps(5)
    events = json.dumps(made.kineto(job.ranks[0])["traceEvents"])
    path = tmp_path / "array.json"
    for text in (events, events[:-1], events[:-1] + ",\n"):
        path.write_text(text)
        assert read_traces([path]).cost.cycles == 4


def test_metadata_before_and_after_in_small_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the pieces in which a file is read, the result is the same."""
    job = made.Job.of(1, layers=8)
    job.verify_steps(5)
    document = made.kineto(job.ranks[0])
    events = document.pop("traceEvents")
    document = (
        {"first": [{"name": "no event"}]} | document | {"traceEvents": events, "last": {"traceName": "x"}}
    )
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document, indent=1))
    expected = read_traces([path])
    for size in (100, 1000, 4096, 100_000):
        monkeypatch.setattr("slipstream.lab.traces.kineto.BLOCK_BYTES", size)
        assert read_traces([path]).cost == expected.cost


def test_command_line(tmp_path: Path) -> None:
    paths = [str(path) for path in two(tmp_path)]
    result = CliRunner().invoke(cli.app, ["trace", *paths, "--out", str(tmp_path / "report")])
    assert result.exit_code == 0, result.output
    assert "16 all-reduces a cycle" in result.stdout
    assert "| verify |" in (tmp_path / "report" / "trace.md").read_text()
    as_json = CliRunner().invoke(cli.app, ["trace", *paths, "--json"])
    assert json.loads(as_json.stdout) == json.loads((tmp_path / "report" / "trace.json").read_text())


def test_command_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(b"nothing"))
    with pytest.raises(SystemExit) as caught:
        cli.main(["trace", str(path)])
    assert caught.value.code == 1
    assert (
        capsys.readouterr().err.splitlines()[-1] == f"error: {path} is not a trace: it holds no traceEvents"
    )
