"""A two-shot all-reduce over peer memory: reduce-scatter, then all-gather, two barriers."""

from __future__ import annotations

from slipstream.lab.case import Case
from slipstream.lab.optimisations import pcie_one_shot
from slipstream.lab.optimisations.base import Optimisation, pcie_bytes_per_s
from slipstream.machine.curve import AllReduceCurve, Segment


def change(case: Case) -> Case:
    """Two barriers, and 2 (n - 1) / n of the bytes instead of n - 1 times all of them."""
    ranks = case.fast.tp
    rate = pcie_bytes_per_s(case) / (2 * (ranks - 1) / ranks)
    barriers_us = 2 * pcie_one_shot.BARRIER_US
    curve = AllReduceCurve(
        "twoshot",
        ranks,
        True,
        "a model: two barriers of 10 us, then 2 (n - 1) / n of the bytes at 80 % of the link",
        2**24,
        (Segment("two-shot", 1024, barriers_us, rate),),
    )
    return case.both(backend="twoshot", setting=None, curve=curve)


OPTIMISATION = Optimisation(
    name="pcie_two_shot",
    title="Two-shot all-reduce over PCIe peer memory",
    effort="patch",
    gain="All-reduces above the size where one-shot drowns in bytes: many rows, wide trees, large batches.",
    feasible=pcie_one_shot.feasible,
    change=change,
    how={
        "slipstream": "--all-reduce twoshot",
        "sglang": "not in 0.5.23 for PCIe (its custom all-reduce v1 has one, for NVLink)",
        "vllm": "vllm#50941 (open), Triton kernels: VLLM_HIER_ALL_REDUCE='0,1,2,3;4,5,6,7', from 24,576 elements on",
    },
    risks=pcie_one_shot.OPTIMISATION.risks,
    measure=pcie_one_shot.OPTIMISATION.measure,
    sources=("vllm#50941", "the cost models of one-shot and two-shot all-reduces"),
    here={"all_reduce": "twoshot"},
    needs_first=pcie_one_shot.OPTIMISATION.needs_first,
)
