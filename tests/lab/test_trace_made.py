"""Traces that were made, whose answers are known by construction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.lab.cycle_cost import CycleCost
from slipstream.lab.traces import Reading, StepKind, read_traces
from slipstream.lab.traces.words import sentences
from tests.lab import made_traces as made


def kind(reading: Reading, phase: str) -> StepKind:
    return next(each for each in reading.kinds if each.phase == phase)


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Reading:
    """Eight ranks, 61 layers, a verify step that is one graph replay; every fourth rank's attention is 30 us late."""
    job = made.Job.of(8, late_us=(0, 0, 0, 30.0) * 2)
    job.verify_steps(4)
    return read_traces(job.write_kineto(tmp_path_factory.mktemp("eight")))


def test_122_all_reduces_in_a_graph_replay(eight: Reading) -> None:
    verify = kind(eight, "verify")
    assert (verify.steps, verify.collectives, verify.graphs) == (4, {"all_reduce": 122.0}, 1)
    assert verify.graph_kernels == verify.kernels == 61 * 6
    (part,) = eight.cost.collectives()
    assert (part.phase, part.name, part.count) == ("verify", "all_reduce", 122)
    assert part.traffic is not None
    assert part.traffic.by == "NCCL Ring LL"
    assert part.traffic.wire_us == pytest.approx(122 * 100)
    # After attention six ranks wait 30 us for the two late ones; before the other all-reduce all are even.
    assert part.traffic.skew_us == pytest.approx(61 * 30 * 6 / 8)
    assert part.us == pytest.approx(part.traffic.wire_us + part.traffic.skew_us, rel=1e-6)
    assert part.traffic.overlapped_us == pytest.approx(0, abs=1e-3)
    assert eight.cost.ranks == 8


def test_the_medians_of_the_table_agree(eight: Reading) -> None:
    verify = kind(eight, "verify")
    assert verify.wire_us == pytest.approx(122 * 100)
    assert verify.skew_us == pytest.approx(61 * 30)  # of the median rank, which waits
    assert kind(eight, "accept").busy_us == pytest.approx(12)


def test_a_replay_hides_the_rows(tmp_path: Path) -> None:
    job = made.Job.of(2)
    job.verify_steps(3, grid=None)
    cost = read_traces(job.write_kineto(tmp_path)).cost
    assert cost.rows is None
    assert any("cannot be read off" in line and "graph replay" in line for line in cost.evidence)


def test_rows_from_the_grid_of_the_norm(tmp_path: Path) -> None:
    job = made.Job.of(2)
    job.verify_steps(3, grid=6)
    cost = read_traces(job.write_kineto(tmp_path)).cost
    assert cost.rows == 6
    assert any("Rows of a step: 6" in line for line in cost.evidence)


def test_the_wait_between_cycles(eight: Reading) -> None:
    """The host waits until 3 us after the argmax, thinks 500 us, launches for 50, and the GPU starts 2 us later."""
    cost = eight.cost
    assert cost.by_part()["host.host_sync"] == pytest.approx(3 + 500 + 50 + 1 + 1, abs=0.01)
    assert cost.attributed == pytest.approx(1, abs=1e-6)
    assert [(wait.call, wait.a_cycle) for wait in eight.waits] == [("cudaEventSynchronize", 1)]
    assert cost.cycles == 3  # the end of the last one is not known


def test_it_says_so(eight: Reading) -> None:
    text = " ".join(sentences(eight))
    assert "122 all-reduces a cycle take" in text
    assert "12.20 ms on the wire and 1.37 ms waiting for the slowest rank" in text


def test_json(eight: Reading) -> None:
    value = json.loads(json.dumps(eight.to_json()))
    assert value["schema"] == "slipstream.trace/1"
    assert CycleCost.from_json(value["cycle"]) == eight.cost
    assert list(value["costs"]) == ["verify"]


def test_eager_launches_leave_gaps(tmp_path: Path) -> None:
    """Kernel by kernel the host is slower than the GPU with its short norms: gaps that are the launches' own."""
    job = made.Job.of(1)
    job.verify_steps(4, launch="cudaLaunchKernel", mark="execute_context_0(0)_generation_1(4)", grid=4)
    reading = read_traces(job.write_kineto(tmp_path))
    assert reading.cost.rows == 4
    assert reading.launches == 4 * 61 + 1
    assert kind(reading, "verify").graphs == 0
    assert any("244 kernels launched one by one" in line for line in sentences(reading))


def test_overlapped_communication(tmp_path: Path) -> None:
    """An all-reduce of 100 us on its own stream, of which a GEMM hides 60."""
    rank = made.Rank(0, 2)
    for _ in range(4):
        begun = rank.host
        rank.kernel(made.NORM, 3.0, rank.call("cudaLaunchKernel", 5.0), gap=0)
        at = rank.gpu
        rank.kernel(made.NCCL, 100.0, rank.call("cudaLaunchKernel", 1.0), gap=0, stream=20)
        rank.gpu = at + 20
        rank.kernel(made.GEMM, 60.0, rank.call("cudaLaunchKernel", 1.0), gap=0)
        rank.mark("step[DECODE bs=1]", begun, rank.host)
        rank.gpu = at + 120
        rank.wait()
    (part,) = read_traces(made.Job([rank]).write_kineto(tmp_path)).cost.collectives()
    assert part.us == pytest.approx(40, abs=0.1)
    assert part.traffic is not None
    assert part.traffic.overlapped_us == pytest.approx(60, abs=0.1)
    assert part.traffic.wire_us is None


def test_without_annotations(tmp_path: Path) -> None:
    job = made.Job.of(2, layers=16)
    job.verify_steps(6, mark=None)
    reading = read_traces(job.write_kineto(tmp_path))
    (step,) = [each for each in reading.kinds if each.phase == "decode"]
    assert step.collectives == {"all_reduce": 32.0}
    assert any("No annotation names the phases" in line for line in reading.evidence)


def test_draft_and_verify_graphs_without_annotations(tmp_path: Path) -> None:
    """A small graph before the long one, and a kernel that only speculation runs: draft and verify."""
    job = made.Job.of(1, layers=16)
    (rank,) = job.ranks
    for _ in range(6):
        job.forward("cudaGraphLaunch", grid=1, layers=3)
        job.forward("cudaGraphLaunch", grid=5)
        rank.kernel(made.VERIFY_TREE, 4.0, rank.call("cudaLaunchKernel", 5.0))
        rank.wait()
        rank.host += 300
    reading = read_traces(job.write_kineto(tmp_path))
    assert [each.phase for each in reading.kinds if each.phase != "host"] == ["draft", "verify", "accept"]
    assert reading.cost.rows == 5
    assert reading.cost.phase_us("draft") < reading.cost.phase_us("verify") / 3


def test_a_drafter_that_no_annotation_names(tmp_path: Path) -> None:
    """It runs after sampling and before the next step, and attends: a draft, not sampling."""
    job = made.Job.of(1, layers=8)
    (rank,) = job.ranks
    for _ in range(5):
        begun = rank.host
        job.forward("cudaGraphLaunch", grid=4)
        rank.mark("execute_context_0(0)_generation_1(4)", begun, rank.host)
        rank.host += 1
        rank.kernel(made.ARGMAX, 12.0, rank.call("cudaLaunchKernel", 5.0))
        job.forward("cudaLaunchKernel", grid=1, layers=1)
        rank.wait()
    cost = read_traces(job.write_kineto(tmp_path)).cost
    assert cost.by_part()["accept.sampling"] == pytest.approx(12)
    assert cost.by_part()["draft.attention"] == pytest.approx(20)
    assert cost.by_part()["draft.gemm"] == pytest.approx(40)
    assert cost.attributed == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("marked", [True, False])
def test_nsys_node_mode(tmp_path: Path, eight: Reading, marked: bool) -> None:
    """The same job as an Nsight Systems export, rows in disorder, gives the same cost."""
    job = made.Job.of(8, late_us=(0, 0, 0, 30.0) * 2)
    job.verify_steps(6, mark="step[TARGET_VERIFY bs=1]" if marked else None)
    reading = read_traces([made.write_nsys(job.ranks, tmp_path / "report.sqlite")])
    assert reading.ranks == 8
    assert reading.device == "Made GPU"
    (part,) = reading.cost.collectives()
    (same,) = eight.cost.collectives()
    assert part.traffic is not None
    assert same.traffic is not None
    assert part.count == 122
    assert part.traffic.wire_us == pytest.approx(same.traffic.wire_us)
    assert part.traffic.skew_us == pytest.approx(same.traffic.skew_us)
    if marked:
        assert reading.cost.wall_us == pytest.approx(eight.cost.wall_us)


def test_nsys_graph_mode(tmp_path: Path) -> None:
    job = made.Job.of(1)
    job.verify_steps(5)
    reading = read_traces([made.write_nsys(job.ranks, tmp_path / "report.sqlite", graph_mode=True)])
    assert kind(reading, "verify").kernels == 1
    assert reading.cost.rows is None
    assert any("--cuda-graph-trace=node" in line for line in reading.evidence)


def test_ranks_whose_traces_begin_at_different_steps(tmp_path: Path) -> None:
    """One profiler started a step later: its first step is the others' second."""
    job = made.Job.of(2, late_us=(0, 30.0))
    job.verify_steps(5)
    late = job.ranks[1]
    second = sorted(event.start for event in late.events if event.kind == "mark")[1]
    late.events = [event for event in late.events if event.start >= second]
    (part,) = read_traces(job.write_kineto(tmp_path)).cost.collectives()
    assert part.traffic is not None
    assert part.traffic.wire_us == pytest.approx(122 * 100)
    assert part.traffic.skew_us == pytest.approx(61 * 30 / 2)
