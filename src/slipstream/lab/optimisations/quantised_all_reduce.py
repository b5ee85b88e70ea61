"""An all-reduce whose payload is 8 bits wide."""

from __future__ import annotations

from slipstream.lab.case import Case
from slipstream.lab.optimisations.base import Feasible, Optimisation, one_rank
from slipstream.lab.predict import VALUE_BYTES

SMALLEST = 128 * 1024
"""Bytes below which nobody saw a gain (vllm#18473)."""


def feasible(case: Case) -> Feasible:
    """Only where bytes, not latency, are the cost."""
    if (stop := one_rank(case)) is not None:
        return stop
    size = case.fast.rows * case.shape.hidden_size * VALUE_BYTES[case.fast.dtype]
    if size < SMALLEST:
        return Feasible(
            "no",
            f"an all-reduce of {size / 1024:.1f} KiB is bound by latency; below 128 KiB no gain was ever seen, and the "
            "packing costs two more kernels",
        )
    return Feasible("untested", f"{size / 1024:.0f} KiB an all-reduce: half the bytes may pay")


OPTIMISATION = Optimisation(
    name="quantised_all_reduce",
    title="Quantised all-reduce (int8 or fp8 on the wire)",
    effort="patch",
    gain="Half the bytes: prefill and large batches.",
    feasible=feasible,
    change=lambda case: case.both(wire_scale=0.53 * 2 / VALUE_BYTES[case.fast.dtype]),
    how={
        "slipstream": "--all-reduce quantised; never chosen by itself",
        "sglang": "quick all-reduce, ROCm only",
        "vllm": "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=INT8, ROCm only",
    },
    risks=(
        "Lossy: logits move, texts change, acceptance may fall. Judge it by the model's quality, not by speed alone.",
    ),
    measure="tokens a second at the batch in question, acceptance, and an evaluation of the model.",
    sources=("vllm#18473", "InferenceX#2333: no gain at low concurrency, 4 to 5 % at 64 to 128 requests"),
    changes_text=True,
)
