"""Weights of 8 bits."""

from __future__ import annotations

from dataclasses import fields

from slipstream.lab.case import Case
from slipstream.lab.optimisations.base import YES, Feasible, Optimisation
from slipstream.target.shape import WeightBytes

EIGHT_BITS = 1.0625
"""Bytes of a weight in blocks of 32 with a scale of 16 bits."""


def feasible(case: Case) -> Feasible:
    """Where some weights are wider."""
    wide = [
        field.name for field in fields(WeightBytes) if getattr(case.fast.weights, field.name) > EIGHT_BITS
    ]
    if not wide:
        return Feasible("no", "all weights have 8 bits or fewer already")
    return YES


def change(case: Case) -> Case:
    """The wide ones in 8 bits."""
    stored = case.fast.weights
    narrow = WeightBytes(*(min(getattr(stored, field.name), EIGHT_BITS) for field in fields(WeightBytes)))
    return case.both(weights=narrow)


OPTIMISATION = Optimisation(
    name="weight_format",
    title="Weights in 8 bits where they are wider",
    effort="setting",
    gain="Bytes read a pass; plain decoding gains as much, so break-even hardly moves.",
    feasible=feasible,
    change=change,
    how={
        "slipstream": "--weights int8",
        "sglang": "--quantization fp8 (whole model), or a checkpoint whose attention is quantised too",
        "vllm": "--quantization fp8",
    },
    risks=("The model becomes another one: texts change. A drafter's acceptance may fall a little.",),
    measure="tokens a second, both ways; an evaluation of the model; acceptance.",
    here={"weights": "int8"},
    changes_text=True,
)
