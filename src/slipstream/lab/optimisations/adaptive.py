"""The draft's size follows the acceptance and the costs, down to none."""

from __future__ import annotations

from dataclasses import replace

from slipstream.lab.case import Case
from slipstream.lab.optimisations import draft_length
from slipstream.lab.optimisations.base import YES, Feasible, Optimisation


def feasible(case: Case) -> Feasible:
    """Wherever something is drafted."""
    if not case.fast.drafted:
        return Feasible("no", "nothing is drafted")
    return Feasible("no", "the draft's size is adaptive already") if case.adaptive else YES


OPTIMISATION = Optimisation(
    name="adaptive",
    title="Adaptive speculation, off where it does not pay",
    effort="flag",
    gain="Never slower than plain decoding: where speculation loses, it stops.",
    feasible=feasible,
    change=lambda case: replace(draft_length.change(case), adaptive=True),
    how={
        "slipstream": "by itself (the controller, unless draft_tokens is given)",
        "sglang": "--speculative-adaptive (EAGLE with topk 1; it knows acceptance but not latency, so set the steps in "
        "--speculative-adaptive-config to what breakeven says)",
        "vllm": "num_speculative_tokens_per_batch_size in --speculative-config; methods with confidence (DSpark) weigh "
        "measured costs",
    },
    risks=("An engine that looks at acceptance alone keeps speculating where a verify step is too dear.",),
    measure="tokens a second against plain decoding, by kind of prompt.",
    sources=("SGLang 0.5.23, arg_groups/fields/spec.py",),
    here={"draft_tokens": None},
)
