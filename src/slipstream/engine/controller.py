"""How many tokens to draft, cycle by cycle: never slower than plain decoding (design rule 4).

The controller knows what a cycle of each shape costs (measured, and followed while it runs) and how often drafted
tokens were accepted lately, by position and by the drafter's outlook. Each cycle it takes the shape with the most
expected tokens a second; the empty tree is one of the shapes. While it does not speculate it still learns: what a
drafter would have proposed for nothing is compared with the text that then came.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.draft.drafter import OUTLOOKS

SIZES = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31)
"""The tree sizes in use: a short list, as each is a captured graph on a GPU."""


class CostModel:
    """Microseconds of one cycle by (batch, size): measured once by rows, then followed.

    A slow moving `drift` for the whole machine (a busy neighbour, a longer context) is told apart from what a single
    shape costs, so that shapes which are not in use stay comparable with the one that is.
    """

    def __init__(self, us_by_rows: dict[int, float]) -> None:
        """us_by_rows: a whole cycle's microseconds by rows of one forward, at least two entries."""
        self._rows = sorted(us_by_rows)
        self._us = [us_by_rows[rows] for rows in self._rows]
        self._by_shape: dict[tuple[int, int], float] = {}
        self._drift = 1.0

    def us(self, batch: int, size: int) -> float:
        """The expected cost of a cycle of `batch` requests with `size` drafted tokens each."""
        key = (batch, size)
        known = self._by_shape.get(key)
        if known is None:
            known = self._by_shape[key] = self._interpolated(batch * (size + 1))
        return known * self._drift

    def observe(self, batch: int, size: int, us: float) -> None:
        """Takes in a measured cycle; a single outlier moves little."""
        expected = self.us(batch, size)
        ratio = min(max(us / expected, 0.5), 2.0)
        self._by_shape[batch, size] *= ratio**0.02
        self._drift *= ratio**0.1

    def _interpolated(self, rows: int) -> float:
        after = min(max(bisect_left(self._rows, rows), 1), len(self._rows) - 1)
        r0, r1, u0, u1 = self._rows[after - 1], self._rows[after], self._us[after - 1], self._us[after]
        return max(u0 + (u1 - u0) * (rows - r0) / (r1 - r0), min(self._us))


class Acceptance:
    """How often a drafted token is accepted, given that all before it were: by outlook and position, lately."""

    _MEMORY = 0.97
    """What remains of a count when the next draft of the same outlook is counted: a memory of about 30 drafts."""
    _WEIGHT = 4.0
    """Drafts that the first guess is worth, and that a position borrows from the one before it."""

    def __init__(self, positions: int) -> None:
        self._tried = [[0.0] * positions for _ in range(OUTLOOKS)]
        self._accepted = [[0.0] * positions for _ in range(OUTLOOKS)]
        for outlook in range(1, OUTLOOKS):  # a guess that is forgotten as drafts come in
            self._tried[outlook][0] = self._WEIGHT
            self._accepted[outlook][0] = self._WEIGHT * min(0.3 + 0.1 * outlook, 0.9)
        self._expected: list[list[float] | None] = [None] * OUTLOOKS

    def observe(self, outlook: int, tried: int, nodes: Sequence[int]) -> None:
        """A chain of which `tried` tokens were compared with the text, and those of `nodes`, the first ones, stood."""
        accepted = len(nodes)
        counts, hits = self._tried[outlook], self._accepted[outlook]
        for position in range(min(accepted + 1, tried)):
            counts[position] = counts[position] * self._MEMORY + 1
            hits[position] = hits[position] * self._MEMORY + (position < accepted)
        self._expected[outlook] = None

    def expected_tokens(self, outlook: int) -> list[float]:
        """By size 0, 1, 2 ...: the tokens that a cycle is expected to commit, its own included."""
        known = self._expected[outlook]
        if known is None:
            known, reach, rate, weight = [1.0], 1.0, 0.0, 0.0
            for hits, counts in zip(self._accepted[outlook], self._tried[outlook], strict=True):
                rate = (hits + weight * rate) / max(counts + weight, 1.0)
                weight = self._WEIGHT
                reach *= rate
                known.append(known[-1] + reach)
            self._expected[outlook] = known
        return known


class TreeAcceptance:
    """How often a tree's node is on the accepted path: by outlook and by its rank in the drafter's confidence, lately.

    A smaller tree holds the first nodes of a larger one, so every verified tree tells about all sizes up to its own.
    """

    _MEMORY = 0.98
    _WEIGHT = 3.0
    """Trees that the guess for a node from the one before it is worth."""
    _FALL = 0.7
    """What a node is guessed to be worth beside the one before it."""

    def __init__(self, nodes: int) -> None:
        self._tried = [[0.0] * nodes for _ in range(OUTLOOKS)]
        self._accepted = [[0.0] * nodes for _ in range(OUTLOOKS)]
        self._expected: list[list[float] | None] = [None] * OUTLOOKS

    def observe(self, outlook: int, tried: int, nodes: Sequence[int]) -> None:
        """A tree of `tried` nodes of which those numbered `nodes` stood."""
        counts, hits = self._tried[outlook], self._accepted[outlook]
        for node in range(tried):
            counts[node] = counts[node] * self._MEMORY + 1
            hits[node] *= self._MEMORY
        for node in nodes:
            hits[node] += 1
        self._expected[outlook] = None

    def expected_tokens(self, outlook: int) -> list[float]:
        """By size 0, 1, 2 ...: the tokens that a cycle is expected to commit, its own included."""
        known = self._expected[outlook]
        if known is None:
            known, rate = [1.0], 0.7
            for hits, counts in zip(self._accepted[outlook], self._tried[outlook], strict=True):
                rate = (hits + self._WEIGHT * self._FALL * rate) / (counts + self._WEIGHT)
                known.append(known[-1] + rate)
            self._expected[outlook] = known
        return known


@dataclass
class _Shadow:
    """A draft that was not verified, waiting for the text to show how far it would have been right."""

    outlook: int
    drafted: list[int]
    right: int = 0

    def follow(self, tokens: Sequence[int]) -> bool:
        """Compares with the tokens that came; True when the outcome is known."""
        for token in tokens:
            if token != self.drafted[self.right]:
                return True
            self.right += 1
            if self.right == len(self.drafted):
                return True
        return False


class Controller:
    """Chooses the size of every cycle's tree, and learns from every cycle."""

    _MARGIN = 1.01
    """Speculation must promise this much over plain decoding: what is within measuring noise is not worth a risk."""

    _PROBE_EVERY = 128
    """Plain cycles after which a drafter that cannot be scored for nothing is tried with its smallest tree."""

    def __init__(self, costs: CostModel, max_drafted: int, is_free: bool, is_tree: bool = False) -> None:
        """max_drafted, is_free, is_tree: the drafter's."""
        self.costs = costs
        self.sizes = tuple(size for size in SIZES if size <= max_drafted)
        self._is_free = is_free
        self._acceptance = TreeAcceptance(max_drafted) if is_tree else Acceptance(max_drafted)
        self._shadows: dict[int, _Shadow] = {}
        self._plain_cycles = 0

    def choose(self, outlooks: Sequence[int]) -> int:
        """The tree size with the most expected tokens a second for requests with these outlooks."""
        if not any(outlooks):
            return 0
        batch = len(outlooks)
        expected = [self._acceptance.expected_tokens(outlook) for outlook in outlooks]
        best, best_rate = 0, batch / self.costs.us(batch, 0) * self._MARGIN
        for size in self.sizes[1:]:
            rate = sum(tokens[size] for tokens in expected) / self.costs.us(batch, size)
            if rate > best_rate:
                best, best_rate = size, rate
        self._plain_cycles = 0 if best else self._plain_cycles + 1
        if self._plain_cycles >= self._PROBE_EVERY and not self._is_free:
            self._plain_cycles, best = 0, self.sizes[1]
        return best

    def observe_verified(self, slot: int, outlook: int, size: int, nodes: Sequence[int]) -> None:
        """A request's tree of `size` was verified and those of its tokens stood that are numbered `nodes`."""
        self._shadows.pop(slot, None)
        if outlook:
            self._acceptance.observe(outlook, size, nodes)

    def wants_shadow(self, slot: int, outlook: int) -> bool:
        """Whether a draft that is not going to be verified should be handed to `shadow`."""
        return self._is_free and outlook > 0 and slot not in self._shadows

    def shadow(self, slot: int, outlook: int, drafted: list[int]) -> None:
        """Remembers what would have been drafted, to be compared with what comes."""
        self._shadows[slot] = _Shadow(outlook, drafted)

    def observe_text(self, slot: int, tokens: Sequence[int]) -> None:
        """The tokens that a plain cycle committed."""
        shadow = self._shadows.get(slot)
        if shadow is not None and shadow.follow(tokens):
            self._acceptance.observe(shadow.outlook, len(shadow.drafted), range(shadow.right))
            del self._shadows[slot]

    def forget(self, slot: int) -> None:
        """The request in this slot ended."""
        self._shadows.pop(slot, None)
