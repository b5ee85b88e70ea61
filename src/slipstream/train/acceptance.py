"""Acceptance in every convention that papers and trainers report it in, from the same counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor

from slipstream.train.losses import Outcome


@dataclass(frozen=True)
class Acceptance:
    """Sums over all positions of some samples, by step of the training-time test; see `Outcome` for each.

    Shares are 0 where nothing was counted.
    """

    loss: list[float]
    counted: list[float]
    right: list[float]
    seen: list[float]
    drafted: list[float]
    in_vocabulary: list[float]
    overlap: list[float]
    counted_draftable: list[float]
    lenient_counted: list[float]
    lenient_right: list[float]

    @staticmethod
    def of(sums: Tensor) -> Acceptance:
        """From `sums_of`, or a sum of such."""
        return Acceptance(*sums.tolist())

    def __add__(self, other: Acceptance) -> Acceptance:
        """Over the samples of both."""
        pairs = zip(asdict(self).values(), asdict(other).values(), strict=True)
        return Acceptance(*([a + b for a, b in zip(*pair, strict=True)] for pair in pairs))

    @property
    def conditional(self) -> list[float]:
        """Of each draft, given that all before it were right. Out-of-vocabulary is a miss: what an engine would see."""
        return shares(self.right, self.counted)

    @property
    def cumulative(self) -> list[float]:
        """That the draft is right up to here: the product of the conditional ones."""
        return products(self.conditional)

    @property
    def unconditional(self) -> list[float]:
        """Of each draft after the text's own tokens, whether the drafter would have got there or not."""
        return shares(self.drafted, self.seen)

    @property
    def conditional_draftable(self) -> list[float]:
        """`conditional`, the rows left out whose target's choice is out of the draft vocabulary."""
        return shares(self.right, self.counted_draftable)

    @property
    def unconditional_draftable(self) -> list[float]:
        """`unconditional`, the same rows left out."""
        return shares(self.drafted, self.in_vocabulary)

    @property
    def conditional_lenient(self) -> list[float]:
        """`conditional` against the target's first choice among the draft vocabulary, whatever its real one is."""
        return shares(self.lenient_right, self.lenient_counted)

    @property
    def mean_overlap(self) -> list[float]:
        """sum(min(p, q)) over all rows: what would be accepted of samples at temperature 1."""
        return shares(self.overlap, self.seen)

    @property
    def mean_loss(self) -> list[float]:
        """Cross-entropy in nats over the rows that have one."""
        return shares(self.loss, self.in_vocabulary)

    @property
    def coverage(self) -> float:
        """The share of the target's choices that the drafter can draft at all."""
        return shares(self.in_vocabulary, self.seen)[0]

    @property
    def tokens_a_cycle(self) -> float:
        """1 + a0 + a0 a1 + ...: of a chain of that many steps, the target's own (bonus) token included; papers' τ."""
        return 1 + self.accepted_a_cycle

    @property
    def accepted_a_cycle(self) -> float:
        """a0 + a0 a1 + ... of the conditional shares: the same without the bonus token."""
        return sum(self.cumulative)

    @property
    def simulated_acc_len(self) -> float:
        """a0 + a0 a1 + ... of the unconditional shares, as SpecForge computes what it calls so."""
        return sum(products(self.unconditional))

    def as_dict(self) -> dict[str, Any]:
        """All figures, and the counts behind them, for JSON."""
        figures = (
            "tokens_a_cycle accepted_a_cycle simulated_acc_len coverage conditional cumulative unconditional"
            " conditional_draftable unconditional_draftable conditional_lenient mean_overlap mean_loss"
        )
        return {**{name: getattr(self, name) for name in figures.split()}, "sums": asdict(self)}

    def summary(self) -> str:
        """One line for a log."""
        places = " ".join(f"{share:.2f}" for share in self.conditional)
        return (
            f"{self.tokens_a_cycle:.2f} tokens a cycle (chain of {len(self.seen)}, bonus counted); right by position"
            f" {places}; {self.coverage:.1%} of the target's choices can be drafted"
        )


def sums_of(outcome: Outcome) -> Tensor:
    """float64 [fields, steps] on the outcome's device: what `Acceptance.of` takes."""
    return torch.stack([getattr(outcome, each.name).detach().double() for each in fields(Acceptance)])


def shares(parts: Sequence[float], wholes: Sequence[float]) -> list[float]:
    """Each part of its whole; 0 of nothing is 0."""
    return [part / whole if whole else 0.0 for part, whole in zip(parts, wholes, strict=True)]


def products(conditional: Iterable[float]) -> list[float]:
    """The product of all up to each."""
    return list(accumulate(conditional, mul))
