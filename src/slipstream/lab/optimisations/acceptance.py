"""A better drafter: how much better it must be."""

from __future__ import annotations

from dataclasses import replace

from slipstream.lab.case import Case
from slipstream.lab.optimisations.base import Feasible, Optimisation

GOOD = 0.75
"""What good EAGLE-3 heads reach at the first position on chat; Kimi-K2.5's golden head accepts 3.24 tokens of 4."""


def feasible(case: Case) -> Feasible:
    """Where there is room."""
    if case.fast.draft != "eagle3":
        return Feasible("no", "n-grams cannot be trained" if case.fast.drafted else "nothing is drafted")
    needed = case.acceptance_needed
    if needed is None:
        return Feasible(
            "no", "no acceptance is enough at this price of a cycle: make the cycle cheaper first"
        )
    if case.acceptance >= GOOD:
        return Feasible("no", f"{case.acceptance:.2f} is as good as drafters get")
    return Feasible(
        "untested",
        f"break-even needs {needed:.2f} a position and there are {case.acceptance:.2f}; predicted is what "
        f"{GOOD} would give",
    )


OPTIMISATION = Optimisation(
    name="acceptance",
    title="A better drafter (fine-tuning, more and nearer data)",
    effort="project",
    gain="More tokens for the same cycle.",
    feasible=feasible,
    change=lambda case: replace(case, acceptance=max(case.acceptance, GOOD)),
    how={
        "slipstream": "slipstream drafter check (is it loaded rightly?), drafter data, drafter train, drafter eval",
        "sglang": "SpecForge; then --speculative-draft-model-path",
        "vllm": "speculators; then model in --speculative-config",
    },
    risks=(
        "Low acceptance is often a defect, not a weak head: wrong layers tapped (vllm#50170), tables read "
        "wrongly, a chat "
        "template that differs. Check before training.",
        "A drafter trained on short texts fails on long ones (2.3 tokens at 2k, 1.08 at 20k: speculators#684).",
    ),
    measure="slipstream drafter eval: acceptance by position on held-out text of the served kind.",
    sources=(
        "InferenceX#2286: 3.24 tokens a cycle with 4 drafted, Kimi-K2.5",
        "vllm#50170",
        "speculators#684",
    ),
)
