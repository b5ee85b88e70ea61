"""Every rank computes all of attention: half of the all-reduces go."""

from __future__ import annotations

from slipstream.lab.case import Case
from slipstream.lab.optimisations.base import Feasible, Optimisation, one_rank


def feasible(case: Case) -> Feasible:
    """Always possible in principle; whether it pays is the prediction's to say."""
    if (stop := one_rank(case)) is not None:
        return stop
    now, then = case.best_speed, OPTIMISATION.change(case).best_speed
    if then <= now:
        return Feasible(
            "no",
            f"reading all of attention's weights on each of {case.fast.tp} ranks costs more than half of the "
            "all-reduces: "
            f"{then:.0f} tokens a second at best instead of {now:.0f}",
        )
    return Feasible(
        "untested", "all-reduces are dear enough here; no engine replicates attention for one request"
    )


OPTIMISATION = Optimisation(
    name="replicated_attention",
    title="Replicated attention (half of the all-reduces)",
    effort="project",
    gain="One all-reduce a layer, against reading attention's weights as often as there are ranks. The verdict "
    "turns with "
    "the price of an all-reduce: fix the transport first.",
    feasible=feasible,
    change=lambda case: case.both(replicated_attention=True),
    how={
        "sglang": "no flag: --enable-dp-attention gives every rank its own requests, which does nothing for one "
        "request",
        "vllm": "no flag",
    },
    risks=("Memory: each rank holds all of attention, and the KV of all heads.",),
    measure="by the prediction first; then a trace.",
    sources=("sglang#8539: data-parallel attention, +11.7 % at 1,024 requests",),
)
