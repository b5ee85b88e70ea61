"""An all-reduce in islands: within each NUMA node first, then one exchange between them."""

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
    peer_unknown,
)
from slipstream.machine.curve import AllReduceCurve, through

MEASURED = ((14_336, 18.4), (28_672, 21.9), (57_344, 29.9), (114_688, 46.2))
"""Bytes and microseconds of b12x's hierarchical all-reduce: 16 RTX PRO 6000, in a graph, slowest rank's median."""


def feasible(case: Case) -> Feasible:
    """Needs two equal islands at least."""
    if (stop := one_rank(case) or cpu_only(case)) is not None:
        return stop
    if all_nvlink(case):
        return Feasible("no", "NVLink has no islands")
    islands = [[gpu for gpu in island if gpu < case.fast.tp] for island in case.machine.islands]
    sizes = [len(island) for island in islands if island]
    if len(sizes) < 2 or len(set(sizes)) != 1:
        return Feasible("no", f"it needs equal islands; the ranks lie in NUMA nodes as {sizes}")
    return first(
        no_peer(case),
        peer_unknown(case),
        Feasible(
            "untested",
            "two islands whose GPUs reach each other's memory; ours was not measured on such a box",
        ),
    )


def change(case: Case) -> Case:
    """What 16 GPUs took: 8 have fewer hops, so at most that."""
    curve = AllReduceCurve(
        "hierarchical",
        case.fast.tp,
        True,
        "b12x, 16 RTX PRO 6000 in a graph: 8 take at most that",
        MEASURED[-1][0],
        through(MEASURED),
    )
    return case.both(backend="hierarchical", setting=None, curve=curve)


OPTIMISATION = Optimisation(
    name="hierarchical",
    title="All-reduce in islands along the NUMA nodes (4+4)",
    effort="patch",
    gain="The link between sockets carries each sum once instead of once a rank.",
    feasible=feasible,
    change=change,
    how={
        "slipstream": "--all-reduce hierarchical, where it is built in; the islands come from slipstream machine",
        "sglang": "in FlashInfer's PCIe all-reduce, see pcie_flashinfer",
        "vllm": "VLLM_HIER_ALL_REDUCE='0,1,2,3;4,5,6,7' with vllm#50941 (open: a patch)",
    },
    risks=(
        "Wrong islands (GPU numbers that do not match the sockets) make it slower than NCCL: check with "
        "nvidia-smi topo -m.",
    ),
    measure="slipstream allreduce with both partitions; the time at 14 to 112 KiB.",
    sources=(
        "b12x, validation of 16 GPUs in graph replay",
        "vllm#50941: NCCL took 292 us a call on 8 A800 in two islands",
    ),
    needs_first="whether the GPUs reach each other's memory both ways",
)
