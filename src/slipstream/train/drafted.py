"""A drafter in the real cycle over prompts: what every shape of draft yields, with and without answers that loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.draft.eagle3.drafter import Eagle3Drafter
from slipstream.draft.eagle3.grow import depth_for
from slipstream.engine.controller import SIZES
from slipstream.engine.engine import Engine, Prompt
from slipstream.engine.request import SamplingParams, Stats
from slipstream.errors import SlipstreamError
from slipstream.kernels.linear import Format
from slipstream.train.acceptance import products, shares
from slipstream.train.samples import LOOPING, loops


@dataclass(frozen=True)
class DraftShape:
    """What is drafted in every cycle."""

    top_k: int
    """1 is a chain."""
    depth: int
    """The longest path."""
    size: int
    """Tokens."""

    @staticmethod
    def chain(size: int) -> DraftShape:
        return DraftShape(1, size, size)

    @property
    def name(self) -> str:
        return (
            f"chain of {self.size}" if self.top_k == 1 else f"tree of {self.top_k},{self.depth},{self.size}"
        )

    @property
    def levels(self) -> int:
        """How deep it really grows: a small tree hardly ever reaches deep, so the drafter ends earlier."""
        return self.size if self.top_k == 1 else depth_for(self.size, self.top_k, self.depth)


@dataclass(frozen=True)
class Answer:
    """One prompt's answer and its cycles."""

    stats: Stats
    loops: float
    """The share of its 4-grams that repeat an earlier one."""
    draftable: int
    """Its tokens that the drafter can draft at all."""
    is_same: bool
    """Whether it is the text of plain decoding, token for token."""

    @property
    def is_looping(self) -> bool:
        return self.loops > LOOPING


@dataclass(frozen=True)
class Drafted:
    """The answers to all prompts, or to some, with one shape."""

    shape: DraftShape
    answers: list[Answer]

    @property
    def looping(self) -> list[int]:
        """The numbers of the answers that loop."""
        return [number for number, answer in enumerate(self.answers) if answer.is_looping]

    def without_loops(self) -> Drafted:
        return Drafted(self.shape, [answer for answer in self.answers if not answer.is_looping])

    def of(self, kinds: Sequence[str], kind: str) -> Drafted:
        """The answers to prompts of one kind. kinds: of all prompts."""
        chosen = [each for each, its in zip(self.answers, kinds, strict=True) if its == kind]
        return Drafted(self.shape, chosen)

    def _sum(self, name: str) -> list[int]:
        """tried or accepted, by position."""
        found = [0] * self.shape.levels
        for answer in self.answers:
            for position, count in enumerate(getattr(answer.stats, name)):
                found[position] += count
        return found

    @property
    def tried(self) -> list[int]:
        """By position: how often a draft was checked there, all before it accepted."""
        return self._sum("tried")

    @property
    def accepted(self) -> list[int]:
        return self._sum("accepted")

    @property
    def new_tokens(self) -> int:
        return sum(answer.stats.new_tokens for answer in self.answers)

    @property
    def cycles(self) -> int:
        return sum(answer.stats.cycles for answer in self.answers)

    @property
    def checked(self) -> int:
        """Drafted tokens that were verified."""
        return sum(
            size * count for each in self.answers for size, count in each.stats.cycles_by_drafted.items()
        )

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON; 0 where nothing was counted.

        tokens_a_cycle: what the texts got, bonus tokens included; accepted_a_cycle: accepted drafts alone, those
        beyond a text's end included; mean_of_answers: tokens a cycle of each answer, averaged.
        """
        tried, accepted, cycles = self.tried, self.accepted, self.cycles
        each = [answer.stats.tokens_per_cycle for answer in self.answers]
        conditional = shares(accepted, tried)
        return {
            "answers": len(self.answers),
            "tokens_a_cycle": self.new_tokens / max(1, cycles),
            "accepted_a_cycle": sum(accepted) / max(1, cycles),
            "mean_of_answers": sum(each) / max(1, len(each)),
            "conditional": conditional,
            "cumulative": products(conditional),
            "accepted_of_drafted": sum(accepted) / max(1, self.checked),
            "coverage": sum(answer.draftable for answer in self.answers) / max(1, self.new_tokens),
            "new_tokens": self.new_tokens,
            "cycles": cycles,
            "drafted": self.checked,
            "tried": tried,
            "accepted": accepted,
        }


def drafted(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    shapes: Sequence[DraftShape],
    *,
    group: int = 4,
    weights: Format = "bfloat16",
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[Drafted]:
    """The real cycle with each shape in every cycle, and plain decoding to compare the texts with.

    engine: one whose drafter is an Eagle3Drafter; it has it again afterwards. group: prompts that run at once.
    weights: of the drafter's linear layers. progress: is told the shape, and the prompts done and all. Raises
    SlipstreamError for a shape or a prompt that cannot be.
    """
    before = engine.drafter
    if not isinstance(before, Eagle3Drafter):
        raise SlipstreamError("the engine has no EAGLE-3 drafter to evaluate")
    drafters = [
        Eagle3Drafter(before.checkpoint, each.size, top_k=each.top_k, depth=each.depth, weights=weights)
        for each in shapes
    ]
    for shape, drafter in zip(shapes, drafters, strict=True):
        most = min(drafter.max_drafted, max(SIZES))
        if shape.size > most:
            raise SlipstreamError(
                f"a {shape.name} cannot be: the most tokens that can be drafted so are {most}"
            )
    can_draft = set(before.checkpoint.target_ids.tolist())
    total = len(prompts) * (1 + len(shapes))

    def run(what: str, done: int, size: int | None) -> list[tuple[list[int], Stats]]:
        found = []
        for begin in range(0, len(prompts), group):
            progress(what, done + begin, total)
            every = engine.generate_batch(
                prompts[begin : begin + group], params, speculate=size is not None, draft_tokens=size
            )
            found += [(each.token_ids, each.stats) for each in every]
        return found

    try:
        results = []
        plain = run("plain decoding", 0, None)
        for number, (shape, drafter) in enumerate(zip(shapes, drafters, strict=True), start=1):
            engine.use(drafter)
            fast = run(shape.name, number * len(prompts), shape.size)
            answers = [
                Answer(stats, loops(ids), sum(token in can_draft for token in ids), ids == expected)
                for (ids, stats), (expected, _) in zip(fast, plain, strict=True)
            ]
            results.append(Drafted(shape, answers))
        progress("done", total, total)
    finally:
        engine.use(before)
    return results
