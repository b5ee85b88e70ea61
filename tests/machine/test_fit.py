"""The fits of the all-reduce curves: reproducible from the shared measurements, and close to them."""

from __future__ import annotations

import os
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import MachineError
from slipstream.machine.curve import AllReduceCurve
from slipstream.machine.fit import errors, fit, fitted, main, read_parquet
from slipstream.machine.machine import Machine
from tests.machine.shared import shared

if not os.environ.get("CI"):
    pytest.importorskip("pyarrow")
BOXES = {"nccl_l40s": "8x-l40s-pcie4"}


def test_the_described_curves_are_what_the_fit_gives() -> None:
    found = fitted(shared("data/allreduce"))
    assert len(found) == 8
    for one in found:
        machine = Machine.load(BOXES.get(one.name, "8x-rtx-pro-6000-pcie5"))
        (curve,) = machine.all_reduce_curves(one.curve.backend, one.curve.ranks, one.curve.setting)
        assert curve == one.curve


def test_the_fits_error_against_the_data() -> None:
    """Median under 10 %, none above 35 %, between 4 KiB and 4 MiB; and against a run of another number format."""
    every = []
    for one in fitted(shared("data/allreduce")):
        own = errors(one.curve, one.own)
        assert len(own) >= 4
        assert statistics.median(own) < 0.10
        assert max(own) < 0.35
        every += own
        if one.other:
            assert statistics.median(errors(one.curve, one.other)) < 0.10
    assert statistics.median(every) < 0.05
    assert max(every) < 0.15


def test_elements_are_bytes_by_their_dtype_and_milliseconds_microseconds() -> None:
    """8 GPUs, 8 KiB: 26.7 us in the table that the project was given, not 4 KiB, and not 0.027."""
    tables = read_parquet(shared("data/allreduce/nccl_rtx_pro_6000_server.parquet"))
    assert dict(tables[8, "half"])[8192] == pytest.approx(26.7, abs=0.05)
    assert dict(tables[8, "half"])[2**20] == pytest.approx(131.5, abs=0.05)
    assert dict(tables[8, "int8"])[2**20] == pytest.approx(166.6, abs=0.05)


def test_steps_down_are_kept() -> None:
    """LL is kept too long there: 512 KiB take longer than 1 MiB."""
    machine = Machine.load("8x-rtx-pro-6000-pcie5")
    times = [
        machine.all_reduce_us(size, 8, "nccl", captured=False, setting="aiconfigurator").value
        for size in (512 * 1024, 1024 * 1024 - 1, 1024 * 1024)
    ]
    assert times[1] > times[0]
    assert times[2] < times[1]
    protocols = [s.protocol for s in machine.all_reduce_curves("nccl", 8, "aiconfigurator")[0].segments]
    assert protocols == ["LL", "Simple"]


@given(
    st.floats(1, 100),
    st.floats(1e8, 1e11),
    st.integers(3, 12),
    st.floats(1.5, 10),
    st.integers(3, 8),
)
@settings(max_examples=60, deadline=None)
def test_a_curve_of_two_protocols_is_found_again(
    latency: float, rate: float, before: int, faster: float, after: int
) -> None:
    sizes = [2 ** (10 + i) for i in range(before + after)]
    points = [(s, latency + s / rate * 1e6) for s in sizes[:before]]
    points += [(s, 3 * latency + s / (rate * faster) * 1e6) for s in sizes[before:]]
    segments = fit(points)
    curve = AllReduceCurve("fit", 2, False, "fit", sizes[-1], segments)
    assert all(curve.us(size) == pytest.approx(us, rel=0.1001) for size, us in points)
    assert len(segments) <= 2
    assert all(segment.latency_us >= 0 for segment in segments)


def test_a_line_is_one_piece_with_its_own_figures() -> None:
    (segment,) = fit([(2**i, 7.0 + 2**i / 2e10 * 1e6) for i in range(10, 26)])
    assert segment.latency_us == pytest.approx(7, rel=0.01)
    assert segment.bytes_per_s == pytest.approx(2e10, rel=0.01)


def test_noise_of_five_percent_adds_no_pieces() -> None:
    noise = np.random.default_rng(0).uniform(0.95, 1.05, 16)
    points = [(2**i, (7.0 + 2**i / 2e10 * 1e6) * f) for i, f in zip(range(10, 26), noise, strict=True)]
    assert len(fit(points)) == 1


def test_wrong_input(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], [str(tmp_path / "none")], ["a", "b"]):
        with pytest.raises(MachineError, match="usage"):
            main(arguments)
    with pytest.raises(MachineError, match="holds no"):
        main([str(tmp_path)])
    with pytest.raises(MachineError, match="at least 3 sizes"):
        fit([(1, 1.0), (2, 2.0)])
    main([str(shared("data/allreduce"))])
    printed = capsys.readouterr()
    assert printed.out.count("[[ceilings.all_reduce]]") == 8
    assert "all, 4 KiB to 4 MiB: median" in printed.err
