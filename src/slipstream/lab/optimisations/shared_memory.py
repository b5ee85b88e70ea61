"""Ranks on one CPU machine that sum through shared memory instead of sockets."""

from __future__ import annotations

from slipstream.lab.case import Case
from slipstream.lab.optimisations.base import YES, Feasible, Optimisation, gpus, one_rank
from slipstream.machine.curve import AllReduceCurve, Segment

LATENCY_US, BYTES_PER_S = 12.0, 4e9
"""Assumed until slipstream machine --calibrate measures it: two flags between cores, then the bytes from a neighbour's
cache."""


def feasible(case: Case) -> Feasible:
    """Ranks of one host."""
    if (stop := one_rank(case) or gpus(case)) is not None:
        return stop
    return Feasible("no", "it is in use") if case.fast.backend == "shm" else YES


def change(case: Case) -> Case:
    """As calibrated; else a cautious guess."""
    if case.machine.all_reduce_curves("shm", case.fast.tp):
        return case.both(backend="shm", setting=None, curve=None, fused_norm=True)
    curve = AllReduceCurve(
        "shm",
        case.fast.tp,
        False,
        "assumed: 12 us and 4 GB/s; slipstream machine --calibrate measures it",
        2**20,
        (Segment("one-shot", 1, LATENCY_US, BYTES_PER_S),),
    )
    return case.both(backend="shm", setting=None, curve=curve, fused_norm=True)


OPTIMISATION = Optimisation(
    name="shared_memory",
    title="Shared-memory all-reduce for CPU ranks",
    effort="flag",
    gain="Gloo's round trips through sockets and threads: about half a millisecond each, whatever the size.",
    feasible=feasible,
    change=change,
    how={
        "slipstream": "--all-reduce shm",
        "sglang": "by itself on CPU (its shm_allreduce kernels of sgl-kernel)",
        "vllm": "by itself on x86 CPUs (VLLM_CPU_OMP_THREADS_BIND must give each rank its own cores)",
    },
    risks=(
        "Ranks spin while they wait: with more ranks than cores they take the core from the one they wait for.",
    ),
    measure="slipstream allreduce --tp 2, and milliseconds a cycle.",
    here={"all_reduce": "shm"},
)
