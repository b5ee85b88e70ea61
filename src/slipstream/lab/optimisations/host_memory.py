"""A one-shot all-reduce through pinned host memory: for GPUs that cannot reach each other."""

from __future__ import annotations

from slipstream.lab.case import Case
from slipstream.lab.optimisations.base import (
    Feasible,
    Optimisation,
    all_nvlink,
    cpu_only,
    first,
    one_rank,
    pcie_bytes_per_s,
)
from slipstream.machine.curve import AllReduceCurve, Segment

BARRIER_US = 15.0
"""Assumed: two trips over PCIe to host memory and back, flags polled through the same link."""


def feasible(case: Case) -> Feasible:
    """Works on any box, and was measured on none."""
    if (stop := one_rank(case) or cpu_only(case)) is not None:
        return stop
    if all_nvlink(case):
        return Feasible("no", "with NVLink a detour through the host only costs")
    return first(Feasible("untested", "it needs no peer access; no box of several GPUs has measured it"))


def change(case: Case) -> Case:
    """Write once, read the others', all over one's own link."""
    curve = AllReduceCurve(
        "hostmem",
        case.fast.tp,
        True,
        "a model: 15 us of flags (assumed), then the bytes of all ranks over one's own link at 80 %",
        2**20,
        (Segment("one-shot", 1024, BARRIER_US, pcie_bytes_per_s(case) / case.fast.tp),),
    )
    return case.both(backend="hostmem", setting=None, curve=curve)


OPTIMISATION = Optimisation(
    name="host_memory",
    title="One-shot all-reduce through host memory",
    effort="patch",
    gain="Small all-reduces where peer access is refused: one round trip to host memory instead of NCCL's staged ring.",
    feasible=feasible,
    change=change,
    how={"slipstream": "--all-reduce hostmem"},
    risks=(
        "All ranks of a socket share its memory and its PCIe root: it does not scale with size.",
        "Flags in host memory need system-wide fences; a missing one shows as a fall of acceptance.",
    ),
    measure="slipstream allreduce --backend hostmem against nccl, 8 to 128 KiB.",
    here={"all_reduce": "hostmem"},
)
