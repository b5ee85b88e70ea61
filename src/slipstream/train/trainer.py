"""The training loop: updates over packed rows, on one device or on several ranks, that continue bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed

from slipstream.errors import DataError
from slipstream.target.family import Target
from slipstream.train.eagle3_model import Eagle3Module
from slipstream.train.losses import Outcome, States, features_of, goals_of, outcome_of
from slipstream.train.packing import batch_of, count_updates, updates
from slipstream.train.samples import Samples


@dataclass(frozen=True)
class Recipe:
    """How to train. The loss of step k counts `decay` ** k, and is averaged over all loss tokens of an update."""

    steps: int = 5
    """Of the training-time test: how many tokens are drafted."""
    decay: float = 0.9
    row_length: int = 1024
    """Tokens of a row, in which samples are packed; no sample may be longer."""
    rows: int = 8
    """Rows of one forward on one rank."""
    accumulate: int = 1
    """Forwards of one update."""
    epochs: int = 3
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 0.5
    warmup: float = 0.03
    """Share of all updates."""
    precision: str = "float32"
    """float32, or bfloat16: of the multiplications; weights and their moments stay in float32."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises DataError for what cannot be trained with."""
        counts = ("steps", "row_length", "rows", "accumulate", "epochs")
        wrong = [name for name in counts if getattr(self, name) < 1]
        wrong += [name for name in ("decay", "clip") if not 0 < getattr(self, name) < math.inf]
        wrong += [name for name in ("lr", "weight_decay") if not 0 <= getattr(self, name) < math.inf]
        if not 0 <= self.warmup <= 1:
            wrong.append("warmup")
        if wrong:
            raise DataError(f"the recipe's {wrong[0]} cannot be {getattr(self, wrong[0])}")
        if self.precision not in ("float32", "bfloat16"):
            raise DataError(f"unknown precision {self.precision!r}; known are float32, bfloat16")


@dataclass(frozen=True)
class Update:
    """What is known after an update; the figures are those of all ranks together."""

    number: int
    of: int
    loss: float
    norm: float
    """Of the gradient, before clipping."""
    lr: float
    accepted: list[float] = field(default_factory=list)
    """By position: how often the first choice was the target's, all before it right, the full vocabulary counted."""
    tokens: int = 0
    """Of this update, padding left aside."""


class Trainer:
    """A drafter in training. Everything that an update depends on is in `module`, `optimiser` and `done`."""

    def __init__(
        self, module: Eagle3Module, target: Target, samples: Samples, states: States, recipe: Recipe
    ) -> None:
        """module: already sharded where there are several ranks. Raises DataError for less data than one update."""
        self.module, self.target, self.samples, self.states, self.recipe = (
            module,
            target,
            samples,
            states,
            recipe,
        )
        self.device = target.device
        is_parallel = distributed.is_available() and distributed.is_initialized()
        self.rank, self.ranks = (
            (distributed.get_rank(), distributed.get_world_size()) if is_parallel else (0, 1)
        )
        self._rows_an_update = recipe.rows * recipe.accumulate * self.ranks
        longest = int(samples.lengths.max()) if len(samples) else 0
        if longest > recipe.row_length:
            raise DataError(f"a sample has {longest} tokens, rows have {recipe.row_length}")
        self.total = count_updates(
            samples, recipe.row_length, self._rows_an_update, recipe.seed, recipe.epochs
        )
        if not self.total:
            raise DataError(
                f"the data does not fill one update of {self._rows_an_update} rows of {recipe.row_length} tokens;"
                " give more, or ask for fewer or shorter rows"
            )
        self.done = 0
        self.optimiser = torch.optim.AdamW(
            module.parameters(), lr=recipe.lr, betas=recipe.betas, weight_decay=recipe.weight_decay
        )

    def run(self, on_update: Callable[[Update], bool]) -> None:
        """Goes on from `done` to the end, or until on_update returns False.

        Raises DataError for an update that cannot be made; the weights are then those of the updates before.
        """
        recipe = self.recipe
        every = updates(self.samples, recipe.row_length, self._rows_an_update, recipe.seed, recipe.epochs)
        for number, rows in enumerate(every):
            if number < self.done:
                continue
            found = self._update(rows)
            self.done = number + 1
            if not on_update(found):
                return

    def outcome(self, rows: list[list[int]], samples: Samples | None = None) -> tuple[Outcome, int]:
        """The training-time test over some rows of samples, and their tokens."""
        batch = batch_of(samples or self.samples, rows, self.recipe.row_length, self.device)
        kind, is_low = self.device.type, self.recipe.precision == "bfloat16"
        with torch.autocast(kind, torch.bfloat16, enabled=is_low):
            features, hidden = features_of(batch, self.states)
            goals = goals_of(
                self.target, hidden, self.module.ids, torch.bfloat16 if is_low else torch.float32
            )
            found = outcome_of(self.module, batch, features, goals, self.recipe.steps)
        return found, int((batch.documents >= 0).sum())

    def _update(self, rows: list[list[int]]) -> Update:
        recipe = self.recipe
        lr = recipe.lr * rate(self.done, self.total, recipe.warmup)
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        loss_tokens = sum(int(self.samples.sample(s)[1].sum()) for row in rows for s in row)
        if not loss_tokens:
            raise DataError(f"update {self.done + 1} has not one token that the loss is taken on")
        weights = torch.tensor([recipe.decay**step for step in range(recipe.steps)], device=self.device)
        # A rank's gradients are averaged over the ranks, so its share of the sum is multiplied back.
        weights = weights * self.ranks / (weights.sum() * loss_tokens)
        mine = rows[self.rank :: self.ranks]
        sums = torch.zeros(3, recipe.steps, dtype=torch.float64, device=self.device)
        tokens = torch.zeros((), dtype=torch.float64, device=self.device)
        self.optimiser.zero_grad(set_to_none=True)
        for piece in range(recipe.accumulate):
            is_last = piece == recipe.accumulate - 1
            if (sync := getattr(self.module, "set_requires_gradient_sync", None)) is not None:
                sync(is_last)
            found, count = self.outcome(mine[piece * recipe.rows : (piece + 1) * recipe.rows])
            (found.loss * weights).sum().backward()
            sums += torch.stack([(found.loss.detach() * weights / self.ranks), found.right, found.counted])
            tokens += count
        norm = float(full(torch.nn.utils.clip_grad_norm_(self.module.parameters(), recipe.clip)))
        if not math.isfinite(norm):
            raise DataError(
                f"the gradient of update {self.done + 1} is not finite; begin anew with a lower --lr"
            )
        self.optimiser.step()
        if self.ranks > 1:
            distributed.all_reduce(sums)
            distributed.all_reduce(tokens)
        accepted = (sums[1] / sums[2].clamp_min(1)).tolist()
        return Update(self.done + 1, self.total, float(sums[0].sum()), norm, lr, accepted, int(tokens))


def full(tensor: Tensor) -> Tensor:
    """A whole tensor from a sharded one; on all ranks at once."""
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def rate(update: int, total: int, warmup: float) -> float:
    """The share of the learning rate: a linear warm-up, then a cosine down to a tenth."""
    begin = max(1.0, warmup * total)
    if update < begin:
        return min(1.0, (update + 1) / begin)
    passed = (update - begin) / max(1.0, total - begin)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(passed, 1.0)))
