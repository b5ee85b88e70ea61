"""Trains an EAGLE-3 head on token sequences, with the target's states computed as they are needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.engine.state import State
from slipstream.target.family import Target
from slipstream.target.rows import Rows
from slipstream.train.eagle3_model import Eagle3Module, shifted
from slipstream.train.samples import draft_vocabulary as draft_vocabulary


@dataclass(frozen=True)
class Recipe:
    """How to train. The loss of step k counts `decay` ** k."""

    steps: int = 5
    """Of the training-time test: how many tokens are drafted."""
    decay: float = 0.9
    batch: int = 32
    epochs: int = 3
    lr: float = 6e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 0.5
    warmup: float = 0.03
    """Share of all updates."""
    seed: int = 0


@dataclass
class Progress:
    """What is known after an update."""

    update: int
    updates: int
    loss: float
    accepted: list[float] = field(default_factory=list)
    """By step: how often the head's first choice was the target's, the full vocabulary counted."""
    tokens: int = 0


class States:
    """Runs the target over whole samples: its states at the taps and its distribution over the draft vocabulary."""

    def __init__(self, target: Target, taps: tuple[int, ...], batch: int, length: int, device: str) -> None:
        self._target, self._taps = target, taps
        self._state = State.allocate(target.kv_layout(), batch, length, 1, target.dtype, torch.device(device))

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens int64 [B, T] -> features [B, T, F] and the final states [B, T, H]."""
        state, slots = self._state, torch.arange(len(tokens), device=tokens.device)
        index = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
        rows = Rows(
            tokens=tokens,
            positions=index,
            kv_rows=state.table[slots[:, None], index],
            table=state.table,
            slots=slots,
            prefix=torch.zeros_like(slots),
            extent=tokens.shape[1],
        )
        hidden, features = self._target.forward(rows, state.kv, self._taps)
        assert features is not None
        return features, hidden


def losses(
    head: Eagle3Module, target: Target, tokens: Tensor, mask: Tensor, states: States, recipe: Recipe
) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted loss, and by step [steps]: rows whose first choice was the target's, and rows counted.

    mask: bool [B, T], the tokens that are answers. A row counts when the token it predicts does and all rows before it
    in its draft were right, so right / counted is the acceptance by position, given that all before stood.
    """
    features, hidden = states(tokens)
    ids = torch.arange(head.shape.draft_vocab_size, device=tokens.device) + head.d2t
    with torch.no_grad():
        full = target.logits(hidden)
        best = full.argmax(-1)
        soft = full[..., ids].softmax(-1).to(torch.bfloat16 if tokens.is_cuda else torch.float32)
        in_draft = torch.isin(best, ids)
        del full
    total, weight_sum = torch.zeros((), device=tokens.device), 0.0
    right, counted = [], []
    alive = torch.ones_like(mask)
    for step, logits in enumerate(head.steps(tokens, features, recipe.steps)):
        goal, choice = shifted(soft, step + 1), shifted(best, step + 1)
        counts = shifted(mask, step + 2)
        trained = counts & shifted(in_draft, step + 1)
        log_p = F.log_softmax(logits.float(), dim=-1)
        entropy = -(goal * log_p).sum(-1)
        weight = recipe.decay**step
        total = total + weight * (entropy * trained).sum() / trained.sum().clamp_min(1)
        weight_sum += weight
        with torch.no_grad():
            hit = ids[logits.argmax(-1)] == choice
            counted.append((counts & alive).sum())
            alive = alive & hit
            right.append((counts & alive).sum())
    return total / weight_sum, torch.stack(right), torch.stack(counted)


def train(
    head: Eagle3Module,
    target: Target,
    tokens: Tensor,
    mask: Tensor,
    recipe: Recipe,
    on_update: Callable[[Progress], bool],
) -> None:
    """Trains on samples tokens [S, T] (int64), mask [S, T] (bool), both on the head's device.

    on_update is called after every update and returns False to stop there.
    """
    device = str(tokens.device)
    states = States(target, head.shape.taps, recipe.batch, tokens.shape[1], device)
    optimiser = torch.optim.AdamW(
        head.parameters(), lr=recipe.lr, betas=recipe.betas, weight_decay=recipe.weight_decay
    )
    updates = recipe.epochs * (len(tokens) // recipe.batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda update: _rate(update, updates, recipe.warmup)
    )
    seen = 0
    for update, rows in enumerate(_batches(len(tokens), recipe, tokens.device)):
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            loss, right, counted = losses(head, target, tokens[rows], mask[rows], states, recipe)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), recipe.clip)
        optimiser.step()
        schedule.step()
        seen += len(rows) * tokens.shape[1]
        accepted = (right / counted.clamp_min(1)).tolist()
        if not on_update(Progress(update + 1, updates, float(loss.detach()), accepted, seen)):
            return


def _batches(count: int, recipe: Recipe, device: torch.device) -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(recipe.seed)
    for _ in range(recipe.epochs):
        order = torch.randperm(count, generator=draw).to(device)
        for begin in range(0, count - recipe.batch + 1, recipe.batch):
            yield order[begin : begin + recipe.batch]


def _rate(update: int, updates: int, warmup: float) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    begin = max(1.0, warmup * updates)
    if update < begin:
        return (update + 1) / begin
    done = (update - begin) / max(1.0, updates - begin)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(done, 1.0)))
