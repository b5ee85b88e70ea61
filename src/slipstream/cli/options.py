"""The choices that several commands share."""

from __future__ import annotations

from enum import StrEnum


class Draft(StrEnum):
    """What guesses the next tokens."""

    NGRAM = "ngram"
    EAGLE3 = "eagle3"
    NONE = "none"

    @property
    def name_or_none(self) -> str | None:
        """As the engine takes it."""
        return None if self is Draft.NONE else self.value


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
