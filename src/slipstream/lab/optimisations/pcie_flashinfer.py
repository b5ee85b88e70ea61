"""FlashInfer's all-reduce over CUDA IPC: made for PCIe boxes, off by default in both engines."""

from __future__ import annotations

from slipstream.lab.case import Case
from slipstream.lab.optimisations.base import (
    Feasible,
    Optimisation,
    all_nvlink,
    cpu_only,
    first,
    no_peer,
    one_rank,
    peer_unknown,
)


def feasible(case: Case) -> Feasible:
    """Needs 2, 4 or 8 ranks that reach each other's memory, and 16 bits."""
    if (stop := one_rank(case) or cpu_only(case)) is not None:
        return stop
    if all_nvlink(case):
        return Feasible(
            "no", "it is for boxes without NVLink; with it the engines' own all-reduce is as fast"
        )
    if case.fast.tp not in (2, 4, 8):
        return Feasible("no", f"it knows 2, 4 and 8 ranks, not {case.fast.tp}")
    if case.fast.dtype != "bfloat16":
        return Feasible("no", f"it takes bfloat16, this runs in {case.fast.dtype}")
    measured = Feasible("yes", "the GPUs reach each other's memory, and it was measured on such a box")
    if not case.machine.all_reduce_curves("flashinfer", case.fast.tp):
        measured = Feasible("untested", "nobody measured it on this hardware yet; no gain is predicted")
    return first(no_peer(case), peer_unknown(case), measured)


def change(case: Case) -> Case:
    """Its measured curve, for both."""
    if not case.machine.all_reduce_curves("flashinfer", case.fast.tp):
        return case
    return case.both(backend="flashinfer", setting=None, curve=None)


OPTIMISATION = Optimisation(
    name="pcie_flashinfer",
    title="FlashInfer's PCIe all-reduce (one-shot over CUDA IPC, 4+4 islands)",
    effort="flag",
    gain="Every all-reduce: NCCL's 205 us at 12 KiB (eager) become 5.3, says SGLang's source. That is an upper "
    "bound: end "
    "to end the same source has 21.1 ms a token become 13.6.",
    feasible=feasible,
    change=change,
    how={
        "slipstream": "--all-reduce flashinfer, where the package is installed",
        "sglang": "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE=1 (SGLang 0.5.23; sglang#34528); SGLANG_PCIE_IPC_MAX_NUMEL bounds "
        "its workspace, larger messages stay with NCCL. The log must not say that it fell back",
        "vllm": "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC=1 (vLLM after August 2026, vllm#53576; 0.33 has it); off under "
        "VLLM_BATCH_INVARIANT",
    },
    risks=(
        "Its kernels spin without a timeout: ranks that disagree about a size hang for ever, or read partial "
        "sums. Watch "
        "acceptance: it is the first thing to move.",
        "A workspace sized for prefill cost 66 % in time to first token.",
        "It sums in another order than NCCL: texts may differ at exact ties.",
    ),
    measure="slipstream trace on a captured verify step before and after: time of all_reduce by call; then tokens a "
    "second and acceptance on the same prompts.",
    sources=(
        "SGLang 0.5.23, distributed/device_communicators/pcie_ipc_ar.py",
        "sglang#34528",
        "vllm#53576",
        "flashinfer#4393",
    ),
    needs_first="whether the GPUs reach each other's memory both ways",
)
