"""A tree of candidates instead of a chain."""

from __future__ import annotations

from slipstream.lab.case import Case
from slipstream.lab.optimisations.base import Feasible, Optimisation

NODES = (7, 11, 15, 23, 31)
DEPTHS = (2, 3, 4, 6)


def feasible(case: Case) -> Feasible:
    """Where a drafter can rank several candidates."""
    if case.fast.draft != "eagle3":
        return Feasible(
            "no", "an n-gram drafter has one candidate a place" if case.fast.drafted else "nothing is drafted"
        )
    if change(case) is case:
        return Feasible("no", "no tree is predicted to beat the chain: its rows cost more than they bring")
    return Feasible(
        "untested", "how often second candidates are right is a guess (half as often as the first)"
    )


def change(case: Case) -> Case:
    """The best tree by nodes and depth."""
    trees = [
        case.speculative(drafted=nodes, depth=depth) for nodes in NODES for depth in DEPTHS if depth < nodes
    ]
    return max([case, *trees], key=lambda each: each.fast_speed)


OPTIMISATION = Optimisation(
    name="draft_tree",
    title="A tree instead of a chain",
    effort="flag",
    gain="A second candidate where the first is wrong: rows are cheap where memory or the wire is the cost.",
    feasible=feasible,
    change=change,
    how={
        "slipstream": "by itself with an EAGLE-3 drafter",
        "sglang": "--speculative-num-steps 4 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16",
        "vllm": "not there: chains only (0.33)",
    },
    risks=(
        "With experts each row reads others: 16 rows reach about three times as many as 4.",
        "SGLang's adaptive length works with topk 1 only.",
    ),
    measure="tokens a cycle and milliseconds a cycle, both.",
    sources=(
        "docs/log.md of slipstream, 2026-12-03",
        "ik_llama.cpp#1630: every further row of an MoE model costs",
    ),
)
