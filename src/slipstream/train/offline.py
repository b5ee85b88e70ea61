"""The target's states on disk: computed once, read in every epoch. They are large, so their size is said first."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.errors import DataError
from slipstream.train.losses import States
from slipstream.train.samples import Samples

_SHARD_BYTES = 1 << 30
_INDEX = "index.json"


def states_bytes(samples: Samples, hidden_size: int, taps: int, dtype: torch.dtype) -> int:
    """Bytes on disk: every token has the states at the taps and the final one."""
    return len(samples.tokens) * (taps + 1) * hidden_size * dtype.itemsize


def write_states(
    folder: Path,
    samples: Samples,
    states: States,
    bytes_all: int,
    described: dict[str, Any],
    progress: Callable[[int, int], None],
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """Writes the states of all samples, shard by shard, going on after those that are there; ranks share the shards.

    described: what they are of; a folder that holds those of something else is refused. progress: is told the samples
    done and all. Raises DataError, before anything is computed when the disk has too little room.
    """
    per_sample = max(1, bytes_all // max(1, len(samples)))
    size = max(1, _SHARD_BYTES // per_sample)
    described = {**described, "samples": len(samples), "shard": size}
    try:
        _claim(folder, described, rank)
    except OSError as error:
        raise DataError(f"{folder} cannot hold the states: {error}") from None
    shards = [(begin, min(begin + size, len(samples))) for begin in range(0, len(samples), size)]
    missing = [(number, span) for number, span in enumerate(shards) if not _shard(folder, number).exists()]
    needed = sum(end - begin for _, (begin, end) in missing) * per_sample
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(f"the states need {needed / 1e9:.1f} GB more, {folder} has {free / 1e9:.1f} GB free")
    for number, (begin, end) in missing:
        if number % ranks != rank:
            continue
        progress(begin, len(samples))
        _write_shard(_shard(folder, number), samples, states, begin, end)
    progress(len(samples), len(samples))


def _claim(folder: Path, described: dict[str, Any], rank: int) -> None:
    """Makes the folder one of these states, unless it is one of others."""
    folder.mkdir(parents=True, exist_ok=True)
    index = folder / _INDEX
    if index.exists():
        if _read_index(folder) != described:
            raise DataError(
                f"{folder} holds the states of other samples or of another target; give another folder"
            )
    elif rank == 0:
        temporary = folder / f".{_INDEX}.tmp"
        temporary.write_text(json.dumps(described) + "\n", encoding="utf-8")
        os.replace(temporary, index)


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder / _INDEX} cannot be read ({error}); remove the folder to compute its states anew"
        ) from None
    return found


def _write_shard(path: Path, samples: Samples, states: States, begin: int, end: int) -> None:
    features, hidden = [], []
    for first in range(begin, end, 64):
        numbers = range(first, min(first + 64, end))
        for its_features, its_hidden in states(numbers, [samples.sample(i)[0].long() for i in numbers]):
            features.append(its_features.cpu())
            hidden.append(its_hidden.cpu())
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        save_file({"features": torch.cat(features), "hidden": torch.cat(hidden)}, temporary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise DataError(f"{path} cannot be written: {error}; what was written before is kept") from None


class OfflineStates:
    """What `write_states` wrote, read span by span."""

    def __init__(self, folder: Path, samples: Samples, device: torch.device) -> None:
        described = _read_index(folder)
        self._shard_size, self._starts, self._device = int(described["shard"]), samples.starts, device
        count = -(-len(samples) // self._shard_size)
        self._files = [_open(_shard(folder, number)) for number in range(count)]

    def __call__(self, samples: Sequence[int], tokens: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """For each sample number: features [T, F] and final states [T, H]; the tokens are not looked at."""
        found = []
        for sample in samples:
            file = self._files[sample // self._shard_size]
            base = self._starts[sample // self._shard_size * self._shard_size]
            begin, end = (int(at - base) for at in self._starts[sample : sample + 2])
            features, hidden = (file.get_slice(name)[begin:end] for name in ("features", "hidden"))
            found.append((features.to(self._device), hidden.to(self._device)))
        return found


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} is not whole ({error}); remove it to compute its states anew") from None


def _shard(folder: Path, number: int) -> Path:
    return folder / f"states-{number:05d}.safetensors"
