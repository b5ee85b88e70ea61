"""NCCL_ALGO=Tree: the obvious idea that cannot work."""

from __future__ import annotations

from slipstream.lab.case import Case
from slipstream.lab.optimisations.base import Feasible, Optimisation, cpu_only, first, not_nccl, one_rank


def feasible(case: Case) -> Feasible:
    """No, on any single node."""
    return first(
        one_rank(case),
        cpu_only(case),
        not_nccl(case),
        Feasible(
            "no",
            "on one node NCCL's Tree is a chain with as many hops as the Ring (2 (n - 1) of them, NCCL's own tuning "
            "table), so it gains nothing. The bare value NCCL_ALGO=Tree moreover fails: Tree has no all-gather, and "
            "since NCCL 2.24 there is no silent fall back to Ring, so the all-gather of the logits ends with 'invalid "
            "usage' during warm-up or graph capture. It is not the capture that forbids it: nothing on record says "
            "that a captured Tree all-reduce fails",
        ),
    )


OPTIMISATION = Optimisation(
    name="nccl_algorithm",
    title="NCCL algorithm: Tree instead of Ring",
    effort="flag",
    gain="None on one node; over several nodes a tree has fewer hops.",
    feasible=feasible,
    change=lambda case: case,
    how={
        "sglang": "NCCL_ALGO='allreduce:tree' (NCCL 2.24 to 2.30); 2.31 rejects it beside an NCCL_PROTO without a "
        "function's name, there 'ring,tree;allreduce:tree' works. SGLang sets NCCL_ALGO=allreduce:tree by itself "
        "under --enable-deterministic-inference",
        "vllm": "NCCL_ALGO='ring,tree;allreduce:tree' (the form that vllm#58179 uses)",
    },
    risks=("Every rank must have the same value, or the ranks hang.",),
    measure="all_reduce_perf of nccl-tests with NCCL_ALGO=Ring and =Tree, eager and with -G 1, at the sizes of a "
    "verify step; slipstream allreduce does the same where NCCL is at hand.",
    sources=("NCCL 2.30.7 src/graph/tuning.cc", "NCCL documentation, NCCL_ALGO", "vllm#58179"),
)
