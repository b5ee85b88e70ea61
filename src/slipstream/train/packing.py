"""Which samples lie side by side in which rows of a batch, and in which order they come: a function of a seed alone."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.train.samples import Samples

_WINDOW = 4096
"""Samples that are packed together: enough to fill rows well, and few enough to keep the order random."""


@dataclass(frozen=True)
class Batch:
    """Rows of samples side by side, padded at the end: int64 and bool [B, T]."""

    samples: list[int]
    """The numbers of all samples, row by row."""
    rows: list[int]
    """The row of each sample."""
    places: list[int]
    """Where each sample begins in its row."""
    tokens: Tensor
    documents: Tensor
    """A number of its own for each sample; -1 is padding."""
    mask: Tensor
    """Tokens that the loss is taken on."""


def pack_epoch(lengths: Sequence[int], row_length: int, seed: int, epoch: int) -> list[list[int]]:
    """The rows of one epoch: sample numbers whose lengths together stay within row_length.

    Samples are shuffled, then packed window by window: the longest first, each into the fullest row that has room
    (best fit decreasing); then the rows are shuffled.
    """
    draw = torch.Generator().manual_seed((seed << 20) + epoch)
    order = torch.randperm(len(lengths), generator=draw).tolist()
    rows: list[list[int]] = []
    for begin in range(0, len(order), _WINDOW):
        room: list[tuple[int, int]] = []  # (free tokens, row), ascending
        for sample in sorted(order[begin : begin + _WINDOW], key=lambda s: -lengths[s]):
            at = bisect_left(room, (lengths[sample], -1))
            if at == len(room):
                rows.append([sample])
                free, row = row_length - lengths[sample], len(rows) - 1
            else:
                free, row = room.pop(at)
                rows[row].append(sample)
                free -= lengths[sample]
            insort(room, (free, row))
    return [rows[i] for i in torch.randperm(len(rows), generator=draw).tolist()]


def batch_of(samples: Samples, rows: Sequence[Sequence[int]], row_length: int, device: torch.device) -> Batch:
    """The tensors of some rows."""
    shape = (len(rows), row_length)
    tokens, documents = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -1, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.bool)
    numbers: list[int] = []
    at_rows: list[int] = []
    places: list[int] = []
    for row, inside in enumerate(rows):
        place = 0
        for sample in inside:
            its_tokens, its_mask = samples.sample(sample)
            span = slice(place, place + len(its_tokens))
            tokens[row, span], mask[row, span], documents[row, span] = (
                its_tokens.long(),
                its_mask,
                len(numbers),
            )
            numbers.append(sample)
            at_rows.append(row)
            places.append(place)
            place += len(its_tokens)
    return Batch(
        numbers, at_rows, places, tokens.to(device, non_blocking=True), documents.to(device), mask.to(device)
    )


def updates(
    samples: Samples, row_length: int, rows_an_update: int, seed: int, epochs: int
) -> Iterator[list[list[int]]]:
    """The rows of every update, epoch by epoch; what does not fill an update is left out of its epoch."""
    lengths = samples.lengths.tolist()
    for epoch in range(epochs):
        rows = pack_epoch(lengths, row_length, seed, epoch)
        for begin in range(0, len(rows) - rows_an_update + 1, rows_an_update):
            yield rows[begin : begin + rows_an_update]


def count_updates(samples: Samples, row_length: int, rows_an_update: int, seed: int, epochs: int) -> int:
    """How many `updates` there will be."""
    lengths = samples.lengths.tolist()
    return sum(len(pack_epoch(lengths, row_length, seed, epoch)) // rows_an_update for epoch in range(epochs))
