"""Training samples: many token sequences one after another in three tensors, and how they are read from files."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.errors import DataError
from slipstream.target.tokenizer import Tokenizer
from slipstream.train.chat import Spoken, speak
from slipstream.train.dialects import Line, read_lines

LOOPING = 0.6
"""An answer of which a greater share of 4-grams repeats earlier ones is degenerate: easy to guess, and it teaches
nothing."""


@dataclass(frozen=True)
class Samples:
    """S samples of N tokens together."""

    tokens: Tensor
    """int32 [N], of all samples one after another."""
    mask: Tensor
    """bool [N]: the tokens that the loss is taken on."""
    starts: Tensor
    """int64 [S + 1]: where each sample begins; the last one is N."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        """The tokens and the mask of a sample, [T] each: views."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        begin, end = self.starts[index : index + 2].tolist()
        return self.tokens[begin:end], self.mask[begin:end]

    @property
    def lengths(self) -> Tensor:
        """int64 [S]."""
        return self.starts.diff()

    def select(self, index: Tensor) -> Samples:
        """The samples of an index (int64, any order, repeats allowed; or bool [S]), copied."""
        index = index.nonzero()[:, 0] if index.dtype == torch.bool else index
        lengths = self.lengths[index]
        starts = _starts(lengths)
        shift = (self.starts[:-1][index] - starts[:-1]).repeat_interleave(lengths)
        at = torch.arange(int(starts[-1])) + shift
        return Samples(self.tokens[at], self.mask[at], starts)

    @staticmethod
    def of_rows(tokens: Tensor, mask: Tensor) -> Samples:
        """From rows of one length: tokens [S, T] of any integer type, mask bool [S, T]."""
        count, length = tokens.shape
        starts = torch.arange(count + 1) * length
        return Samples(tokens.flatten().to("cpu", torch.int32), mask.flatten().cpu(), starts)

    def save(self, path: Path) -> None:
        """Writes a safetensors file, whole or not at all. Raises DataError when it cannot be written."""
        tensors = {"tokens": self.tokens, "mask": self.mask, "starts": self.starts}
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            save_file({name: each.contiguous() for name, each in tensors.items()}, unfinished)
            unfinished.replace(path)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path} cannot be written: {error}") from None
        finally:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)

    @staticmethod
    def load(path: Path) -> Samples:
        """Reads what `save` wrote. Raises DataError when it cannot be read or is something else."""
        try:
            found = load_file(path)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path} cannot be read: {error}") from None
        wanted = {"tokens": torch.int32, "mask": torch.bool, "starts": torch.int64}
        if {name: each.dtype for name, each in found.items()} != wanted:
            raise DataError(f"{path} holds no samples: it must have {', '.join(wanted)} of their types")
        tokens, mask, starts = (found[name] for name in wanted)
        is_whole = (
            [tokens.dim(), mask.dim(), starts.dim()] == [1, 1, 1]
            and len(tokens) == len(mask)
            and len(starts) > 0
            and [int(starts[0]), int(starts[-1])] == [0, len(tokens)]
            and bool((starts.diff() >= 0).all())
        )
        if not is_whole:
            raise DataError(f"{path} is damaged: its samples do not cover its tokens")
        return Samples(tokens, mask, starts)


@dataclass
class Report:
    """What became of the data that was read."""

    read: int = 0
    """Conversations, or other lines."""
    kept: int = 0
    """Samples; a conversation is more than one where its template rewrites earlier turns."""
    too_long: int = 0
    """Samples above the longest length: skipped, unless it was asked to cut them."""
    without_loss: int = 0
    """Samples without a token that the loss is taken on: skipped."""
    tokens: int = 0
    loss_tokens: int = 0


def read_samples(
    paths: Path | Sequence[Path],
    tokenizer: Tokenizer,
    max_length: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    vocabulary: int | None = None,
    cut: bool = False,
) -> tuple[Samples, Report]:
    """Reads jsonl files of any dialect (see `dialects`).

    max_length: samples of more tokens are skipped, or with `cut` end there; both are counted. progress: is told the
    bytes done and all bytes. vocabulary: the model's, where it is larger than the tokenizer's. Raises DataError for a
    broken line, an empty file, and when nothing is left.
    """
    paths = [paths] if isinstance(paths, Path) else list(paths)
    tokens, mask, lengths = array("i"), bytearray(), [0]
    report, done = Report(), 0
    total = sum(path.stat().st_size for path in paths if path.is_file())
    for path in paths:
        end = 0
        for line in read_lines(path):
            report.read += 1
            for spoken in _spoken(line, tokenizer, vocabulary or tokenizer.size):
                length = len(spoken.tokens)
                if length > max_length:
                    report.too_long += 1
                    if not cut:
                        continue
                    length = max_length
                marked = _mask(spoken.spans, length)
                if not any(marked):
                    report.without_loss += 1
                    continue
                tokens.extend(spoken.tokens[:length])
                mask += marked
                lengths.append(length)
            end = line.end
            if report.read % 64 == 0:
                progress(done + end, total)
        done += end
    progress(total, total)
    report.kept, report.tokens, report.loss_tokens = len(lengths) - 1, len(tokens), sum(mask)
    if not report.kept:
        raise DataError(
            f"{', '.join(map(str, paths))}: nothing is left to train on; {report.too_long} samples are longer than"
            f" {max_length} tokens, {report.without_loss} have no answer"
        )
    everything = torch.frombuffer(tokens, dtype=torch.int32)
    return Samples(
        everything, torch.frombuffer(mask, dtype=torch.bool), _starts(torch.tensor(lengths[1:]))
    ), report


def draft_vocabulary(samples: Samples, vocabulary: int, size: int) -> tuple[Tensor, float]:
    """d2t of the most frequent loss tokens, and the share of all loss tokens that they cover.

    d2t: int64 [size], offsets (target id = draft id + offset) by which the ids ascend. vocabulary: the target's.
    """
    counts = torch.bincount(samples.tokens[samples.mask], minlength=vocabulary)
    ids = counts.argsort(descending=True, stable=True)[:size].sort().values
    coverage = float(counts[ids].sum() / counts.sum().clamp_min(1))
    return ids - torch.arange(size), coverage


def loops(tokens: Sequence[int] | Tensor) -> float:
    """The share of an answer's 4-grams that repeat an earlier one; 0 for less than four tokens."""
    ids = tokens.tolist() if isinstance(tokens, Tensor) else tokens
    grams = max(0, len(ids) - 3)
    return 1 - len(set(zip(ids, ids[1:], ids[2:], ids[3:], strict=False))) / grams if grams else 0.0


def _starts(lengths: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def _mask(spans: Sequence[tuple[int, int]], length: int) -> bytearray:
    marked = bytearray(length)
    for begin, end in spans:
        end = min(end, length)
        marked[begin:end] = b"\1" * (end - begin)
    return marked


def _spoken(line: Line, tokenizer: Tokenizer, vocabulary: int) -> list[Spoken]:
    """The samples of a line."""
    if line.tokens is not None:
        wrong = [token for token in line.tokens if not 0 <= token < vocabulary]
        if wrong:
            raise line.fail(f"token {wrong[0]} is out of range; the model's go from 0 to {vocabulary - 1}")
        return [Spoken(line.tokens, line.loss)]
    if line.text is not None:
        ids = tokenizer.encode(line.text)
        return [Spoken(ids, [(0, len(ids))])]
    try:
        return speak(tokenizer, line.messages)
    except DataError as error:
        raise line.fail(str(error)) from None
