"""Fewer or more drafted tokens in a chain."""

from __future__ import annotations

from slipstream.lab.case import Case
from slipstream.lab.optimisations.base import Feasible, Optimisation

LENGTHS = range(1, 9)


def feasible(case: Case) -> Feasible:
    """Where another length promises more."""
    if not case.fast.drafted:
        return Feasible("no", "nothing is drafted")
    best = change(case)
    if best.fast.drafted == case.fast.drafted:
        return Feasible(
            "no", f"{case.fast.drafted} is the best length at an acceptance of {case.acceptance:.2f}"
        )
    return Feasible(
        "yes",
        f"a chain of {best.fast.drafted} is predicted to be better at an acceptance of {case.acceptance:.2f}",
    )


def change(case: Case) -> Case:
    """The length with the most tokens a second."""
    lengths = [case.speculative(drafted=length, depth=length) for length in LENGTHS]
    return max([case, *lengths], key=lambda each: each.fast_speed)


OPTIMISATION = Optimisation(
    name="draft_length",
    title="Another number of drafted tokens",
    effort="flag",
    gain="The rows that are almost never accepted: with experts every row reads more of them.",
    feasible=feasible,
    change=change,
    how={
        "slipstream": "draft_tokens=N; by itself with the controller",
        "sglang": "--speculative-num-steps N --speculative-eagle-topk 1 --speculative-num-draft-tokens N+1",
        "vllm": "--speculative-config '{..., \"num_speculative_tokens\": N}'",
    },
    risks=("The best length moves with the acceptance, so with the prompts: measure on yours.",),
    measure="tokens a second by length on the same prompts; acceptance by position.",
    here={"draft_tokens": "best"},
)
