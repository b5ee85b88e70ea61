"""NCCL's symmetric-memory kernels, torch's symmetric memory and NVLS."""

from __future__ import annotations

from slipstream.lab.case import Case
from slipstream.lab.optimisations.base import (
    Feasible,
    Optimisation,
    all_nvlink,
    cpu_only,
    not_nccl,
    one_rank,
)


def feasible(case: Case) -> Feasible:
    """Only with NVLink between all of them."""
    if (stop := one_rank(case) or cpu_only(case) or not_nccl(case)) is not None:
        return stop
    if not all_nvlink(case):
        return Feasible(
            "no",
            "NCCL (2.27 and later) makes these kernels unavailable unless every pair is joined by NVLink "
            "(sym_kernels.cc: isAllDirectNvlink), NVLS needs an NVSwitch, and torch's symmetric memory multicast",
        )
    return Feasible(
        "untested", "all GPUs are joined by NVLink; no curve of it is known here, so no gain is predicted"
    )


OPTIMISATION = Optimisation(
    name="symmetric_memory",
    title="Symmetric-memory all-reduce (NCCL windows, torch, NVLS)",
    effort="flag",
    gain="Small all-reduces on NVLink.",
    feasible=feasible,
    change=lambda case: case,
    how={
        "sglang": "--enable-symm-mem, or --enable-torch-symm-mem (bfloat16, SM90 and SM10x, 2, 4, 6 or 8 ranks)",
        "vllm": "VLLM_USE_NCCL_SYMM_MEM=1; torch's is on by default where it can be",
    },
    risks=(
        "NCCL_CUMEM_ENABLE=1 and NCCL_WIN_ENABLE=1 are needed; buffers must be registered by every rank.",
    ),
    measure="the all_reduce of a captured step in a trace.",
    sources=("NCCL 2.30.7 src/sym_kernels.cc",),
)
