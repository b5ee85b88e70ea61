"""As many threads as a rank has cores."""

from __future__ import annotations

from slipstream.lab.case import Case
from slipstream.lab.optimisations.base import YES, Feasible, Optimisation, gpus


def feasible(case: Case) -> Feasible:
    """On CPUs, where cores are idle."""
    if (stop := gpus(case)) is not None:
        return stop
    cores, used = _threads(case)
    if cores <= used:
        return Feasible("no", f"all {cores} cores are in use")
    return YES


def change(case: Case) -> Case:
    """All cores, shared among the ranks."""
    return case.both(threads=_threads(case)[0])


def _threads(case: Case) -> tuple[int, int]:
    """Threads that a rank could have, and has."""
    cores = case.machine.cpu.cores or case.machine.cpu.threads or 1
    return max(cores // case.fast.tp, 1), case.fast.threads or 1


OPTIMISATION = Optimisation(
    name="threads",
    title="All cores",
    effort="flag",
    gain="One core rarely saturates the memory.",
    feasible=feasible,
    change=change,
    how={
        "slipstream": "--threads N, or leave it out",
        "sglang": "SGLANG_CPU_OMP_THREADS_BIND='0-15|16-31', a range a rank",
        "vllm": "VLLM_CPU_OMP_THREADS_BIND='0-15|16-31', a range a rank",
    },
    risks=("More threads than free cores wait for each other: a busy neighbour makes it far slower.",),
    measure="tokens a second with each number of threads.",
    here={"threads": None},
)
