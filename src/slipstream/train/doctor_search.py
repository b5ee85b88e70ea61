"""The search for the readings of a drafter that do clearly better, one change after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from slipstream.train.doctor_readings import Alternative, alternatives
from slipstream.train.doctor_trials import Acceptance, Evidence, Reading

HEALTHY = 0.45
"""Acceptance at position 1 from which on a drafter without a claim is healthy. Published heads reach 0.7 to 0.85 on
chat (2.4 to 3.1 tokens a cycle with chains of 2 to 4); 5,000 conversations of training give about 0.40, and a head of
another version of its target 0.38, which did not pay. On this measure the shipped head has 0.58."""
GAIN = 0.05
"""Tokens a cycle that another reading must bring, beside two standard errors: less is not worth a change."""
FAULTS = 3
"""Most changes that are looked for."""
_NAMES = ("d2t", "norm_", "fc_")
"""What keeps its small letter at the beginning of a sentence."""
_FEW = 20
"""Chains that must have reached a position for its acceptance to be named."""

Progress = Callable[[str, int, int], None]
"""Is told what is done, how much of it, and of how much."""


@dataclass(frozen=True)
class Trial:
    """An alternative, and what it brought."""

    fact: str
    was: str
    now: str
    acceptance: Acceptance
    is_kept: bool
    """It is part of the cure."""


Tried = tuple[Alternative, Acceptance]


@dataclass
class Search:
    """Looks for at most `FAULTS` changes on the evidence; what it tried and found stays here."""

    evidence: Evidence
    progress: Progress
    trials: list[Trial] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    """One for every change, or for two that only help together."""

    def run(self, reading: Reading, found: Acceptance | None) -> tuple[Reading, Acceptance | None]:
        """The best reading, each change of which is clearly better than the one before. found: of the first reading."""
        changed: set[str] = set()
        while len(changed) < FAULTS:
            tried = self._try_all(reading, changed)
            best = max(tried, key=_tokens, default=None)
            kept: tuple[Alternative, ...] = ()
            if best and self._is_better(best[1], found):
                kept = (best[0],)
            elif not changed and (found is None or found.conditional[0] < HEALTHY / 2):
                kept, best = self._try_pairs(reading, tried, found)
            names = {(each.fact, each.now) for each in kept}
            self.trials += [
                Trial(each.fact, each.was, each.now, result, (each.fact, each.now) in names)
                for each, result in tried
            ]
            if not kept or best is None:
                break
            self.sentences.append(_sentence(kept, found, best[1]))
            reading, found = best[0].reading, best[1]
            changed |= {each.fact for each in kept}
        return reading, found

    def _options(self, reading: Reading, changed: set[str]) -> list[Alternative]:
        """The alternatives to a reading that leave alone what is changed already."""
        evidence, known = self.evidence, set(self.evidence.boundaries)
        every = alternatives(reading, evidence.target.shape, evidence.embedding)
        return [
            each
            for each in every
            if each.fact not in changed and known >= set(each.reading.checkpoint.config.get("taps") or ())
        ]

    def _try_all(self, reading: Reading, changed: set[str]) -> list[Tried]:
        options, tried = self._options(reading, changed), []
        what = "trying other readings" + (f" beside {', '.join(sorted(changed))}" if changed else "")
        for index, option in enumerate(options):
            self.progress(what, index, len(options))
            if (found := self.evidence.measure(option.reading)) is not None:
                tried.append((option, found))
        self.progress(what, 1, 1)
        return tried

    def _try_pairs(
        self, reading: Reading, tried: Sequence[Tried], than: Acceptance | None
    ) -> tuple[tuple[Alternative, ...], Tried | None]:
        """The best two changes together, where either alone brings nothing; nothing if they bring nothing either.

        They are many, so that the best are chosen by two steps on a third of the texts.
        """
        quick = self.evidence.part(3)
        order = list(dict.fromkeys(first.fact for first, _ in tried))
        best: tuple[float, tuple[Alternative, ...]] = (0.0, ())
        for index, (first, _) in enumerate(tried):
            self.progress("trying two changes at once", index, len(tried))
            for second in self._options(first.reading, set(order[: order.index(first.fact) + 1])):
                found = quick.measure(second.reading, 2)
                if found is not None and found.tokens_a_cycle > best[0]:
                    best = found.tokens_a_cycle, (first, second)
        self.progress("trying two changes at once", 1, 1)
        if best[1]:
            found = self.evidence.measure(best[1][1].reading)
            if found is not None and self._is_better(found, than):
                return best[1], (best[1][1], found)
        return (), None

    def _is_better(self, found: Acceptance, than: Acceptance | None) -> bool:
        """Clearly, and better than a drafter that always guesses the commonest token."""
        said = self.evidence.said
        if found.conditional[0] <= float(torch.bincount(said).max()) / len(said) + GAIN:
            return False
        if than is None:
            return True
        gain, error = than.gain(found)
        return gain > max(GAIN, 2 * error)


def _tokens(tried: Tried) -> float:
    return tried[1].tokens_a_cycle


def _sentence(kept: Sequence[Alternative], before: Acceptance | None, after: Acceptance) -> str:
    """'d2t was read as offsets; read as absolute ids, acceptance at position 1 goes from 0.02 to 0.61.'"""
    was = " and ".join(each.was for each in kept)
    now = " and ".join(each.now for each in kept)
    was = was if was.startswith(_NAMES) else was[0].upper() + was[1:]
    if before is None:
        return f"{was}, so it cannot be run; {now}, acceptance at position 1 is {after.conditional[0]:.2f}."
    place = _most_moved(before, after)
    if place is None:
        figures = f"{before.tokens_a_cycle:.2f} to {after.tokens_a_cycle:.2f}"
        return f"{was}; {now}, tokens a cycle with a chain of {after.steps} go from {figures}."
    figures = f"{before.conditional[place]:.2f} to {after.conditional[place]:.2f}"
    return f"{was}; {now}, acceptance at position {place + 1} goes from {figures}."


def _most_moved(before: Acceptance, after: Acceptance) -> int | None:
    """The position whose acceptance rose most, in standard errors; None when none rose by as much as `GAIN`.

    Positions that few chains reached say little, whatever their share.
    """
    risen: dict[int, float] = {}
    for place in range(after.steps):
        p, q = before.conditional[place], after.conditional[place]
        n, m = before.checked[place], after.checked[place]
        if q - p >= GAIN and min(n, m) >= _FEW:
            together = (p * n + q * m) / (n + m)
            risen[place] = (q - p) / (together * (1 - together) * (1 / n + 1 / m)) ** 0.5
    return max(risen, key=lambda place: risen[place], default=None)
