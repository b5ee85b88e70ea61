"""Every optimisation answers for every case; the ranking; what cannot work says why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.lab.cases import make_case, reference_case
from slipstream.lab.optimisations import end_state, every, gain_of, rank
from slipstream.lab.optimisations.base import EFFORTS
from slipstream.machine.machine import Machine
from tests.lab.boxes import cases, cpu, with_peers

CASES = cases()
WANTED = {
    "nccl_protocol",
    "nccl_algorithm",
    "nccl_channels",
    "nccl_transport",
    "pcie_one_shot",
    "pcie_two_shot",
    "hierarchical",
    "host_memory",
    "fused_norm",
    "pcie_flashinfer",
    "mscclpp",
    "quantised_all_reduce",
    "graph_verify",
    "graph_cycle",
    "host_syncs",
    "replicated_attention",
    "tp_pp",
    "draft_length",
    "draft_tree",
    "adaptive",
    "draft_vocabulary",
    "acceptance",
    "batch_switch_off",
    "shared_memory",
    "weight_format",
    "symmetric_memory",
    "engine_custom",
}


def test_the_whole_list_is_there() -> None:
    assert set(every()) >= WANTED


@pytest.mark.parametrize("name", sorted(every()))
def test_every_item_explains_itself(name: str) -> None:
    item = every()[name]
    assert item.name == name
    assert item.effort in EFFORTS
    assert item.how
    assert item.risks
    assert len(item.gain) > 20
    assert len(item.measure) > 10


@pytest.mark.parametrize("case_name", sorted(CASES))
def test_every_item_answers_for_every_case(case_name: str) -> None:
    case = CASES[case_name]
    for item in every().values():
        found = item.feasible(case)
        assert found.answer in ("yes", "no", "untested")
        assert len(found.because) > 10
        assert not found.because.endswith(".")
        if found.possible:
            after = item.change(case)
            for cost in (after.plain_cost, after.fast_cost):
                assert cost.total_us == pytest.approx(sum(part.us for part in cost.parts))
                assert all(part.us >= 0 for part in cost.parts)
            assert after.plain_speed > 0
            assert after.fast_speed > 0


@pytest.mark.parametrize("case_name", sorted(CASES))
def test_the_ranking_is_sorted_and_complete(case_name: str) -> None:
    case = CASES[case_name]
    found = rank(case)
    assert {one.item.name for one in found} == set(every())
    possible = [one for one in found if one.after is not None]
    assert found[: len(possible)] == possible
    assert [one.score for one in possible] == sorted((one.score for one in possible), reverse=True)
    end = end_state(case, found, tuple(EFFORTS))
    assert gain_of(case, end.case) >= 1 - 1e-9


def test_gloo_on_a_cpu_asks_for_shared_memory_first() -> None:
    case = make_case(cpu(), "smollm2-135m", tp=2, rows=8, draft="ngram", threads=1)
    first = rank(case)[0]
    assert first.item.name == "shared_memory"
    assert first.after is not None
    assert first.after.fast_cost.total_us < 0.5 * case.fast_cost.total_us
    assert first.after.plain_cost.total_us < 0.5 * case.plain_cost.total_us


def test_the_reference_case_asks_for_the_wire_and_the_graph() -> None:
    found = rank(reference_case())
    assert [one.item.name for one in found[:2]] == ["pcie_flashinfer", "graph_verify"]
    by_name = {one.item.name: one for one in found}
    assert by_name["pcie_flashinfer"].feasible.answer == "untested"
    graph = by_name["graph_verify"].after
    assert graph is not None
    assert graph.fast_cost.phase_us("verify") < 0.6 * reference_case().fast_cost.phase_us("verify")
    assert graph.plain_cost.total_us == pytest.approx(reference_case().plain_cost.total_us)


def test_what_cannot_work_says_why() -> None:
    by_name = {one.item.name: one.feasible for one in rank(reference_case())}
    tree = by_name["nccl_algorithm"]
    assert tree.answer == "no"
    for reason in ("all-gather", "2.24", "chain", "capture"):
        assert reason in tree.because
    assert "NVLink" in by_name["symmetric_memory"].because
    assert by_name["symmetric_memory"].answer == "no"
    assert "more than two PCIe-only GPUs" in by_name["engine_custom"].because
    assert by_name["quantised_all_reduce"].answer == "no"
    assert by_name["replicated_attention"].answer == "no"


def test_peers_turn_untested_into_yes_or_no() -> None:
    machine = Machine.load("8x-rtx-pro-6000-pcie5")
    item = every()["pcie_flashinfer"]

    def answer(box: Machine) -> str:
        return item.feasible(make_case(box, "kimi-k2.5", tp=8)).answer

    refused = replace(machine, links=tuple(replace(link, peer_a_to_b=False) for link in machine.links))
    assert (answer(machine), answer(with_peers(machine)), answer(refused)) == ("untested", "yes", "no")


def test_a_cheaper_all_reduce_speeds_both() -> None:
    before = reference_case()
    after = every()["pcie_flashinfer"].change(before)
    assert after.plain_speed > 1.5 * before.plain_speed
    assert after.fast_speed > before.fast_speed
    # The wait for late launches is not the wire's: it stays until the step is captured.
    both = every()["graph_verify"].change(after)
    assert both.fast_cost.total_us < 0.6 * after.fast_cost.total_us


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(2, 16),
    acceptance=st.floats(0.0, 0.95),
    gloo_us=st.floats(5, 2000),
    slower=st.floats(1.0, 3.0),
)
def test_a_dearer_wire_never_looks_better(
    rows: int, acceptance: float, gloo_us: float, slower: float
) -> None:
    cheap, dear = (
        make_case(cpu(us), "smollm2-135m", tp=2, rows=rows, acceptance=acceptance, threads=1)
        for us in (gloo_us, gloo_us * slower)
    )
    assert dear.plain_speed <= cheap.plain_speed * (1 + 1e-9)
    assert dear.fast_speed <= cheap.fast_speed * (1 + 1e-9)
    item = every()["shared_memory"]
    assert item.change(dear).fast_speed == pytest.approx(item.change(cheap).fast_speed)
