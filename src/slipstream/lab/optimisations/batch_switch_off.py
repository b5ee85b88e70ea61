"""No speculation above a batch size."""

from __future__ import annotations

from dataclasses import replace

from slipstream.lab.case import Case
from slipstream.lab.optimisations.base import Feasible, Optimisation

BATCHES = (1, 2, 4, 8, 16, 32, 64)


def switch_off_batch(case: Case) -> int | None:
    """The smallest batch at which speculation is predicted to lose; None where it wins at all of them."""
    for batch in BATCHES:
        tried = case.both(batch=batch)
        if tried.fast_speed < tried.plain_speed:
            return batch
    return None


def feasible(case: Case) -> Feasible:
    """Where speculation loses at the batch at hand, or would at a larger one."""
    if not case.fast.drafted:
        return Feasible("no", "nothing is drafted")
    batch = switch_off_batch(case)
    if batch is None:
        return Feasible("no", f"speculation is predicted to win up to {BATCHES[-1]} requests at once")
    return Feasible(
        "yes", f"speculation is predicted to lose from {batch} request{'s' * (batch > 1)} at once on"
    )


def change(case: Case) -> Case:
    """Plain at and above that batch."""
    batch = switch_off_batch(case)
    return replace(case, adaptive=True) if batch is not None and case.fast.batch >= batch else case


OPTIMISATION = Optimisation(
    name="batch_switch_off",
    title="Speculation off above a batch size",
    effort="flag",
    gain="Where many requests fill the device, drafted rows cost like real ones.",
    feasible=feasible,
    change=change,
    how={
        "slipstream": "by itself (the controller knows the cost by batch)",
        "sglang": "--speculative-adaptive with steps 0 in the tier of that batch (--speculative-adaptive-config)",
        "vllm": "num_speculative_tokens_per_batch_size in --speculative-config, 0 from that batch on",
    },
    risks=("The batch at which it turns moves with acceptance and context.",),
    measure="tokens a second at 1, 2, 4, 8 ... requests, both ways.",
    sources=("vLLM documentation, dynamic speculative decoding",),
)
