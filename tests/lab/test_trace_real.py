"""The traces in the shared data. The figures were found by a separate program that paints the GPU's time on a raster of
0.05 us and calls a moment the host's when the GPU is idle and no launch that had returned was waiting to run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slipstream.lab.traces import Reading, StepKind, read_traces
from slipstream.lab.traces.words import host_wait_us, sentences

TRACES = Path(os.environ.get("SLIPSTREAM_SHARED", "../shared")) / "data" / "traces"
pytestmark = pytest.mark.skipif(
    not TRACES.is_dir() and not os.environ.get("CI"), reason="the shared data are not here"
)


def read(*names: str) -> Reading:
    return read_traces([TRACES / f"{name}.json.gz" for name in names])


def kind(reading: Reading, phase: str, rows: int | None = None) -> StepKind:
    return next(each for each in reading.kinds if each.phase == phase and rows in (None, each.rows))


def busy_us(reading: Reading) -> float:
    return sum(part.us for part in reading.cost.parts if part.kind in ("compute", "collective"))


def test_vllm_ngram() -> None:
    """A step of 8 rows, which the host stops after; steps of other rows do not fit the captured graph."""
    reading = read("vllm_ngram_h200")
    cost = reading.cost
    assert (cost.rows, cost.cycles, cost.source) == (8, 2, "trace")
    assert [(each.phase, each.rows, each.steps) for each in reading.kinds] == [
        ("prefill", 1024, 1),
        ("verify", 3, 1),
        ("verify", 5, 1),
        ("verify", 8, 3),
        ("decode", 1, 1),
        ("accept", None, 6),
        ("host", None, 6),
    ]
    assert cost.wall_us == pytest.approx(9826.9, abs=0.1)
    assert cost.attributed == pytest.approx(1, abs=1e-4)
    assert busy_us(reading) == pytest.approx(4928, abs=15)
    assert host_wait_us(reading) == pytest.approx(4626, abs=60)  # a launch takes about 2 us to arrive
    wait = reading.waits[0]
    assert wait.call == "cudaMemcpyAsync"
    assert wait.where == "vllm/v1/sample/rejection_sampler.py(248): parse_output"
    # GPU dry at 121,559.1 us in the trace, the next step's first copy at 123,065.4; two cycles' mean is 1,591.
    assert cost.by_part()["host.host_sync"] == pytest.approx(1591, abs=2)
    assert reading.longest_wait_us == pytest.approx(3493.1, abs=0.1)
    assert kind(reading, "verify", 8).graphs == 1
    assert kind(reading, "verify", 3).graphs == 33
    text = " ".join(sentences(reading))
    assert "`cudaMemcpyAsync` in vllm/v1/sample/rejection_sampler.py(248): parse_output stops it" in text
    assert "do not run as one CUDA graph (33 pieces" in text


def test_sglang_eagle3() -> None:
    """Draft, verify of 5 rows, extend; nothing stops the host, it is only slower than the GPU."""
    reading = read("sglang_eagle3_h200")
    cost = reading.cost
    assert (cost.rows, cost.cycles) == (5, 23)
    steps = {each.phase: each.steps for each in reading.kinds}
    assert (steps["draft"], steps["verify"], steps["extend"]) == (24, 24, 24)
    assert cost.wall_us == pytest.approx(12979.6, abs=0.1)
    assert cost.attributed == pytest.approx(1, abs=1e-4)
    assert busy_us(reading) == pytest.approx(5950, abs=15)
    assert host_wait_us(reading) == pytest.approx(6675, abs=80)
    assert cost.kind_us("host_sync") < 0.01 * host_wait_us(reading)
    assert reading.longest_wait_us < 50
    text = " ".join(sentences(reading))
    assert "the host is too slow, not because it is stopped" in text
    assert "Phases that wait most: extend" in text
    assert any("Rows of a step: 5: 64 of its add-and-RMSNorm kernels" in line for line in cost.evidence)
    assert (
        kind(reading, "draft").graphs,
        kind(reading, "verify").graphs,
        kind(reading, "extend").graphs,
    ) == (
        1,
        1,
        0,
    )


def test_vllm_plain() -> None:
    """The host launches ahead, so the GPU hardly ever waits."""
    reading = read("vllm_plain_h200")
    assert (reading.cost.rows, reading.cost.tokens, reading.cost.cycles) == (1, 1.0, 22)
    assert reading.cost.wall_us == pytest.approx(5151.4, abs=0.1)
    assert busy_us(reading) == pytest.approx(4820, abs=15)
    assert host_wait_us(reading) == pytest.approx(92, abs=5)
    assert kind(reading, "decode").host_wait_us == 0


def test_amd_decode() -> None:
    """One step of 32 requests: a whole cycle is not there, and that is said."""
    reading = read("sglang_qwen3_8b_decode")
    assert (reading.device, reading.cost.rows, reading.cost.cycles) == ("AMD Instinct MI300X", 32, 1)
    decode = kind(reading, "decode")
    assert (decode.kernels, decode.graph_kernels, decode.graphs) == (558, 544, 1)
    assert reading.waits[0].call == "hipMemcpyWithStream"
    assert any("Only one such cycle" in line for line in reading.evidence)


def test_collectives_with_metadata() -> None:
    """Training steps: five all-reduces of known sizes, some of it hidden; one rank of two, so no wire time."""
    reading = read("kineto_nccl_metadata")
    step = kind(reading, "step")
    assert (step.steps, step.collectives, step.wire_us) == (3, {"all_reduce": 5.0, "broadcast": 2.0}, None)
    sizes = sorted(
        part.traffic.bytes or 0
        for part in reading.cost.collectives()
        if part.name == "all_reduce" and part.traffic
    )
    assert sizes == [4 * count for count in (2049000, 2431040, 6563840, 6637568, 7875584)]
    assert {part.traffic.by for part in reading.cost.collectives() if part.traffic} == {"NCCL Ring LL"}
    assert any("One rank was traced" in line for line in reading.evidence)


def test_two_ranks_of_128() -> None:
    """By hand: the five transfers of step 551 last 30.7 62.8 11.7 47.7 42.5 (0) and 57.9 41.4 8.4 17.6 42.7 ms (1)."""
    reading = read("kineto_two_ranks-1", "kineto_two_ranks-0")
    assert (reading.ranks, reading.world_size) == (2, 128)
    (part,) = reading.cost.collectives()
    assert (part.name, part.count) == ("send_recv", 5)
    assert part.traffic is not None
    assert part.traffic.wire_us == pytest.approx(30669 + 41375 + 8370 + 17614 + 42496, abs=1)
    assert any("2 of 128 ranks were traced" in line for line in reading.evidence)
