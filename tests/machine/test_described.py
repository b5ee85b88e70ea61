"""The machines that slipstream carries, what their figures say, and what is wrong with a file."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import MachineError
from slipstream.machine import units
from slipstream.machine.curve import through
from slipstream.machine.machine import Machine
from slipstream.machine.meaning import meaning
from slipstream.machine.reading import from_plain, names

ROW_BYTES = 7168 * 2
REFERENCE = "8x-rtx-pro-6000-pcie5"


def test_names() -> None:
    assert names() == ["2x-cpu-gloo", "8x-h200-nvlink", "8x-l40s-pcie4", REFERENCE]


@pytest.mark.parametrize("name", names())
def test_each_says_where_its_figures_come_from_and_comes_back_from_json(name: str) -> None:
    machine = Machine.load(name)
    assert machine.name == name
    assert all(len(source.text) > 20 for source in machine.sources.values())
    written = json.loads(json.dumps(machine.to_json()))
    assert written.pop("fingerprint") == machine.fingerprint
    assert from_plain(written, "json") == machine
    assert machine.memory_read(2).value > 0
    assert machine.matrix_rate("bfloat16", 2).value > 0
    assert machine.launch_us(captured=False).value > 0
    assert len(machine.links) == len(machine.devices) * (len(machine.devices) - 1) // 2
    assert meaning(machine)


def test_fingerprints_differ() -> None:
    assert len({Machine.load(name).fingerprint for name in names()}) == len(names())


def test_the_reference_case() -> None:
    """25 ms of eager NCCL over 122 all-reduces; captured, plain decoding leaves 59 to 100 us for each."""
    machine = Machine.load(REFERENCE)
    assert machine.islands == [[0, 1, 2, 3], [4, 5, 6, 7]]
    eager = machine.all_reduce_us(ROW_BYTES, 8, "nccl", captured=False)
    assert 122 * eager.value == pytest.approx(25_000, rel=0.01)
    assert eager.source.kind == "cited"
    captured = machine.all_reduce_us(ROW_BYTES, 8, "nccl", captured=True)
    assert 59 <= captured.value <= 100
    assert captured.source.kind == "assumed"
    sglang = machine.all_reduce_us(12 * 1024, 8, "nccl", captured=False, setting="sglang")
    assert sglang.value == pytest.approx(205)
    fused = machine.all_reduce_us(12 * 1024, 8, "flashinfer", captured=True)
    assert fused.value == pytest.approx(5.3)
    assert "SGLang" in fused.source.text
    text = " ".join(meaning(machine))
    assert "GPUs 0-3 and GPUs 4-7" in text
    assert "16 of 28 pairs" in text
    assert "is not known" in text


def test_eager_from_captured_and_the_reverse_are_assumptions() -> None:
    machine = Machine.load(REFERENCE)
    captured = machine.all_reduce_us(ROW_BYTES, 8, "flashinfer", captured=True)
    eager = machine.all_reduce_us(ROW_BYTES, 8, "flashinfer", captured=False)
    assert eager.value == pytest.approx(captured.value + machine.launch_us(captured=False).value)
    assert eager.source.kind == "assumed"
    upper = machine.all_reduce_us(ROW_BYTES, 4, "nccl", captured=True)
    assert upper.value == machine.all_reduce_us(ROW_BYTES, 4, "nccl", captured=False).value
    assert upper.source.text.startswith("at most the eager cost")


def test_beyond_the_measured_sizes_is_an_assumption_that_never_falls() -> None:
    machine = Machine.load("8x-l40s-pcie4")
    curve = machine.all_reduce_curves("nccl", 8)[0]
    small, large = curve.from_bytes // 2, curve.to_bytes * 2
    assert machine.all_reduce_us(small, 8, "nccl", captured=False).value == curve.us(curve.from_bytes)
    beyond = machine.all_reduce_us(large, 8, "nccl", captured=False)
    assert beyond.value > curve.us(curve.to_bytes)
    assert beyond.source.kind == "assumed"
    assert machine.all_reduce_us(large, 1, "nccl", captured=False).value == 0


def test_ranks_on_a_cpu_share_its_memory_and_gpus_do_not() -> None:
    cpu, gpu = Machine.load("2x-cpu-gloo"), Machine.load("8x-h200-nvlink")
    assert cpu.memory_read(2).value == pytest.approx(24.7e9 / 2)
    assert cpu.memory_read(1, threads=2).value == pytest.approx(24.7e9)
    assert cpu.matrix_rate("float32", 2).value == pytest.approx(138e9 / 2)
    assert cpu.memory_read(3).value == pytest.approx(
        24.7e9 / 3
    )  # more than were measured share what there is
    assert gpu.memory_read(8).value == gpu.memory_read(1).value == 4.8e12


def test_what_is_not_known_is_said() -> None:
    machine = Machine.load("8x-l40s-pcie4")
    with pytest.raises(MachineError, match=r"nccl among 3 ranks .known: nccl x2, nccl x4, nccl x8"):
        machine.all_reduce_us(1, 3, "nccl", captured=True)
    with pytest.raises(MachineError, match="setting 'tuned'"):
        machine.all_reduce_us(1, 8, "nccl", captured=True, setting="tuned")
    with pytest.raises(MachineError, match="matrix rate in int8"):
        machine.matrix_rate("int8")
    with pytest.raises(MachineError, match="launch overhead, captured"):
        Machine.load("2x-cpu-gloo").launch_us(captured=True)


BASE = """
[devices]
count = 2
memory_bytes = "48 GB"
[[links]]
among = [0, 1]
path = "PHB"
[sources.s]
kind = "cited"
text = "a paper"
[[ceilings.memory_read]]
bytes_per_s = "1 TB/s"
source = "s"
[[ceilings.all_reduce]]
backend = "nccl"
ranks = 2
captured = false
source = "s"
points = [["4 KiB", 5], ["8 KiB", "6 us"]]
"""


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"48 GB"', '"48 GX"', "devices.0.memory_bytes: '48 GX' is not a number with one of the units B, kB"),
        ('"48 GB"', '"1 TB/s"', "is not a number with one of the units B"),
        ('"48 GB"', '"-1 GB"', "is not a number"),
        ('"48 GB"', "0", "greater than 0"),
        ('"48 GB"', "true", "is not a quantity"),
        ('"48 GB"', "nan", "is not a quantity"),
        ('"1 TB/s"', '"1 TB"', "ceilings.memory_read.0.bytes_per_s"),
        ("count = 2", "", "devices.count"),
        ("count = 2", "count = 2\nnuma_nodes = [0]", "2 nodes are needed"),
        ("count = 2", "count = 2\nspeed = 3", "devices.0.speed: is not a known key"),
        ("among = [0, 1]", "among = [0, 2]", "every link joins two different devices"),
        ("among = [0, 1]", "between = [0, 1]", "between needs two lists"),
        ("among = [0, 1]", "", "links.0.a: is missing"),
        ('path = "PHB"', 'path = "ISA"', "links.0.path"),
        ('kind = "cited"', 'kind = "heard"', "sources.s.kind"),
        ('source = "s"\n[[', 'source = "t"\n[[', "no such source: t"),
        ("captured = false", "", "ceilings.all_reduce.0.captured: is missing"),
        ('"6 us"', '"6 GB"', "points are pairs of bytes and microseconds"),
        ('["8 KiB", "6 us"]', '["2 KiB", "6 us"]', "points are in rising sizes"),
        ('["8 KiB", "6 us"]', '["8 KiB"]', "points are pairs"),
        ("ranks = 2", "ranks = 1", "ceilings.all_reduce.0.ranks"),
        ("[devices]", "devices", "is not TOML"),
    ],
)
def test_a_wrong_file(tmp_path: Path, old: str, new: str, why: str) -> None:
    path = tmp_path / "box.toml"
    path.write_text(BASE, encoding="utf-8")
    assert Machine.load(path).name == "box"
    assert old in BASE
    path.write_text(BASE.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(MachineError) as error:
        Machine.load(path)
    assert why in str(error.value)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_unknown_names_and_files(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=f"unknown machine 'dgx'; known are .*{REFERENCE}"):
        Machine.load("dgx")
    with pytest.raises(MachineError, match="cannot be read: No such file"):
        Machine.load(tmp_path / "none.toml")
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    with pytest.raises(MachineError, match="cannot be read: Is a directory"):
        Machine.load(folder)


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("96 GB", "bytes", 96e9),
        ("97887 MiB", "bytes", 97887 * 2**20),
        ("1.5kB", "bytes", 1500),
        (" 205 us ", "us", 205),
        ("25 ms", "us", 25_000),
        ("1.792 TB/s", "bytes/s", 1.792e12),
        ("4 GiB/s", "bytes/s", 4 * 2**30),
        ("989 TFLOP/s", "flop/s", 989e12),
        (7, "us", 7),
    ],
)
def test_units(text: object, unit: str, value: float) -> None:
    assert units.parse(text, unit) == pytest.approx(value)


@given(st.lists(st.tuples(st.integers(1, 2**30), st.floats(0.1, 1e6)), min_size=1, unique_by=lambda p: p[0]))
def test_joined_points_pass_through_every_point_and_stay_between_neighbours(
    points: list[tuple[int, float]],
) -> None:
    points = sorted(points)
    machine = from_plain(
        {
            "name": "x",
            "sources": {"s": {"kind": "measured", "text": "t"}},
            "ceilings": {
                "all_reduce": [
                    {"backend": "b", "ranks": 2, "captured": False, "source": "s", "points": points}
                ]
            },
        },
        "x",
    )
    curve = machine.ceilings.all_reduce[0]
    assert len(through(points)) == len(points)
    for size, us in points:
        assert curve.us(size) == pytest.approx(us, rel=1e-6, abs=1e-6)
    for (size, us), (after, then) in itertools.pairwise(points):
        middle = curve.us((size + after) // 2)
        assert min(us, then) - 1e-6 * max(us, then) <= middle <= max(us, then) * (1 + 1e-6)
