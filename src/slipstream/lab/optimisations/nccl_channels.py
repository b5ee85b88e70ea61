"""NCCL_MIN_CTAS and friends: how many thread blocks a collective uses."""

from __future__ import annotations

from slipstream.lab.case import Case
from slipstream.lab.optimisations.base import Feasible, Optimisation, cpu_only, first, not_nccl, one_rank


def feasible(case: Case) -> Feasible:
    """Untested: it touches bandwidth, and decode sizes are bound by latency."""
    return first(
        one_rank(case),
        cpu_only(case),
        not_nccl(case),
        Feasible(
            "untested",
            "NCCL takes fewer channels by itself while a message is small, and may ignore the minimum there; no "
            "gain is "
            "predicted at the sizes of a verify step",
        ),
    )


OPTIMISATION = Optimisation(
    name="nccl_channels",
    title="NCCL channels (CTAs) and threads",
    effort="flag",
    gain="Bandwidth of large messages, prefill above all; fewer CTAs also leave more of the GPU to overlapped kernels.",
    feasible=feasible,
    change=lambda case: case,
    how={
        "sglang": "NCCL_MIN_CTAS=8, NCCL_MAX_CTAS=16, NCCL_NTHREADS=512 (64 to 512) in the environment; before "
        "NCCL 2.17 "
        "NCCL_MIN_NCHANNELS and NCCL_MAX_NCHANNELS",
        "vllm": "the same variables",
    },
    risks=(
        "More CTAs take multiprocessors from the model's kernels.",
        "NCCL_DEBUG=INFO saying '2 channels, type SYS' means a bad topology graph, not too few channels: see "
        "nccl_transport.",
    ),
    measure="all_reduce_perf -b 8K -e 4M -f 2 over the values; keep one only if the server's tokens a second rise.",
    sources=("NCCL documentation, environment variables", "NCCL 2.30.7 src/graph/tuning.cc"),
)
