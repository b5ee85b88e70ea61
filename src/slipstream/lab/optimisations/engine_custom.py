"""The engines' own custom all-reduce."""

from __future__ import annotations

from slipstream.lab.case import Case
from slipstream.lab.optimisations.base import (
    Feasible,
    Optimisation,
    all_nvlink,
    cpu_only,
    no_peer,
    not_nccl,
    one_rank,
)


def feasible(case: Case) -> Feasible:
    """It switches itself off on PCIe with more than two GPUs."""
    if (stop := one_rank(case) or cpu_only(case) or not_nccl(case) or no_peer(case)) is not None:
        return stop
    if all_nvlink(case):
        return Feasible("yes", "NVLink between all: it is on by default")
    if case.fast.tp > 2:
        return Feasible(
            "no",
            "SGLang (up to 0.5.23) and vLLM (up to 0.33) switch it off for 'more than two PCIe-only GPUs', at "
            "start and "
            "again at every call; its kernels launch nothing without NVLink at 4 and 8 ranks. That is a choice, not a "
            "limit of the hardware: see pcie_flashinfer and pcie_one_shot",
        )
    return Feasible("yes", "two GPUs on PCIe may use it where they reach each other's memory")


def change(case: Case) -> Case:
    """Its curve, where it was measured."""
    if not case.machine.all_reduce_curves("vllm-custom", case.fast.tp):
        return case
    return case.both(backend="vllm-custom", setting=None, curve=None)


OPTIMISATION = Optimisation(
    name="engine_custom",
    title="The engines' custom all-reduce",
    effort="flag",
    gain="In a graph about 5 us instead of NCCL's 17 to 20 on 8 H200.",
    feasible=feasible,
    change=change,
    how={
        "sglang": "on by default; --disable-custom-all-reduce must not be set",
        "vllm": "on by default; --disable-custom-all-reduce must not be set",
    },
    risks=("expandable_segments breaks its IPC handles.",),
    measure="the kernels' names in a trace: cross_device_reduce instead of ncclDevKernel.",
    sources=("vllm#56128", "aiconfigurator custom_allreduce_perf", "flashinfer#4393"),
)
