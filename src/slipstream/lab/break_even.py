"""When speculation pays: a cycle must yield at least as many tokens as it costs plain cycles.

With a chain of N drafted tokens of which each is accepted with chance `a` once all before it were, a cycle yields
1 + a + a^2 + ... + a^N tokens: what is accepted, and the one token that the target adds itself. A tree tries several
candidates at a place. The best one is right with chance `a`, the second with `a / 2` when the best is wrong, the third
with `a / 3` when both are, and so on: on the shipped EAGLE-3 drafter, whose chain of four commits 2.01 tokens a cycle,
that gives 2.26 and 2.57 for the best trees of 7 and 15; measured were 2.37 and 2.64 (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import prod


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


@dataclass(frozen=True)
class Costs:
    """What a plain token and the parts of a speculative cycle cost, in microseconds."""

    plain_us: float
    verify_us: float
    """Of a verify step with `rows` rows."""
    rows: int
    draft_us: float = 0.0
    """Of drafting in one cycle, as deep as `depth`."""
    depth: int = 1
    row_us: float = 0.0
    """What each further row adds to the verify step."""
    host_us: float = 0.0
    """What a speculative cycle costs beside both."""

    def cycle_us(self, drafted: int, depth: int) -> float:
        """A cycle that verifies so many drafted tokens; drafting costs one pass of the drafter a level of depth."""
        verify_us = self.verify_us + self.row_us * (drafted + 1 - self.rows)
        return max(verify_us, 0.0) + self.draft_us * depth / self.depth + self.host_us


@dataclass(frozen=True)
class DraftShape:
    """How many tokens are drafted, how deep, and what that yields."""

    name: str
    drafted: int
    """Drafted tokens; the verify step has one row more."""
    depth: int
    """Passes of the drafter that it takes, and the most that can be accepted."""
    tokens: Callable[[float], float]
    """Expected tokens a cycle when a best candidate is right with this chance."""

    def needed(self, tokens: float) -> float | None:
        """The chance of acceptance at which it yields `tokens` a cycle; None if none does."""
        return _root(self.tokens, tokens, self.depth + 1)


def chain(length: int) -> DraftShape:
    """`length` tokens, one after the other."""
    return DraftShape(f"chain of {length}", length, length, lambda a: chain_tokens(a, length))


def full_tree(widths: Sequence[int]) -> DraftShape:
    """By depth, how many candidates follow each drafted token: (3, 2) drafts 3 tokens and 2 after each of them."""

    def tokens(acceptance: float) -> float:
        return 1 + sum(
            prod(level_acceptance(acceptance, width) for width in widths[: depth + 1])
            for depth in range(len(widths))
        )

    drafted = sum(prod(widths[: depth + 1]) for depth in range(len(widths)))
    return DraftShape("tree " + ",".join(map(str, widths)), drafted, len(widths), tokens)


def best_tree(drafted: int, depth: int) -> DraftShape:
    """The `drafted` nodes that are likeliest to be accepted, at most `depth` deep: what EAGLE-2 strives for."""

    def tokens(acceptance: float) -> float:
        # A node's next candidates are less likely than itself, so taking the likeliest one on offer finds the best
        # tree. On offer: minus the chance that the node's path stands, its depth, its rank, its parent's chance,
        # the chance that its better siblings are wrong.
        offered = [(-acceptance, 1, 1, 1.0, 1.0)]
        total = 1.0
        for _ in range(drafted):
            negative, level, rank, parent, left = heappop(offered)
            total -= negative
            left *= 1 - acceptance / rank
            sibling = parent * left * acceptance / (rank + 1)
            heappush(offered, (-sibling, level, rank + 1, parent, left))
            if level < depth:
                heappush(offered, (negative * acceptance, level + 1, 1, -negative, 1.0))
        return total

    return DraftShape(f"best tree of {drafted}", drafted, min(depth, drafted), tokens)


def level_acceptance(acceptance: float, width: int) -> float:
    """The chance that one of `width` candidates is right: the k-th best with `acceptance / k` if all before are not."""
    return 1 - prod(1 - acceptance / rank for rank in range(1, width + 1))


def chain_tokens(acceptance: float, drafted: int) -> float:
    """Expected tokens a cycle of a chain of `drafted` tokens, each accepted with chance `acceptance` in its turn."""
    return sum(acceptance**position for position in range(drafted + 1))


def acceptance_needed(tokens: float, drafted: int) -> float | None:
    """The chance of acceptance at which a chain of `drafted` tokens yields `tokens` a cycle; None if none does.

    0 where one token a cycle is enough.
    """
    return _root(lambda acceptance: chain_tokens(acceptance, drafted), tokens, drafted + 1)


def verify_us_that_pays(costs: Costs, shape: DraftShape, acceptance: float) -> float:
    """The dearest verify step (microseconds) at which this acceptance breaks even; below 0 where drafting alone costs
    more than it brings."""
    beside_us = costs.draft_us * shape.depth / costs.depth + costs.host_us
    return shape.tokens(acceptance) * costs.plain_us - beside_us


def speed_up(costs: Costs, shape: DraftShape, acceptance: float) -> float:
    """Speculative over plain speed."""
    cycle_us = costs.cycle_us(shape.drafted, shape.depth)
    return shape.tokens(acceptance) * costs.plain_us / cycle_us


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


def _root(tokens_at: Callable[[float], float], tokens: float, most: int) -> float | None:
    """Where a function of the acceptance that grows from 1 to `most` reaches `tokens`."""
    if tokens <= 1:
        return 0.0
    if tokens > most:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if tokens_at(middle) < tokens:
            low = middle
        else:
            high = middle
    return high
