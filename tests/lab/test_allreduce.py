"""The micro-benchmark of the all-reduce: what it measures, what it refuses, what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.lab.allreduce import Timing, quantile, shapes_of


def test_the_command_measures_every_named_backend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.svg"
    arguments = [
        "--backend",
        "shm",
        "--backend",
        "gloo",
        "--sizes",
        "64,4K",
        "--rounds",
        "20",
        "--dtype",
        "bfloat16",
        "--json",
        "--out",
    ]
    with pytest.raises(SystemExit) as done:
        main(["allreduce", *arguments, str(plot)])
    assert not done.value.code
    found = json.loads(capsys.readouterr().out)
    assert [(each["backend"], each["message_bytes"]) for each in found["timings"]] == [
        ("shm", 64), ("shm", 4096), ("gloo", 64), ("gloo", 4096),
    ]  # fmt: skip
    for each in found["timings"]:
        timing = Timing(**each)
        assert 0 < timing.wire_us <= timing.median_us <= timing.p90_us <= timing.p99_us
        assert timing.skew_us >= 0
        assert timing.bus_gb_s == pytest.approx(timing.algorithm_gb_s)  # of two ranks
        assert timing.error <= 2.0**-8  # one rounding to bfloat16
        assert timing.same_on_all_ranks
    assert plot.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--backend", "pigeon"], "there is no backend 'pigeon'"),
        (["--backend", "nccl"], "the backend nccl cannot run here: it is for cuda tensors"),
        (["--sizes", "12,many"], "--sizes takes numbers such as 8,64K,1M"),
        (["--sizes", "0"], "--sizes takes numbers"),
        (["--sizes", "8", "--rows", "8"], "exclude each other"),
        (["--out", __file__], "nothing is overwritten"),
    ],
)
def test_what_is_refused(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["allreduce", "--rounds", "20", *arguments])
    assert stopped.value.code == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert line in error


def test_sizes_and_quantiles() -> None:
    assert shapes_of([4, 10, 4096], [], 576, "float32") == [(1, 1), (1, 2), (1, 1024)]
    assert shapes_of([], [1, 8], 576, "bfloat16") == [(1, 576), (8, 576)]
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.51) == 3.0
    assert quantile([7.0], 0.99) == 7.0
