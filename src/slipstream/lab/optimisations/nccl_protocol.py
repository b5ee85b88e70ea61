"""NCCL_PROTO: which of NCCL's protocols carries which size."""

from __future__ import annotations

from slipstream.lab.case import Case
from slipstream.lab.optimisations.base import Feasible, Optimisation, cpu_only, first, not_nccl, one_rank
from slipstream.lab.predict import VALUE_BYTES
from slipstream.machine.curve import AllReduceCurve, Segment


def feasible(case: Case) -> Feasible:
    """Untested wherever NCCL is in use: only a measurement tells."""
    curve = _curve(case)
    known = {segment.protocol for segment in curve.segments} if curve else set()
    told = (
        f"the machine's curve knows {', '.join(sorted(known))}"
        if known - {"unknown", "measured"}
        else "the machine's curve does not say which protocol carried a size, so no gain can be predicted"
    )
    return first(
        one_rank(case), cpu_only(case), not_nccl(case), Feasible("untested", f"{told}; sweep it on the box")
    )


def change(case: Case) -> Case:
    """Each size takes the cheapest of the curve's pieces, each piece drawn on over all sizes."""
    curve = _curve(case)
    if curve is None or len({segment.protocol for segment in curve.segments}) < 2:
        return case
    size = case.fast.rows * case.shape.hidden_size * VALUE_BYTES[case.fast.dtype]
    best: Segment = min(curve.segments, key=lambda segment: segment.us(size))
    if best.us(size) >= curve.us(size):
        return case
    moved = AllReduceCurve(
        "nccl",
        curve.ranks,
        curve.captured,
        f"{best.protocol} at all sizes, drawn on from the machine's curve",
        curve.to_bytes,
        (Segment(best.protocol, 1, best.latency_us, best.bytes_per_s),),
    )
    return case.both(curve=moved)


def _curve(case: Case) -> AllReduceCurve | None:
    found = case.machine.all_reduce_curves("nccl", case.fast.tp, case.fast.setting)
    return next(iter(found), None)


OPTIMISATION = Optimisation(
    name="nccl_protocol",
    title="NCCL protocol by size (LL, LL128, Simple)",
    effort="flag",
    gain="NCCL keeps LL for sizes at which Simple is faster: 512 KiB took 156 us and 1 MiB 131 on 8 RTX PRO 6000; at "
    "decode sizes (14 to 112 KiB) LL is the right choice already, so expect nothing there.",
    feasible=feasible,
    change=change,
    how={
        "sglang": "NCCL_PROTO='allreduce:LL,Simple' in the server's environment; the form with the function's name "
        "needs NCCL 2.24 or later and leaves all other collectives alone",
        "vllm": "NCCL_PROTO='allreduce:LL,Simple' likewise",
    },
    risks=(
        "LL128 is only safe where NCCL enables it by itself (NVLink); NVIDIA's documentation says that forcing it can "
        "corrupt data. Never name it on PCIe.",
        "LL alone costs throughput at large batches: 998 against 1,128 tokens a second in one report.",
    ),
    measure="nccl-tests all_reduce_perf -b 8K -e 4M -f 2 with each protocol, in a CUDA graph (-G 1), then the server's "
    "tokens a second; acceptance must not move.",
    sources=(
        "NCCL 2.30.7 src/graph/tuning.cc",
        "aiconfigurator nccl_perf, rtx_pro_6000_server, NCCL 2.29.2",
        "local-inference-lab/rtx6kpro, optimization/nccl-tuning.md",
    ),
)
