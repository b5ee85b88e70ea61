"""How NCCL's bytes travel: peer to peer or staged in host memory, and along which graph."""

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
from slipstream.lab.predict import VALUE_BYTES
from slipstream.machine.curve import AllReduceCurve


def feasible(case: Case) -> Feasible:
    """Untested on PCIe: a box is healthy or not, and only its own measurement says which."""
    if (stop := one_rank(case) or cpu_only(case) or not_nccl(case)) is not None:
        return stop
    if all_nvlink(case):
        return Feasible("no", "all GPUs are joined by NVLink, which NCCL takes by itself")
    better = _healthiest(case)
    return Feasible(
        "untested",
        f"the same hardware was measured at {_us(case, better):.0f} us an all-reduce ({better.setting}), this case at "
        f"{_now(case):.0f}"
        if better is not None and _us(case, better) < _now(case)
        else "no better measurement of such a box is known, so this one's transport seems healthy",
    )


def change(case: Case) -> Case:
    """As on the healthiest box of this hardware that was measured."""
    better = _healthiest(case)
    if better is None or _us(case, better) >= _now(case):
        return case
    return case.both(setting=better.setting)


def _healthiest(case: Case) -> AllReduceCurve | None:
    curves = case.machine.all_reduce_curves("nccl", case.fast.tp)
    return min(curves, key=lambda curve: _us(case, curve), default=None)


def _us(case: Case, curve: AllReduceCurve) -> float:
    return curve.us(case.fast.rows * case.shape.hidden_size * VALUE_BYTES[case.fast.dtype])


def _now(case: Case) -> float:
    """Of the verify step as it runs; captured for the plain step."""
    size = case.fast.rows * case.shape.hidden_size * VALUE_BYTES[case.fast.dtype]
    return case.machine.all_reduce_us(size, case.fast.tp, "nccl", case.fast.captured, case.fast.setting).value


OPTIMISATION = Optimisation(
    name="nccl_transport",
    title="NCCL transport: peer-to-peer level, host staging, ACS and IOMMU, topology graph",
    effort="setting",
    gain="NCCL's peer-to-peer reaches only as far as PXB by default (and SYS on AMD with 2 GPUs), so GPUs under "
    "different host bridges stage every message in host memory; a wrong topology graph runs 2 channels through SYS.",
    feasible=feasible,
    change=change,
    how={
        "sglang": "1. NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH,P2P,SHM: read whether channels say 'via P2P' "
        "or 'via "
        "SHM', and the number and type of channels. 2. nvidia-smi topo -p2p r and -p2p w: all OK? 3. lspci -vvv | grep "
        "ACSCtl: SrcValid+ means that ACS redirects peer traffic; disable ACS in the BIOS or with setpci, and run with "
        "iommu=pt or the IOMMU off. 4. NCCL_P2P_LEVEL=PHB, then SYS. 5. on AMD Turin: NCCL_GRAPH_FILE with the link "
        "speed that the box has (NCCL assumes 16 GB/s between AMD sockets; nccl#2113, #2127 are open)",
        "vllm": "the same; vLLM's workers inherit the environment",
    },
    risks=(
        "Peer traffic that ACS sends through the IOMMU hangs the first all-reduce (nccl#2079): try it on an idle box, "
        "with a timeout.",
        "Behind PCIe switches many writers collapse: 37 GB/s became 2.7 in one report, reads were not touched.",
        "Disabling ACS removes isolation between virtual machines that share the box.",
    ),
    measure="all_reduce_perf -b 8K -e 1M -f 2 -G 1 before and after each step; healthy on 8 RTX PRO 6000 is 26 "
    "to 35 us "
    "up to 64 KiB.",
    sources=(
        "NCCL 2.30.7 src/graph/paths.cc",
        "aiconfigurator nccl_perf",
        "nccl#2079, nccl#2113, nccl#2127",
        "local-inference-lab/rtx6kpro: 32 KiB from 48 to 26 us with a graph file, decoding from 40 to 65 tokens "
        "a second",
    ),
    needs_first="the micro-benchmark: whether the wire or the wait for slow ranks makes the 205 us",
)
