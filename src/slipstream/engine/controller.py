"""How many tokens to draft, cycle by cycle: never slower than plain decoding (design rule 4).

The controller knows what a cycle of each shape costs (measured, and followed while it runs) and how often drafted
tokens were accepted lately, by position and by the drafter's outlook. Each cycle it takes the shape with the most
expected tokens a second; the empty tree is one of the shapes. While it does not speculate it still learns: what a
drafter would have proposed for nothing is compared with the text that then came.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

from slipstream.draft.drafter import OUTLOOKS

SIZES = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31)
"""The tree sizes in use: a short list, as each is a captured graph on a GPU."""


class CostModel:
    """Microseconds of one cycle by (batch, size): a first guess from what was measured beforehand, then followed.

    The logarithm of a cost is the shape's own part plus a drift that all shapes share (a busy neighbour, a longer
    context), so that shapes which are not in use stay comparable with the one that is. Each measured cycle moves both
    parts by their shares of the doubt: a Kalman filter that keeps no covariances.
    """

    _NOISE = 0.1**2
    """Variance of the logarithm of one measured cycle."""
    _GUESS = 0.15**2
    """Variance of a first guess."""
    _OWN_STEP, _DRIFT_STEP = 0.001**2, 0.01**2
    """What a cycle adds to the variance of a shape's own part and of the drift."""
    _OUTLIER = 2.5
    """Standard deviations beyond which a cycle moves nothing further."""

    def __init__(self, us_by_rows: Mapping[int, float], draft_us: Mapping[int, float] | None = None) -> None:
        """us_by_rows: microseconds of a cycle without drafting by its rows, at least two entries. draft_us:
        microseconds of drafting by size; what is not there costs nothing."""
        self._rows = sorted(us_by_rows)
        self._us = [us_by_rows[rows] for rows in self._rows]
        self._draft_us = draft_us or {}
        self._shapes: dict[tuple[int, int], _ShapeCost] = {}
        self._drift, self._drift_variance = 0.0, 0.0
        self._cycles = 0

    def us(self, batch: int, size: int) -> float:
        """The expected cost of a cycle of `batch` requests with `size` drafted tokens each."""
        return exp(self._shape(batch, size).log_us + self._drift)

    def doubt(self, batch: int, size: int) -> float:
        """The standard deviation of that cost, as a share of it."""
        return sqrt(self._shape(batch, size).variance)

    def observe(self, batch: int, size: int, us: float) -> None:
        """Takes in a measured cycle; a single outlier moves little."""
        shape = self._shape(batch, size)
        self._cycles += 1
        shape.variance = min(shape.variance + self._OWN_STEP * (self._cycles - shape.seen), self._GUESS)
        shape.seen = self._cycles
        self._drift_variance += self._DRIFT_STEP
        variance = shape.variance + self._drift_variance + self._NOISE
        limit = self._OUTLIER * sqrt(variance)
        surprise = min(max(log(us) - shape.log_us - self._drift, -limit), limit)
        for_shape, for_drift = shape.variance / variance, self._drift_variance / variance
        shape.log_us += for_shape * surprise
        shape.variance *= 1 - for_shape
        self._drift += for_drift * surprise
        self._drift_variance *= 1 - for_drift

    def _shape(self, batch: int, size: int) -> _ShapeCost:
        known = self._shapes.get((batch, size))
        if known is None:
            us = self._interpolated(batch * (size + 1)) + self._draft_us.get(size, 0.0)
            known = self._shapes[batch, size] = _ShapeCost(log(us), self._GUESS, self._cycles)
        return known

    def _interpolated(self, rows: int) -> float:
        after = min(max(bisect_left(self._rows, rows), 1), len(self._rows) - 1)
        r0, r1, u0, u1 = self._rows[after - 1], self._rows[after], self._us[after - 1], self._us[after]
        return max(u0 + (u1 - u0) * (rows - r0) / (r1 - r0), min(self._us))


@dataclass(slots=True)
class _ShapeCost:
    log_us: float
    variance: float
    seen: int
    """The cycle that measured it last."""


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
        for node in range(
            len(counts)
        ):  # those that were not tried are forgotten too: they fade into the guess
            counts[node] = counts[node] * self._MEMORY + (node < tried)
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

    _LOOKING = 0.005
    """The share of the time that may be lost by running other sizes than the best, to keep their figures fresh."""

    def __init__(self, costs: CostModel, max_drafted: int, is_free: bool, is_tree: bool = False) -> None:
        """max_drafted, is_free, is_tree: the drafter's."""
        self.costs = costs
        self.sizes = tuple(size for size in SIZES if size <= max_drafted)
        self._is_free = is_free
        self._acceptance = TreeAcceptance(max_drafted) if is_tree else Acceptance(max_drafted)
        self._shadows: dict[int, _Shadow] = {}
        self._us = 0.0
        self._seen: dict[tuple[int, int], float] = {}
        """By (batch, size): the time of `_us` at which its cost was measured last."""
        self._drafting: set[int] = set()
        """Slots that drafted in their last cycle, so that their drafter has nothing to catch up on."""
        self._again = 0
        """The size that the next cycle has to repeat, as the last one's cost was not its own."""

    def choose(self, outlooks: Sequence[int], batch: int | None = None) -> int:
        """The tree size with the most expected tokens a second for requests with these outlooks, or, now and then,
        another one whose figures are old. batch: the bucket that they run in (default: their number)."""
        if not any(outlooks):
            return 0
        batch = batch or len(outlooks)
        if self._again:
            size, self._again = self._again, 0
            return size
        expected = [self._acceptance.expected_tokens(outlook) for outlook in outlooks if outlook]
        idle = len(outlooks) - len(expected)
        tokens = [idle + sum(each[size] for each in expected) for size in self.sizes]
        us = [self.costs.us(batch, size) for size in self.sizes]
        rates = [t / u for t, u in zip(tokens, us, strict=True)]
        rates[0] *= self._MARGIN
        best = max(range(len(rates)), key=rates.__getitem__)
        index = self._due(batch, best, tokens, us)
        if best == 0 and index and not self._is_free:
            self._again = self.sizes[index]
        return self.sizes[index]

    def _due(self, batch: int, best: int, tokens: Sequence[float], us: Sequence[float]) -> int:
        """The index of the best size, or of one that was not measured for so long that a look is cheap by now.

        Every size may lose its share of what looking may cost. What is hardly known is given the benefit of the doubt.
        """
        share = self._LOOKING / len(self.sizes)
        looks = 1 if best or self._is_free else 2
        for index, size in enumerate(self.sizes):
            unseen_us = self._us - self._seen.setdefault((batch, size), self._us)
            if index == best or unseen_us * share < us[index] * self._LOOKING * looks:
                continue
            loss_us = (
                us[index] * (1 - self.costs.doubt(batch, size)) - tokens[index] / tokens[best] * us[best]
            )
            if loss_us * looks <= unseen_us * share:
                return index
        return best

    def observe_cycle(self, slots: Sequence[int], batch: int, size: int, us: float) -> None:
        """A cycle of the requests in `slots`, in a bucket of `batch`, took that long. Before what came of it."""
        self._us += us
        if size and not self._is_free and not self._drafting.issuperset(slots):
            return  # a drafter with a state of its own caught up first
        self._seen[batch, size] = self._us
        self.costs.observe(batch, size, us)

    def observe_verified(self, slot: int, outlook: int, size: int, nodes: Sequence[int]) -> None:
        """A request's tree of `size` was verified and those of its tokens stood that are numbered `nodes`."""
        self._shadows.pop(slot, None)
        self._drafting.add(slot)
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
        self._drafting.discard(slot)
        shadow = self._shadows.get(slot)
        if shadow is not None and shadow.follow(tokens):
            self._acceptance.observe(shadow.outlook, len(shadow.drafted), range(shadow.right))
            del self._shadows[slot]

    def forget(self, slot: int) -> None:
        """The request in this slot ended."""
        self._shadows.pop(slot, None)
        self._drafting.discard(slot)
