"""How good a drafter is, teacher-forced over given conversations; `drafted.py` runs the real cycle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, distributed

from slipstream.draft.eagle3.checkpoint import Checkpoint
from slipstream.errors import DataError, ModelError
from slipstream.target.family import Target
from slipstream.train.acceptance import Acceptance, sums_of
from slipstream.train.eagle3_model import Eagle3Module
from slipstream.train.losses import States, features_of, goals_of, outcome_of
from slipstream.train.packing import Batch, batch_of, pack_epoch
from slipstream.train.samples import LOOPING, Samples, loops

Progress = Callable[[int, int], None]


def module_of(checkpoint: Checkpoint, target: Target, positions: int) -> Eagle3Module:
    """A drafter as the module that is trained. positions: of the longest sample, and the steps. Raises ModelError."""
    shape = checkpoint.shape.paired(target.shape)
    embedding = checkpoint.tensors.get("embed_tokens.weight")
    if embedding is None:
        if shape.hidden_size != target.shape.hidden_size:
            raise ModelError("the drafter brings no embedding of its own, and the target's has another width")
        embedding = target.embed(torch.arange(target.shape.vocab_size, device=target.device))
    embedding = embedding.to(target.device, target.dtype)
    return Eagle3Module(shape, embedding, checkpoint.target_ids, positions, checkpoint.tensors)


@torch.no_grad()
def teacher_forced(
    module: Eagle3Module,
    target: Target,
    samples: Samples,
    states: States,
    steps: int = 5,
    row_length: int = 1024,
    *,
    rows: int = 8,
    precision: str = "float32",
    progress: Progress = lambda done, total: None,
) -> Acceptance:
    """The training-time test over samples, nothing learnt.

    states: of the samples by their numbers here. row_length: tokens of a row, in which samples are packed. rows: of one
    forward. precision: float32, or bfloat16 for the multiplications. Where torch.distributed runs, the ranks share the
    work, all must call this, and all get the same. Raises DataError for no samples, and for one that is too long.
    """
    longest = int(samples.lengths.max()) if len(samples) else 0
    if not longest:
        raise DataError("there is no sample to evaluate the drafter on")
    most = min(row_length, len(module.cos) - steps + 1)
    if longest > most:
        raise DataError(f"a sample has {longest} tokens; the evaluation goes up to {most}")
    is_parallel = distributed.is_available() and distributed.is_initialized()
    rank, ranks = (distributed.get_rank(), distributed.get_world_size()) if is_parallel else (0, 1)
    sums = torch.zeros(len(dataclasses.fields(Acceptance)), steps, dtype=torch.float64, device=target.device)
    is_low = precision == "bfloat16"
    mine = list(_batches(samples, row_length, rows, rank, ranks))
    for number, (inside, counts) in enumerate(mine):
        progress(number, len(mine))
        batch = _narrow(samples, inside, target.device, counts)
        with torch.autocast(target.device.type, torch.bfloat16, enabled=is_low):
            features, hidden = features_of(batch, states)
            goals = goals_of(target, hidden, module.ids, torch.bfloat16 if is_low else torch.float32)
            sums += sums_of(outcome_of(module, batch, features, goals, steps))
    progress(len(mine), len(mine))
    if ranks > 1:
        distributed.all_reduce(sums)
    return Acceptance.of(sums)


def _batches(
    samples: Samples, row_length: int, rows: int, rank: int, ranks: int
) -> Iterator[tuple[list[list[int]], bool]]:
    """A rank's batches, as many as every other rank's, since sharded weights are gathered by all at once; and whether
    each counts, or only keeps the others company."""
    index = samples.lengths.nonzero()[:, 0].tolist()
    packed = pack_epoch(samples.lengths[index].tolist(), row_length, 0, 0)
    every = [
        [[index[i] for i in row] for row in packed[at : at + rows]] for at in range(0, len(packed), rows)
    ]
    for at in range(rank, rank + len(every) + -len(every) % ranks, ranks):
        yield (every[at], True) if at < len(every) else (every[0], False)


def _narrow(samples: Samples, rows: list[list[int]], device: torch.device, counts: bool) -> Batch:
    """A batch no wider than its fullest row."""
    width = max(int(samples.lengths[row].sum()) for row in rows)
    batch = batch_of(samples, rows, width, device)
    return batch if counts else dataclasses.replace(batch, mask=torch.zeros_like(batch.mask))


def looping(samples: Samples) -> Tensor:
    """bool [S]: the samples in which an answer repeats itself so much that it says little about a drafter."""
    found = torch.zeros(len(samples), dtype=torch.bool)
    for number in range(len(samples)):
        tokens, mask = samples.sample(number)
        edges = torch.cat([mask.new_zeros(1), mask, mask.new_zeros(1)]).int().diff().nonzero()[:, 0].tolist()
        answers = zip(edges[::2], edges[1::2], strict=True)
        found[number] = any(loops(tokens[begin:end]) > LOOPING for begin, end in answers)
    return found
