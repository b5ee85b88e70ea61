"""What is asked of the engine, and what comes back."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from slipstream.errors import RequestError

FinishReason = Literal["stop", "length"]
"""`stop`: an end-of-text token or a stop string; `length`: max_new_tokens was reached."""


COLDEST = 1e-4
"""The lowest temperature that is sampled with."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. The defaults are greedy decoding of up to 256 tokens."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    """0 is greedy, and so is anything below `COLDEST`: dividing by less would overflow."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    seed: int = 0
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it."""
    ignore_eos: bool = False
    """Goes on past the end-of-text token, as benchmarks of a fixed length need."""

    def __post_init__(self) -> None:
        stop: object = self.stop
        if isinstance(stop, str):  # it would be taken letter by letter
            object.__setattr__(self, "stop", (stop,))
        for name in ("max_new_tokens", "top_k", "seed"):
            if not isinstance(getattr(self, name), int):
                raise RequestError(f"{name} is {getattr(self, name)!r}; it must be a whole number")
        checks = (
            (self.max_new_tokens >= 1, f"max_new_tokens is {self.max_new_tokens}; it must be at least 1"),
            (
                self.temperature >= 0 and math.isfinite(self.temperature),
                f"temperature is {self.temperature}; it must be 0 (greedy) or more",
            ),
            (0 < self.top_p <= 1, f"top_p is {self.top_p}; it must be above 0 and at most 1"),
            (
                0 <= self.top_k < 2**63,
                f"top_k is {self.top_k}; it must be 0 (off) or more, and fit into 64 bits",
            ),
            (-(2**63) <= self.seed < 2**63, f"seed is {self.seed}; it must fit into 64 bits"),
            (all(self.stop), "a stop string is empty"),
        )
        for holds, message in checks:
            if not holds:
                raise RequestError(message)

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the likeliest."""
        return self.temperature < COLDEST


@dataclass
class Stats:
    """What a request cost. Times in seconds of wall clock; in a batch the cycles are shared with its neighbours."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    """Of all its cycles, each as long as it took; other requests' prefills and whoever reads the text not included."""
    cycles: int = 0
    cycles_by_drafted: dict[int, int] = field(default_factory=dict)
    """How many cycles verified this many drafted tokens; 0 is a plain cycle."""
    tried: list[int] = field(default_factory=list)
    """By position in the draft (0 is the first): how often it was verified after all before it were accepted."""
    accepted: list[int] = field(default_factory=list)
    """By position: how often it was accepted."""

    @property
    def tokens_per_s(self) -> float:
        """New tokens a second of decoding, the prefill not counted."""
        return self.new_tokens / self.decode_s if self.decode_s else 0.0

    @property
    def tokens_per_cycle(self) -> float:
        """Committed tokens a cycle, the bonus token included; 1 is plain decoding."""
        return self.new_tokens / self.cycles if self.cycles else 0.0


@dataclass(frozen=True)
class Completion:
    """One finished request."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed text. The last one carries the finish reason and the stats."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stats: Stats | None = None
