"""A drafter that can propose fewer tokens."""

from __future__ import annotations

from slipstream.lab.case import Case
from slipstream.lab.optimisations.base import Feasible, Optimisation

SMALL = 32_000


def feasible(case: Case) -> Feasible:
    """Where the drafter's head is large."""
    if case.fast.draft != "eagle3":
        return Feasible("no", "only a drafter with a head of its own has a vocabulary")
    if min(case.fast.draft_vocab, case.shape.vocab_size) <= SMALL:
        return Feasible(
            "no", f"the drafter proposes {min(case.fast.draft_vocab, case.shape.vocab_size):,} tokens already"
        )
    return Feasible("yes", f"the head has {case.fast.draft_vocab:,} rows; {SMALL:,} cover almost all text")


OPTIMISATION = Optimisation(
    name="draft_vocabulary",
    title="A smaller draft vocabulary",
    effort="setting",
    gain="The drafter's head, read once a drafted token.",
    feasible=feasible,
    change=lambda case: case.speculative(draft_vocab=SMALL),
    how={
        "slipstream": "slipstream drafter train --draft-vocab 32000; heads with a d2t table load as they are",
        "sglang": "--speculative-token-map FILE (FR-Spec; ignored for EAGLE-3, whose checkpoint decides)",
        "vllm": "by the checkpoint (d2t)",
    },
    risks=(
        "A table of offsets read as absolute ids collapses acceptance (Automodel#2447): slipstream drafter check.",
    ),
    measure="draft milliseconds a cycle, and acceptance.",
    sources=("FR-Spec", "Automodel#2447"),
)
