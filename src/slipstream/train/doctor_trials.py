"""What a drafter would have got right under some reading of it, and how sure a difference between two readings is.

The target's own greedy answers are the text, so the tokens of the training-time test are those that drafting would
verify. All readings are tried on the same slots: their difference is a paired one, which shows a fault that costs a
few per cent (a wrong rope theta) where the difference of two shares would drown in noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from slipstream.draft.eagle3.checkpoint import Checkpoint
from slipstream.draft.eagle3.shape import Eagle3Shape, weight_names
from slipstream.engine.engine import Engine
from slipstream.engine.request import SamplingParams
from slipstream.errors import DataError, ModelError
from slipstream.target.family import Target
from slipstream.target.shape import ModelShape
from slipstream.train.eagle3_model import Eagle3Module, shifted
from slipstream.train.losses import features_of
from slipstream.train.packing import Batch, batch_of
from slipstream.train.samples import Samples
from slipstream.train.states import OnlineStates

STEPS = 4
"""The length of the chains that are tried."""
EMBEDDING = "embed_tokens.weight"
_LOGITS = 1 << 28
"""Logits that are held at once."""


@dataclass(frozen=True)
class Reading:
    """A drafter as somebody may have meant it."""

    checkpoint: Checkpoint
    shift: int = 0
    """Slot t pairs the target's state with the embedding of token t + 1 + shift."""

    def obstacle(self, target: ModelShape) -> str | None:
        """Why it cannot even be run on this target; None when it can."""
        tensors = self.checkpoint.tensors
        try:
            shape = self.checkpoint.shape.paired(target)
        except ModelError as error:
            return str(error)
        for name, size in weight_names(shape).items():
            if name == "d2t":
                continue  # without one, the first tokens of the vocabulary are taken
            if name not in tensors:
                return f"the tensor {name} is missing"
            if tuple(tensors[name].shape) != size:
                return f"{name} is {list(tensors[name].shape)}, the config asks for {list(size)}"
        ids = tensors.get("d2t")
        if ids is not None and tuple(ids.shape) != (shape.draft_vocab_size,):
            return f"d2t is {list(ids.shape)}, the config asks for {[shape.draft_vocab_size]}"
        table, wanted = tensors.get(EMBEDDING), (shape.vocab_size, shape.hidden_size)
        if table is not None and tuple(table.shape) != wanted:
            return f"{EMBEDDING} is {list(table.shape)}, the config asks for {list(wanted)}"
        if table is None and shape.hidden_size != target.hidden_size:
            return f"it brings no embedding of {shape.hidden_size} elements, the target's has {target.hidden_size}"
        return None


@dataclass(frozen=True)
class Acceptance:
    """What was right in N chains of drafted tokens, one from every slot that has so many tokens after it."""

    right: Tensor
    """int64 [N]: right tokens before the first wrong one, 0 to `steps`."""
    texts: Tensor
    """int64 [N]: the text of each chain."""
    steps: int

    @property
    def checked(self) -> list[int]:
        """By position: chains in which all before it were right."""
        return [int((self.right >= step).sum()) for step in range(self.steps)]

    @property
    def conditional(self) -> list[float]:
        """By position: the share of those `checked` that was right there too; 0 where none was checked."""
        reached = [*self.checked, int((self.right >= self.steps).sum())]
        return [after / before if before else 0.0 for before, after in pairwise(reached)]

    @property
    def cumulative(self) -> list[float]:
        """By position: the share of all chains that was right up to there."""
        return [float((self.right > step).double().mean()) for step in range(self.steps)]

    @property
    def tokens_a_cycle(self) -> float:
        """1 + a0 + a0 a1 ...: what a chain of `steps` yields, the target's own token counted."""
        return 1.0 + float(self.right.double().mean())

    def gain(self, other: Acceptance) -> tuple[float, float]:
        """By how many tokens a cycle another reading is better, and the standard error of that.

        Neighbouring slots share their context, so that each text counts as one observation, weighted by its slots.
        """
        difference = (other.right - self.right).double()
        mean = float(difference.mean())
        texts = int(self.texts.max()) + 1
        sums = torch.zeros(texts, dtype=torch.float64, device=difference.device)
        sums.index_add_(0, self.texts, difference - mean)
        spread = float(sums.square().sum().sqrt()) / len(difference)
        return mean, spread * (texts / max(1, texts - 1)) ** 0.5


@dataclass(frozen=True)
class Evidence:
    """Texts of the target, one a row, with all of its states that a reading may want."""

    target: Target
    batch: Batch
    boundaries: tuple[int, ...]
    features: Tensor
    """[B, T, boundaries, Ht]"""
    best: Tensor
    """int64 [B, T]: the target's first choice after each token."""
    embedding: Tensor
    """[V, Ht]: the target's."""

    @staticmethod
    @torch.no_grad()
    def gather(target: Target, texts: Samples, boundaries: Sequence[int]) -> Evidence:
        """Runs the target over texts. Raises DataError when no chain of `STEPS` tokens fits into any of them."""
        if not len(texts) or int(texts.lengths.max()) < STEPS + 2:
            raise DataError("the target's answers are too short to try a drafter on; give other prompts")
        rows = [[i] for i in range(len(texts))]
        batch = batch_of(texts, rows, int(texts.lengths.max()), target.device)
        kept = tuple(sorted(set(boundaries)))
        features, hidden = features_of(batch, OnlineStates(target, kept))
        pieces = hidden.flatten(0, 1).split(max(1, _LOGITS // target.shape.vocab_size))
        best = torch.cat([target.logits(piece).argmax(-1) for piece in pieces]).view(hidden.shape[:2])
        found = Evidence(
            target,
            batch,
            kept,
            features.unflatten(-1, (len(kept), -1)),
            best,
            target.embed(torch.arange(target.shape.vocab_size, device=target.device)),
        )
        if not bool(found._slots(STEPS).any()):
            raise DataError("the target's answers are too short to try a drafter on; give other prompts")
        return found

    def part(self, every: int) -> Evidence:
        """Of every so many texts one."""
        batch = replace(
            self.batch,
            tokens=self.batch.tokens[::every],
            documents=self.batch.documents[::every],
            mask=self.batch.mask[::every],
        )
        part = replace(self, batch=batch, features=self.features[::every], best=self.best[::every])
        return part if bool(part._slots(STEPS).any()) else self

    @property
    def said(self) -> Tensor:
        """int64 [N]: the target's choices where its own answers stand."""
        return self.best[shifted(self.batch.mask, 1)]

    def _slots(self, steps: int) -> Tensor:
        """bool [B, T]: slots whose drafted tokens 1 .. steps all stand in an answer."""
        mask, documents = self.batch.mask, self.batch.documents
        inside = documents >= 0
        for step in range(steps):
            inside = inside & shifted(mask, step + 2) & (shifted(documents, step + 2) == documents)
        return inside

    @torch.no_grad()
    def measure(self, reading: Reading, steps: int = STEPS) -> Acceptance | None:
        """The chains of a reading; None when it cannot be run."""
        if reading.obstacle(self.target.shape) is not None:
            return None
        shape = reading.checkpoint.shape.paired(self.target.shape)
        head = self._module(reading.checkpoint, shape)
        batch, ids = self.batch, head.ids
        tokens = batch.tokens.roll(-reading.shift, dims=1) if reading.shift else batch.tokens
        at = [self.boundaries.index(tap) for tap in shape.taps or ()]
        slots = self._slots(STEPS).nonzero()
        right = torch.zeros(len(slots), dtype=torch.int64, device=slots.device)

        def use(step: int, normed: Tensor) -> None:
            alive = (right == step).nonzero()[:, 0]  # what is wrong once needs no further logits
            for part in alive.split(max(1, _LOGITS // len(ids))):
                row, column = slots[part, 0], slots[part, 1]
                chosen = ids[head.logits(normed[row, column]).argmax(-1)]
                right[part] += chosen == self.best[row, column + 1 + step]

        with torch.autocast(
            batch.tokens.device.type, torch.bfloat16, enabled=self.target.dtype == torch.bfloat16
        ):
            head(tokens, batch.documents, self.features[:, :, at].flatten(2), steps, use)
        return Acceptance(right, slots[:, 0], steps)

    def _module(self, checkpoint: Checkpoint, shape: Eagle3Shape) -> Eagle3Module:
        own = checkpoint.tensors.get(EMBEDDING)
        table = self.embedding if own is None else own.to(self.target.device, self.target.dtype)
        ids, positions = checkpoint.target_ids, self.batch.tokens.shape[1] + STEPS
        return Eagle3Module(shape, table, ids, positions, checkpoint.tensors)


def write_answers(engine: Engine, prompts: Sequence[str], max_new_tokens: int) -> Samples:
    """The engine's greedy answers to prompts, as samples whose mask marks the answers. Raises RequestError."""
    done = engine.generate_batch(prompts, SamplingParams(max_new_tokens=max_new_tokens), speculate=False)
    asked = [engine.tokens_of(prompt) for prompt in prompts]
    texts = [[*before, *each.token_ids] for before, each in zip(asked, done, strict=True)]
    mask = [
        [False] * len(before) + [True] * len(each.token_ids) for before, each in zip(asked, done, strict=True)
    ]
    starts = torch.tensor([0, *(len(text) for text in texts)]).cumsum(0)
    return Samples(
        torch.tensor([token for text in texts for token in text], dtype=torch.int32),
        torch.tensor([each for part in mask for each in part], dtype=torch.bool),
        starts,
    )
