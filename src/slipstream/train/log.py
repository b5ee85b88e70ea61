"""The figures of a training, on disk as they come: updates.jsonl, and TensorBoard's where it is installed."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from slipstream.train.acceptance import Acceptance
from slipstream.train.board import Board
from slipstream.train.ranks import Ranks
from slipstream.train.resume import writing
from slipstream.train.trainer import Trainer, Update

UPDATES = "updates.jsonl"
_KEPT = "the last saved state of the training is kept"


class Log:
    """Of one run of a training; the first rank writes it."""

    def __init__(self, folder: Path, ranks: Ranks, trainer: Trainer) -> None:
        """Figures of updates that come again, because no state was saved after them, are taken out."""
        self._folder, self._trainer, self._began = folder, trainer, perf_counter()
        self._tokens, self._last = 0, perf_counter()
        self._file: Any = None
        self._board: Board | None = None
        self._evaluated: set[int] = set()
        if not ranks.is_first:
            return
        path = folder / UPDATES
        with writing(path, _KEPT):
            lines = _lines(path, trainer.done)
            self._evaluated = {line["update"] for line in lines if line["of"] == "held_out"}
            temporary = folder / f".{UPDATES}.tmp"
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
            os.replace(temporary, path)
            self._file = path.open("a", encoding="utf-8")
            with contextlib.suppress(ImportError):
                self._board = Board(folder / "tensorboard", trainer.done + 1)

    def update(self, update: Update) -> float:
        """Returns the tokens a second."""
        now = perf_counter()
        elapsed_s, self._last = now - self._last, now
        self._tokens += update.tokens
        speed = update.tokens / elapsed_s
        figures = {
            "loss": update.loss,
            "gradient_norm": update.norm,
            "lr": update.lr,
            "tokens_a_second": speed,
        }
        figures |= {f"acceptance_{i + 1}": rate for i, rate in enumerate(update.accepted)}
        self._put(update.number, "train", figures)
        return speed

    def evaluation(self, number: int, found: Acceptance) -> None:
        """The figures on what was held out, after an update; said once, though a finished training is run again."""
        figures = {f"acceptance_{i + 1}": rate for i, rate in enumerate(found.conditional)}
        if number not in self._evaluated:
            self._evaluated.add(number)
            self._put(number, "held_out", figures | {"tokens_a_cycle": found.tokens_a_cycle})
        self._last = perf_counter()

    def _put(self, number: int, where: str, figures: dict[str, float]) -> None:
        with writing(self._folder / UPDATES, _KEPT):
            if self._file is not None:
                self._file.write(json.dumps({"update": number, "of": where, **figures}) + "\n")
                self._file.flush()
            if self._board is not None:
                self._board.put(number, where, figures)

    @property
    def elapsed_s(self) -> float:
        """Since this run began to train."""
        return perf_counter() - self._began

    def facts(self) -> dict[str, Any]:
        """How fast this run was, and what memory it took."""
        is_cuda = self._trainer.device.type == "cuda"
        return {
            "trained_s": self.elapsed_s,
            "tokens_a_second": self._tokens / self.elapsed_s,
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if is_cuda else _peak_rss_gb(),
        }

    def close(self) -> None:
        """Writes what is still to be written."""
        with writing(self._folder / UPDATES, _KEPT):
            if self._file is not None:
                self._file.close()
            if self._board is not None:
                self._board.close()


def _lines(path: Path, done: int) -> list[dict[str, Any]]:
    """The lines of the updates up to one; what a kill has torn off is left out."""
    if not path.exists():
        return []
    found: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            read = json.loads(line)
            is_kept = read["update"] <= done and read["of"] in ("train", "held_out")
        except (ValueError, KeyError, TypeError):
            continue
        if is_kept:
            found.append(read)
    return found


def _peak_rss_gb() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
