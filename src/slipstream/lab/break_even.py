"""When speculation pays: a cycle must yield at least as many tokens as it costs plain cycles.

With a chain of N drafted tokens of which each is accepted with chance `a` once all before it were, a cycle yields
1 + a + a^2 + ... + a^N tokens: what is accepted, and the one token that the target adds itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class BreakEven:
    """What a chain of `drafted` tokens must achieve to be as fast as plain decoding. Times in microseconds a cycle."""

    drafted: int
    cycle_us: float
    plain_us: float

    @property
    def tokens(self) -> float:
        """Tokens a cycle needed; 1 or less means that speculation costs nothing."""
        return self.cycle_us / self.plain_us

    @property
    def acceptance(self) -> float | None:
        """The chance of acceptance needed at each position; None when not even 1 is enough."""
        return acceptance_needed(self.tokens, self.drafted)

    def to_json(self) -> dict[str, float | int | None]:
        """Plain values, with the two results."""
        return {
            "drafted": self.drafted,
            "cycle_us": self.cycle_us,
            "plain_us": self.plain_us,
            "tokens": self.tokens,
            "acceptance": self.acceptance,
        }


def chain_tokens(acceptance: float, drafted: int) -> float:
    """Expected tokens a cycle of a chain of `drafted` tokens, each accepted with chance `acceptance` in its turn."""
    return sum(acceptance**position for position in range(drafted + 1))


def acceptance_needed(tokens: float, drafted: int) -> float | None:
    """The chance of acceptance at which a chain of `drafted` tokens yields `tokens` a cycle; None if none does.

    0 where one token a cycle is enough.
    """
    if tokens <= 1:
        return 0.0
    if tokens > drafted + 1:
        return None
    low, high = 0.0, 1.0  # the sum of powers grows with the chance, so halving finds its root
    for _ in range(60):
        middle = (low + high) / 2
        if chain_tokens(middle, drafted) < tokens:
            low = middle
        else:
            high = middle
    return high


def break_even_by_rows(
    step_us: Mapping[int, float], *, speculative_overhead_us: float = 0.0, plain_overhead_us: float = 0.0
) -> list[BreakEven]:
    """One `BreakEven` for every measured number of rows above 1, shortest chain first.

    `step_us`: microseconds of a verify step by rows (1 must be there). The overheads (microseconds) are
    what a cycle costs beside what was measured there: drafting, say, and the host.
    """
    plain_us = step_us[1] + plain_overhead_us
    return [
        BreakEven(drafted=rows - 1, cycle_us=step_us[rows] + speculative_overhead_us, plain_us=plain_us)
        for rows in sorted(step_us)
        if rows > 1
    ]
