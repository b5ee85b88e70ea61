"""The choices that several commands share."""

from __future__ import annotations

import os
from enum import StrEnum

DRAFT_HELP = "What guesses the next tokens: ngram, eagle3 (for SmolLM2), none, or a drafter's folder."

LEDGER_HELP = "The ledger's file; default: SLIPSTREAM_LEDGER, or ledger.sqlite among the user's data."
TP_HELP = "Split the model over this many ranks (tensor parallelism); they are started here, or by torchrun."
ALL_REDUCE_HELP = "How the ranks exchange: auto, or a backend's name, as slipstream allreduce lists them."


def draft_or_none(name: str) -> str | None:
    """As the engine takes it."""
    return None if name == "none" else name


def is_silent() -> bool:
    """Whether torchrun has started another process on this machine that says what is to be said."""
    return os.environ.get("LOCAL_RANK", "0") != "0"


class Dtype(StrEnum):
    """The number format of the computation."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Weights(StrEnum):
    """The number format of the weights."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    INT4 = "int4"
