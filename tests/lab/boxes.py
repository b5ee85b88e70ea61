"""Machines with invented, round figures, and cases on them."""

from __future__ import annotations

from dataclasses import replace

from slipstream.lab.case import Case
from slipstream.lab.cases import make_case, reference_case
from slipstream.machine.curve import AllReduceCurve, Segment
from slipstream.machine.machine import Ceilings, Launch, Machine, MatrixRate, MemoryRead, Source

DESCRIBED = ("8x-rtx-pro-6000-pcie5", "8x-l40s-pcie4", "8x-h200-nvlink", "2x-cpu-gloo")


def cpu(gloo_us: float = 500.0) -> Machine:
    """Two cores that read 20 and 40 GB/s, and Gloo between them."""
    gloo = AllReduceCurve("gloo", 2, False, "made", 2**20, (Segment("gloo", 1, gloo_us),))
    ceilings = Ceilings(
        memory_read=(MemoryRead(20e9, "made", 1), MemoryRead(40e9, "made", 2)),
        matrix=tuple(
            MatrixRate(dtype, rate * threads, "made", threads)
            for dtype, rate in (("bfloat16", 200e9), ("float32", 80e9))
            for threads in (1, 2)
        ),
        launch=(Launch(False, 5.0, "made"),),
        all_reduce=(gloo,),
    )
    return Machine("made", sources={"made": Source("measured", "made")}, ceilings=ceilings)


def with_peers(machine: Machine) -> Machine:
    """The same with every GPU in reach of every other."""
    links = tuple(replace(link, peer_a_to_b=True, peer_b_to_a=True) for link in machine.links)
    return replace(machine, links=links)


def cases() -> dict[str, Case]:
    """The reference case, and models of every family on every described machine."""
    found = {"reference": reference_case(), "made": make_case(cpu(), "smollm2-135m", tp=2)}
    for name in DESCRIBED:
        machine = Machine.load(name)
        ranks = len(machine.devices) or 2
        for model in ("smollm2-135m", "llama-3.1-8b", "kimi-k2.5"):
            tp = ranks if model == "kimi-k2.5" or not machine.has_gpus else 1
            found[f"{model} on {name}"] = make_case(machine, model, tp=tp, acceptance=0.6)
    found["n-gram, batch 8"] = make_case(
        Machine.load("8x-h200-nvlink"), "qwen3-8b", rows=8, batch=8, draft="ngram"
    )
    found["plain"] = make_case(Machine.load("8x-h200-nvlink"), "qwen3-8b", rows=1)
    found["eager"] = make_case(Machine.load("8x-l40s-pcie4"), "llama-3.1-70b", tp=8, eager_verify=True)
    found["peers"] = make_case(with_peers(Machine.load("8x-rtx-pro-6000-pcie5")), "deepseek-v3", tp=8)
    return found
