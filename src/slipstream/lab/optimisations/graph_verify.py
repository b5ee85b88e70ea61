"""The verify step as one CUDA graph."""

from __future__ import annotations

from slipstream.lab.case import Case
from slipstream.lab.optimisations.base import YES, Feasible, Optimisation, cpu_only


def feasible(case: Case) -> Feasible:
    """Every collective can be captured."""
    if (stop := cpu_only(case)) is not None:
        return stop
    if case.fast.captured:
        return Feasible("no", "the verify step is captured already")
    return YES


OPTIMISATION = Optimisation(
    name="graph_verify",
    title="CUDA graph for the verify step",
    effort="flag",
    gain="Launches one by one, and the wait for ranks whose launches come late: an eager all-reduce holds that wait.",
    feasible=feasible,
    change=lambda case: case.both(captured=True),
    how={
        "slipstream": "by itself on a GPU",
        "sglang": "update: 0.5.23 captures TARGET_VERIFY whenever speculation is on (DecodeCudaGraphRunner); older "
        "versions ran it as extend, eagerly. It still falls back to eager when the batch exceeds "
        "--cuda-graph-max-bs or "
        "the draft's width is not the captured one: the log says so",
        "vllm": "by itself (V1) for the sizes in cudagraph_capture_sizes; --enforce-eager must not be set, and "
        "1 + N rows "
        "must be one of the sizes",
    },
    risks=(
        "All ranks must capture and replay alike; an error of a captured collective shows only at the next one "
        "(pie#499).",
        "NCCL connects peers at first use, perhaps inside the capture: warm up every size before, or set "
        "NCCL_RUNTIME_CONNECT=0.",
        "Needs NCCL 2.9.6 or later (older hang, pytorch#64440); 2.28.9 deadlocks in replays across nodes (fixed in "
        "2.30.4). Patched peer access on GeForce cards hung in replays while eager ran.",
        "expandable_segments breaks the custom all-reduce's IPC handles.",
    ),
    measure="slipstream trace on the server's profile: the verify phase must show a graph launch, and launch "
    "gaps below a "
    "microsecond a kernel.",
    sources=(
        "SGLang 0.5.23, model_executor/runner/decode_cuda_graph_runner.py",
        "NCCL documentation, CUDA graphs",
    ),
)
