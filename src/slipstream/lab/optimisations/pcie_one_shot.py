"""A one-shot all-reduce over peer memory: every rank sends everything to every other, one barrier."""

from __future__ import annotations

from slipstream.lab.case import Case
from slipstream.lab.optimisations.base import (
    Feasible,
    Optimisation,
    all_nvlink,
    cpu_only,
    first,
    no_peer,
    one_rank,
    pcie_bytes_per_s,
    peer_unknown,
)
from slipstream.machine.curve import AllReduceCurve, Segment

BARRIER_US = 10.0
"""What is left of the 11.8 us that a one-shot kernel took for 14 KiB on 8 GPUs when its bytes are taken off."""


def feasible(case: Case) -> Feasible:
    """Needs peer access; up to 8 ranks."""
    if (stop := one_rank(case) or cpu_only(case)) is not None:
        return stop
    if case.fast.tp > 8:
        return Feasible("no", f"every rank sends to every other: with {case.fast.tp} it is no longer cheap")
    if all_nvlink(case):
        return Feasible("no", "it is what the engines do on NVLink already (custom all-reduce)")
    return first(
        no_peer(case),
        peer_unknown(case),
        Feasible("untested", "the GPUs reach each other's memory; ours was not measured on PCIe boxes yet"),
    )


def curve(case: Case) -> AllReduceCurve:
    """A barrier, then the bytes of all others at the link's rate."""
    rate = pcie_bytes_per_s(case) / (case.fast.tp - 1)
    return AllReduceCurve(
        "oneshot",
        case.fast.tp,
        True,
        "a model: a barrier of 10 us, then the bytes for all others at 80 % of the link",
        2**20,
        (Segment("one-shot", 1024, BARRIER_US, rate),),
    )


def change(case: Case) -> Case:
    """Its measured curve where there is one, else the model."""
    if case.machine.all_reduce_curves("oneshot", case.fast.tp):
        return case.both(backend="oneshot", setting=None, curve=None)
    return case.both(backend="oneshot", setting=None, curve=curve(case))


OPTIMISATION = Optimisation(
    name="pcie_one_shot",
    title="One-shot all-reduce over PCIe peer memory",
    effort="patch",
    gain="Every small all-reduce: one barrier instead of 2 (n - 1) hops.",
    feasible=feasible,
    change=change,
    how={
        "slipstream": "--all-reduce oneshot",
        "sglang": "b12x's kernels through sglang#32479 (open: a patch), or FlashInfer's, see pcie_flashinfer",
        "vllm": "local-inference-lab/vllm, VLLM_ENABLE_PCIE_ALLREDUCE=1 (a fork); or FlashInfer's",
    },
    risks=(
        "Push or pull must be measured on the box: pull kernels never completed on four V100s behind a switch, pushes "
        "collapse to 2.6 GB/s on others (b12x#139).",
        "Without a barrier at the end the next call overwrites what a slow rank still reads: acceptance fell to "
        "0.059 in "
        "one report, with no other sign.",
        "Across sockets it loses against NCCL from about 48 KB on.",
        "Consumer cards need the driver's forced peer access, and are 15 times slower without it.",
    ),
    measure="slipstream allreduce on the box, eager and captured, 8 KiB to 1 MiB, push and pull; then acceptance.",
    sources=(
        "local-inference-lab/rtx6kpro, communicators: 14,336 bytes 11.8 us against NCCL's 56.2, 459 KB 147 against 93",
        "sglang#32479",
        "b12x#139",
        "haohervchb/sglang-V100#2",
    ),
    here={"all_reduce": "oneshot"},
    needs_first="whether the GPUs reach each other's memory both ways",
)
