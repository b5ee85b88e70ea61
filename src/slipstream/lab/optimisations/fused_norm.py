"""All-reduce, residual and RMSNorm in one kernel."""

from __future__ import annotations

from slipstream.lab.case import Case
from slipstream.lab.optimisations import pcie_one_shot
from slipstream.lab.optimisations.base import Feasible, Optimisation, all_nvlink, first, gpus, one_rank


def feasible(case: Case) -> Feasible:
    """In the engines only with NVLink and SM90 or SM100; ours with its own backends."""
    if (stop := one_rank(case)) is not None:
        return stop
    if not case.machine.has_gpus:
        return Feasible("no", "the shared-memory all-reduce of CPU ranks is fused already: see shared_memory")
    if all_nvlink(case):
        return Feasible("yes", "SM90 and SM100 with NVLink: both engines have it (FlashInfer)")
    peers = pcie_one_shot.feasible(case)
    if not peers.possible:
        return peers
    return first(
        Feasible(
            "untested",
            "SGLang 0.5.23 and vLLM 0.33 leave SM120 out of FlashInfer's fusion (enabling it, sglang#32330, was closed "
            f"after a slow-down at 4 ranks); b12x's and ours fuse it on PCIe: {peers.because}",
        ),
        gpus(case),
    )


def change(case: Case) -> Case:
    """On PCIe with the one-shot kernel that it is a part of."""
    return (case if all_nvlink(case) else pcie_one_shot.change(case)).both(fused_norm=True)


OPTIMISATION = Optimisation(
    name="fused_norm",
    title="Fused all-reduce + residual + RMSNorm",
    effort="patch",
    gain="Two kernels a layer and their trips to memory, about 3.5 us a pair: 0.4 ms over 122, and less than "
    "that where "
    "there are more than 32 rows. What it saves on PCIe comes from the one-shot all-reduce in it.",
    feasible=feasible,
    change=change,
    how={
        "slipstream": "with the backends shm, oneshot and twoshot by itself (all_reduce_add_rms_norm)",
        "sglang": "--enable-flashinfer-allreduce-fusion, on SM90 and SM10x; for SM120 b12x through sglang#32479 "
        "(open), "
        "up to 36 rows",
        "vllm": '--compilation-config \'{"pass_config": {"fuse_allreduce_rms": true}}\' on SM90 and SM10x',
    },
    risks=(
        "From 32 rows on it was slower than the two kernels (vllm#54787, AMD).",
        "The sum is rounded at another place than in two kernels: texts may differ at exact ties.",
    ),
    measure="slipstream trace: norm and all_reduce of the verify step before and after; acceptance.",
    sources=("vllm#54787: 22.6 to 19.3 us at hidden 7168, 4 ranks", "sglang#32330", "sglang#32479"),
    needs_first="whether the GPUs reach each other's memory both ways",
)
