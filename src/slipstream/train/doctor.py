"""The drafter doctor: checks every fact of a drafter and its target, measures, tries other readings, names the cure.

A drafter whose config or map is misread still drafts, only badly, and no error says why. So the doctor asks the target:
it lets it write answers, counts how often the drafter would have guessed them right, and where another reading of the
same weights does clearly better, that reading is what was meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream.draft.eagle3.checkpoint import Checkpoint
from slipstream.errors import ModelError
from slipstream.target.family import Target
from slipstream.train.doctor_facts import Fact, coverage, facts_of
from slipstream.train.doctor_readings import boundaries, mended
from slipstream.train.doctor_search import HEALTHY, Progress, Search, Trial
from slipstream.train.doctor_trials import Acceptance, Evidence, Reading
from slipstream.train.samples import Samples

OF_CLAIM = 0.75
"""The share of its claim that a drafter must reach: the claim was measured on other texts, and the shipped head reaches
0.87 of its own here; a fault that costs less than a quarter is found by its better reading."""


@dataclass(frozen=True)
class Diagnosis:
    """What is known about a drafter on a target."""

    facts: list[Fact]
    acceptance: Acceptance | None
    """As the drafter is read; None when it cannot be run so."""
    claimed: list[float] | None
    """By position, from its training."""
    trials: list[Trial]
    cured: Acceptance | None
    """With every change that was kept; None without one."""
    mended: Checkpoint | None
    """The drafter that reads right; None where there is nothing to change, or no config can say the change."""
    healthy: bool
    verdict: str
    """One or a few sentences."""


def examine(
    checkpoint: Checkpoint,
    target: Target,
    texts: Samples,
    claimed: Sequence[float] | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Diagnosis:
    """Examines a drafter, however broken (`checkpoint.read`, not `load`).

    texts: the target's own greedy answers (`write_answers`). claimed: acceptance by position, as its training says.
    progress: is told what is done, how much of it and of how much. Raises DataError when the texts are too short.
    """
    start, everything = Reading(checkpoint), torch.arange(target.shape.vocab_size, device=target.device)
    embedding = target.embed(everything)
    facts = facts_of(checkpoint, target.shape, embedding)
    claim = list(claimed) if claimed else None
    if any(fact.status == "fail" and fact.name in ("hidden size", "vocabulary size") for fact in facts):
        wrong = next(fact for fact in facts if fact.status == "fail")
        return Diagnosis(facts, None, claim, [], None, None, False, f"{wrong.name}: {wrong.found}.")
    progress("reading the target's states", 0, 1)
    evidence = Evidence.gather(target, texts, boundaries(checkpoint, target.shape))
    progress("reading the target's states", 1, 1)
    search = Search(evidence, progress)
    acceptance = evidence.measure(start)
    reading, found = search.run(start, acceptance)
    if start.obstacle(target.shape) is None:
        facts.append(coverage(checkpoint, evidence.said))
    cured = found if search.sentences else None
    better = _mended(checkpoint, reading)
    is_poor = _is_below(found, claim)
    healthy = not is_poor and not search.sentences and all(fact.status != "fail" for fact in facts)
    sentences = search.sentences or [_without_cure(start, target, facts, found, claim, is_poor, better)]
    if search.sentences:
        if reading.shift:
            sentences.append("No setting of a checkpoint can say that: train it with the right alignment.")
        if is_poor:
            sentences.append(_still_poor(found))
    return Diagnosis(facts, acceptance, claim, search.trials, cured, better, healthy, " ".join(sentences))


def _mended(checkpoint: Checkpoint, reading: Reading) -> Checkpoint | None:
    try:
        found = mended(reading)
    except (ModelError, RuntimeError):  # a config or a map that contradicts itself, and no reading of it ran
        return None
    is_same = found.config == checkpoint.config and found.tensors.keys() == checkpoint.tensors.keys()
    if is_same and all(torch.equal(found.tensors[name], checkpoint.tensors[name]) for name in found.tensors):
        return None
    return found


def _is_below(found: Acceptance | None, claim: list[float] | None) -> bool:
    """Whether acceptance at position 1 is too low, by more than few texts would explain."""
    if found is None:
        return True
    first, wanted = found.conditional[0], OF_CLAIM * claim[0] if claim else HEALTHY
    error: float = (first * (1 - first) / found.checked[0]) ** 0.5
    return first + 2 * error < wanted


def _without_cure(
    start: Reading,
    target: Target,
    facts: Sequence[Fact],
    found: Acceptance | None,
    claim: list[float] | None,
    is_poor: bool,
    better: Checkpoint | None,
) -> str:
    wrong = [f"{fact.name}: {fact.found}" for fact in facts if fact.status == "fail"]
    if found is None:
        return f"The drafter cannot be run: {start.obstacle(target.shape)}. No other reading helps."
    first = found.conditional[0]
    if is_poor:
        wanted = f"its training claims {claim[0]:.2f}" if claim else f"{HEALTHY} and more is healthy"
        return f"Acceptance at position 1 is {first:.2f}, where {wanted}. {_still_poor(found)}"
    if wrong:
        hope = " A mended drafter can be written." if better else ""
        return f"Acceptance at position 1 is {first:.2f}, which is healthy, but {'; '.join(wrong)}.{hope}"
    against = f"its training claims {claim[0]:.2f}" if claim else f"healthy is {HEALTHY} and more"
    return (
        f"The drafter is healthy: acceptance at position 1 is {first:.2f} ({against}),"
        f" {found.tokens_a_cycle:.2f} tokens a cycle with a chain of {found.steps}; no other reading does better."
    )


def _still_poor(found: Acceptance | None) -> str:
    return "No other reading helps: it is undertrained, or trained for another target or on other data."
