"""What a batch costs and what would have been accepted: soft cross-entropy over the draft vocabulary, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from slipstream.target.family import Target
from slipstream.train.eagle3_model import Eagle3Module, shifted
from slipstream.train.packing import Batch

States = Callable[[Sequence[int], Sequence[Tensor]], list[tuple[Tensor, Tensor]]]
"""Samples' numbers and tokens to their features [T, F] and final states [T, H]: `states.py`, `offline.py`."""
_LOGITS = 1 << 28
"""Draft logits that are held at once; more rows are computed in pieces, and again in the backward pass."""


@dataclass(frozen=True)
class Goals:
    """What the target says about every row of a batch: row t is about the token at t + 1."""

    soft: Tensor
    """[B, T, Vd]: its distribution, over the draft vocabulary alone, renormalised."""
    best: Tensor
    """int64 [B, T]: its first choice, of the whole vocabulary."""
    draftable: Tensor
    """int64 [B, T]: its first choice among the draft vocabulary, as the target numbers it."""
    mass: Tensor
    """float32 [B, T]: the probability that the draft vocabulary has of the whole."""


@dataclass(frozen=True)
class Outcome:
    """By step of the training-time test, [steps] each, summed over the rows of a batch."""

    loss: Tensor
    """Cross-entropy in nats, over the rows whose first choice the drafter can draft; with its gradient."""
    counted: Tensor
    """Rows whose token the loss is taken on, and for which all earlier steps were right."""
    right: Tensor
    """Those of them whose first choice is the target's: right / counted is the acceptance by position."""
    seen: Tensor
    """Rows whose token the loss is taken on, whatever the earlier steps were."""
    drafted: Tensor
    """Those of `seen` whose first choice is the target's."""
    in_vocabulary: Tensor
    """Those of `seen` whose target's first choice the drafter can draft at all."""
    overlap: Tensor
    """Sum over `seen` of sum(min(p, q)), p over the whole vocabulary: what sampling would accept."""
    counted_draftable: Tensor
    """Those of `counted` whose target's first choice the drafter can draft."""
    lenient_counted: Tensor
    """As `counted`, where the target's choice is taken among the draft vocabulary, so that nothing is out of it."""
    lenient_right: Tensor
    """As `right`, by the same."""


def features_of(batch: Batch, states: States) -> tuple[Tensor, Tensor]:
    """The target's features [B, T, F] and final states [B, T, H] of a batch; padding holds zeros."""
    spans = [
        batch.tokens[row, place : place + length]
        for row, place, length in zip(batch.rows, batch.places, _lengths(batch), strict=True)
    ]
    found = states(batch.samples, spans)
    features, hidden = (
        torch.zeros(*batch.tokens.shape, part.shape[-1], dtype=part.dtype, device=batch.tokens.device)
        for part in found[0]
    )
    for (its_features, its_hidden), row, place in zip(found, batch.rows, batch.places, strict=True):
        features[row, place : place + len(its_features)] = its_features
        hidden[row, place : place + len(its_hidden)] = its_hidden
    return features, hidden


def _lengths(batch: Batch) -> list[int]:
    counted = torch.bincount(batch.documents.flatten() + 1, minlength=len(batch.samples) + 1)
    return [int(count) for count in counted[1:].tolist()]


@torch.no_grad()
def goals_of(target: Target, hidden: Tensor, ids: Tensor, dtype: torch.dtype) -> Goals:
    """hidden: [B, T, H], the target's final states. ids: int64 [Vd]. dtype: of the distribution that is kept."""
    softs, bests, draftables, masses = [], [], [], []
    for part in hidden.flatten(0, 1).split(max(1, _LOGITS // target.shape.vocab_size)):
        logits = target.logits(part)
        drafted = logits[:, ids]
        bests.append(logits.argmax(-1))
        draftables.append(ids[drafted.argmax(-1)])
        masses.append((drafted.logsumexp(-1) - logits.logsumexp(-1)).exp())
        softs.append(drafted.softmax(-1).to(dtype))
    shape = hidden.shape[:2]
    return Goals(*(torch.cat(parts).unflatten(0, shape) for parts in (softs, bests, draftables, masses)))


def outcome_of(head: Eagle3Module, batch: Batch, features: Tensor, goals: Goals, steps: int) -> Outcome:
    """Runs the training-time test over a batch."""
    can_draft = torch.isin(goals.best, head.ids)
    alive = alive_leniently = torch.ones_like(batch.mask)
    figures: list[list[Tensor]] = []

    def use(step: int, normed: Tensor) -> Tensor:
        nonlocal alive, alive_leniently
        inside = (shifted(batch.documents, step + 2) == batch.documents) & (batch.documents >= 0)
        counts = shifted(batch.mask, step + 2) & inside
        has_goal = counts & shifted(can_draft, step + 1)
        rows = counts.nonzero()
        loss, chosen, overlap = _rows_of(head, normed, rows, step, goals, has_goal)
        tokens = torch.full_like(batch.tokens, -1)
        tokens[rows[:, 0], rows[:, 1]] = chosen
        hits = counts & (tokens == shifted(goals.best, step + 1))
        agrees = counts & (tokens == shifted(goals.draftable, step + 1))
        counted, counted_leniently = counts & alive, counts & alive_leniently
        alive, alive_leniently = alive & hits, alive_leniently & agrees
        every = [counted, alive, counts, hits, has_goal, overlap]
        every += [counted & has_goal, counted_leniently, alive_leniently]
        figures.append([each.sum() for each in every])
        return loss

    losses = head(batch.tokens, batch.documents, features, steps, use)
    return Outcome(torch.stack(losses), *(torch.stack(parts) for parts in zip(*figures, strict=True)))


def _rows_of(
    head: Eagle3Module, normed: Tensor, rows: Tensor, step: int, goals: Goals, has_goal: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of a step's rows (int64 [R, 2]), what is drafted for each (int64 [R]), and their overlap."""
    piece = max(1, _LOGITS // len(head.ids))
    total, drafted, overlap = normed.sum() * 0.0, [], torch.zeros((), device=normed.device)
    for part in rows.split(piece):
        at, goal_at = (part[:, 0], part[:, 1]), (part[:, 0], part[:, 1] + step + 1)
        arguments = (head, normed[at], goals.soft[goal_at], has_goal[at], goals.mass[goal_at])
        if len(rows) > piece:
            loss, chosen, shared = checkpoint(_piece, *arguments, use_reentrant=False)
        else:
            loss, chosen, shared = _piece(*arguments)
        total, overlap = total + loss, overlap + shared
        drafted.append(head.ids[chosen])
    return total, torch.cat(drafted), overlap


def _piece(
    head: Eagle3Module, normed: Tensor, soft: Tensor, has_goal: Tensor, mass: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    log_q = F.log_softmax(head.logits(normed).float(), dim=-1)
    loss = -((soft * log_q).sum(-1) * has_goal).sum()
    with torch.no_grad():
        chosen = log_q.argmax(-1)
        shared = torch.minimum(soft * mass[:, None], log_q.exp()).sum()
    return loss, chosen, shared
