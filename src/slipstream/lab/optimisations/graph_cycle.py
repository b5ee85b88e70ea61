"""One graph for the whole cycle: draft, verify, accept, commit."""

from __future__ import annotations

from slipstream.lab.case import Case
from slipstream.lab.optimisations.base import Feasible, Optimisation, cpu_only


def feasible(case: Case) -> Feasible:
    """On GPUs, where the drafter runs on them too."""
    if (stop := cpu_only(case)) is not None:
        return stop
    if case.fast.draft == "ngram":
        return Feasible(
            "untested", "ours looks up n-grams on the GPU; the engines do it on the host between the steps"
        )
    return Feasible("untested", "no engine on record replays the whole cycle; each has a graph a step")


OPTIMISATION = Optimisation(
    name="graph_cycle",
    title="One CUDA graph for the whole cycle",
    effort="project",
    gain="The host's work and waits between the steps, and the drafter's own launches.",
    feasible=feasible,
    change=lambda case: case.both(captured=True, draft_captured=True, host_us=0.0),
    how={
        "slipstream": "by itself on a GPU, one replay a cycle",
        "sglang": "not there: the drafter has a graph of its own (EAGLEDraftCudaGraphRunner), as have verify and "
        "draft-extend, with the overlap scheduler between them",
        "vllm": "not there",
    },
    risks=(
        "Sizes must be fixed: the controller chooses among captured shapes only.",
        "Conditional nodes with NCCL inside fail to instantiate (nccl#1986).",
    ),
    measure="slipstream trace: host syncs and launch gaps between phases.",
    sources=("sglang#29960: milliseconds of cudaGraphLaunch for TARGET_VERIFY on GLM-5.1", "nccl#1986"),
)
