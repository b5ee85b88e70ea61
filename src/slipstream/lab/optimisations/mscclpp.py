"""MSCCL++'s all-reduce."""

from __future__ import annotations

from itertools import pairwise

from slipstream.lab.case import Case
from slipstream.lab.optimisations.base import (
    Feasible,
    Optimisation,
    all_nvlink,
    cpu_only,
    first,
    no_peer,
    not_nccl,
    one_rank,
    peer_unknown,
)
from slipstream.machine.curve import AllReduceCurve, Segment

MEASURED_US = ((2048, 5.9), (16_384, 6.4), (65_536, 8.2), (262_144, 10.6), (1_048_576, 14.0))
"""8 H200 with NVLink, in a graph (sglang#22734)."""


def feasible(case: Case) -> Feasible:
    """Its tuned tables are for NVLink."""
    if (stop := one_rank(case) or cpu_only(case) or not_nccl(case)) is not None:
        return stop
    if all_nvlink(case):
        return Feasible("yes", "8 ranks with NVLink were measured (sglang#22734)")
    return first(
        no_peer(case),
        peer_unknown(case),
        Feasible(
            "untested",
            "its CudaIpc transport works over PCIe (mscclpp#397), its algorithms are tuned for NVLink",
        ),
    )


def change(case: Case) -> Case:
    """On NVLink as measured; on PCIe nobody did, so nothing is predicted."""
    if not all_nvlink(case):
        return case
    sizes = [size for size, _ in MEASURED_US]
    pieces = []
    for (size, us), (after, next_us) in pairwise(MEASURED_US):
        rate = (after - size) / (next_us - us) * 1e6
        pieces.append(Segment("mscclpp", size, us - size / rate * 1e6, rate))
    curve = AllReduceCurve("mscclpp", case.fast.tp, True, "sglang#22734, 8 H200", sizes[-1], tuple(pieces))
    return case.both(backend="mscclpp", setting=None, curve=curve)


OPTIMISATION = Optimisation(
    name="mscclpp",
    title="MSCCL++ all-reduce",
    effort="patch",
    gain="In a graph 1.9 to 2.9 times as fast as NCCL up to 256 KiB on 8 H200; over models 1.2 times (1.38 at best). "
    "Neither says anything about PCIe.",
    feasible=feasible,
    change=change,
    how={
        "slipstream": "--all-reduce mscclpp, where the package is installed",
        "sglang": "--enable-mscclpp (4 to 64 ranks; MSCCL++ must be installed). It takes precedence over the "
        "custom and "
        "the PCIe all-reduce, and is off in piecewise graphs",
        "vllm": "not built in; MSCCL++'s NCCL interface can be preloaded (LD_PRELOAD=libmscclpp_nccl.so)",
    },
    risks=("Eager it fell off a cliff from 512 KiB on (505 us): check that the verify step is captured.",),
    measure="benchmark/kernels/all_reduce/benchmark_mscclpp.py of SGLang on the box, graph columns.",
    sources=("sglang#22734", "arXiv 2504.09014", "mscclpp#397"),
    needs_first="whether the GPUs reach each other's memory both ways",
)
