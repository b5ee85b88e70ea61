"""Tensor parallelism within a NUMA node, pipeline stages across."""

from __future__ import annotations

from slipstream.lab.case import Case
from slipstream.lab.optimisations.base import Feasible, Optimisation, cpu_only, one_rank


def feasible(case: Case) -> Feasible:
    """Where the ranks lie in equal islands and an all-reduce within one was measured."""
    if (stop := one_rank(case) or cpu_only(case)) is not None:
        return stop
    stages = _stages(case)
    if stages < 2:
        return Feasible("no", "the ranks do not lie in two equal NUMA nodes or more")
    ranks = case.fast.tp // stages
    if ranks > 1 and not case.machine.all_reduce_curves(case.fast.backend, ranks):
        return Feasible(
            "untested", f"an all-reduce among {ranks} ranks was not measured; no gain is predicted"
        )
    now, then = case.best_speed, change(case).best_speed
    if then <= now:
        return Feasible(
            "no",
            f"a pipeline of {stages} stages reads each weight with {ranks} GPUs instead of {case.fast.tp}: "
            f"{then:.0f} tokens a second at best instead of {now:.0f}",
        )
    return Feasible(
        "untested", "no published figure for one request; speculation over pipeline stages is young"
    )


def change(case: Case) -> Case:
    """A token passes through all stages one after the other."""
    stages = _stages(case)
    ranks = case.fast.tp // stages
    if ranks > 1 and not case.machine.all_reduce_curves(case.fast.backend, ranks):
        return case
    return case.both(tp=ranks, stages=stages, setting=None, curve=None)


def _stages(case: Case) -> int:
    """NUMA nodes that the ranks fill equally; 1 where they do not."""
    sizes = [sum(gpu < case.fast.tp for gpu in island) for island in case.machine.islands]
    sizes = [size for size in sizes if size]
    return len(sizes) if len(set(sizes)) == 1 and case.fast.tp > 1 and case.fast.stages == 1 else 1


OPTIMISATION = Optimisation(
    name="tp_pp",
    title="Tensor parallelism in a NUMA node, pipeline across",
    effort="setting",
    gain="All-reduces among fewer ranks that never cross the sockets, against weights read by fewer GPUs at a time.",
    feasible=feasible,
    change=change,
    how={
        "sglang": "--tp-size 4 --pp-size 2; check that the version takes speculation with pipeline stages",
        "vllm": "--tensor-parallel-size 4 --pipeline-parallel-size 2; older versions refuse speculation with it",
    },
    risks=("With one request only one stage works at a time.", "KV memory is split by layers, not by heads."),
    measure="tokens a second of one request, plain and speculative.",
    sources=(
        "vLLM 0.7 to 0.9 documentation: speculative decoding is not compatible with pipeline parallelism",
    ),
)
