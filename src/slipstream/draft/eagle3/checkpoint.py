"""EAGLE-3 drafters on disk, in any of four dialects (`dialects.py`)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.draft.eagle3.config import Config, read_shape, write_shape
from slipstream.draft.eagle3.dialects import (
    CONVENTIONS,
    Dialect,
    common_name,
    dialect_name,
    dialect_of,
    read_config,
    write_config,
)
from slipstream.draft.eagle3.shape import Eagle3Shape, weight_names
from slipstream.errors import ModelError

_OPTIONAL = ("t2d", "embed_tokens.weight")


@dataclass(frozen=True)
class Checkpoint:
    """A drafter as it was read or trained."""

    config: Config
    """In the common form (`config.py`)."""
    tensors: Mapping[str, Tensor]
    """By the names of `shape.weight_names`; t2d and embed_tokens.weight where the file has them."""
    dialect: Dialect = Dialect.SPECFORGE

    @staticmethod
    def of(shape: Eagle3Shape, tensors: Mapping[str, Tensor]) -> Checkpoint:
        """Of a drafter that was made here. tensors: what `weight_names` asks for."""
        return Checkpoint(write_shape(shape), dict(tensors))

    @cached_property
    def shape(self) -> Eagle3Shape:
        return read_shape(self.config)

    @property
    def target_ids(self) -> Tensor:
        """int64 [Vd]: each draft token as the target numbers it; d2t holds offsets."""
        offsets = self.tensors.get("d2t")
        ids = torch.arange(self.shape.draft_vocab_size)
        return ids if offsets is None else ids + offsets.to(torch.int64)

    def marked(self) -> Tensor:
        """bool [V]: the target's tokens that d2t leads to, which is what t2d must be."""
        ids = self.target_ids
        t2d = torch.zeros(self.shape.vocab_size, dtype=torch.bool)
        t2d[ids[(ids >= 0) & (ids < len(t2d))]] = True
        return t2d

    def changed(self, tensors: Mapping[str, Tensor] | None = None, **config: object) -> Checkpoint:
        """The same with some entries of the common form, or some tensors, replaced."""
        return replace(self, config={**self.config, **config}, tensors={**self.tensors, **(tensors or {})})

    def problems(self) -> list[str]:
        """What cannot be right about its tensors and its map of tokens, the gravest first; empty when all is well."""
        wanted = weight_names(self.shape)
        found = [f"the tensor {name} is missing" for name in wanted if name not in self.tensors]
        found += [
            f"the tensor {name} is not one that such a drafter has"
            for name in self.tensors
            if name not in wanted and name not in _OPTIONAL
        ]
        sizes = {**wanted, "t2d": (self.shape.vocab_size,)}
        sizes["embed_tokens.weight"] = (self.shape.vocab_size, self.shape.hidden_size)
        found += [
            f"{name} is {list(tensor.shape)}, the config asks for {list(sizes[name])}"
            for name, tensor in self.tensors.items()
            if name in sizes and tuple(tensor.shape) != sizes[name]
        ]
        return found or self._map_problems()

    def _map_problems(self) -> list[str]:
        ids, vocabulary = self.target_ids, self.shape.vocab_size
        found = []
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocabulary):
            where = int(((ids < 0) | (ids >= vocabulary)).nonzero()[0])
            found.append(
                f"d2t leads out of the target's vocabulary of {vocabulary}, first at draft token {where}"
            )
        if not bool((ids[1:] > ids[:-1]).all()):
            found.append("d2t is not sorted as offsets are; it may hold absolute ids")
        if not found and "t2d" in self.tensors:
            t2d = self.tensors["t2d"].bool()
            if not torch.equal(t2d, self.marked()):
                found.append(f"t2d marks {int(t2d.sum())} tokens, which are not those that d2t leads to")
        return found


def read(folder: Path) -> Checkpoint:
    """Reads a drafter in any dialect; its map of tokens is not checked. Raises ModelError."""
    raw = _read_json(folder / "config.json")
    tensors, weights = _read_tensors(folder)
    dialect = dialect_of(raw, tensors, weights)
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith("rotary_emb.inv_freq"):
            named[common_name(name)] = tensor
    config = read_config(raw, dialect)
    if "fc.bias" in named:
        config["fc_bias"] = True
    if "layers.1.hidden_norm.weight" in named and "layers.1.input_layernorm.weight" not in named:
        config["later_norm"] = "hidden_norm"
    return Checkpoint(config, named, dialect)


def load(folder: Path) -> Checkpoint:
    """Reads a drafter that can draft. Raises ModelError for whatever is missing, too much, or cannot be right."""
    found = read(folder)
    if problems := found.problems():
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ModelError(f"{folder}: {problems[0]}{more}; slipstream drafter check may tell more")
    return found


def save(
    folder: Path, checkpoint: Checkpoint, dialect: Dialect | None = None, target_layers: int | None = None
) -> list[Path]:
    """Writes a drafter, each file whole or not at all; returns the paths.

    Raises ModelError for what a dialect cannot say.
    dialect: the checkpoint's own unless another is named. target_layers: see `dialects.write_config`.
    """
    dialect = dialect or checkpoint.dialect
    conventions = CONVENTIONS[dialect]
    config = write_config(checkpoint.config, dialect, target_layers)
    config.setdefault("dtype", str(checkpoint.tensors["lm_head.weight"].dtype).removeprefix("torch."))
    tensors = {
        dialect_name(name, dialect): tensor.contiguous()
        for name, tensor in checkpoint.tensors.items()
        if name != "t2d"
    }
    if conventions.has_t2d and "d2t" in tensors:
        t2d = checkpoint.tensors.get("t2d")
        tensors["t2d"] = checkpoint.marked() if t2d is None else t2d
    folder.mkdir(parents=True, exist_ok=True)
    weights, described = folder / conventions.weights, folder / "config.json"
    temporary = weights.with_name(f".{weights.name}.tmp")
    if weights.suffix == ".bin":
        torch.save(tensors, temporary)
    else:
        save_file(tensors, temporary, metadata={"format": "pt"})
    os.replace(temporary, weights)
    temporary = described.with_name(".config.json.tmp")
    temporary.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, described)
    return [described, weights]


def _read_json(path: Path) -> Config:
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} is not a drafter: it holds no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds no object")
    return found


def _read_tensors(folder: Path) -> tuple[dict[str, Tensor], str]:
    """All tensors of a folder and the name of (one of) the files that they were in."""
    files = sorted(folder.glob("*.safetensors"))
    pickled = folder / "pytorch_model.bin"
    tensors: dict[str, Tensor] = {}
    try:
        for path in files:
            tensors |= load_file(path)
        if not files:
            files = [pickled]
            tensors = torch.load(pickled, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ModelError(
            f"{folder} is not a drafter: it holds neither *.safetensors nor {pickled.name}"
        ) from None
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{files[-1]} cannot be read, it may be truncated: {error}") from None
    except Exception as error:  # torch raises many kinds for a damaged or a dangerous file
        raise ModelError(f"{pickled} cannot be read as weights alone: {type(error).__name__}") from None
    if not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ModelError(f"{files[-1]} holds more than tensors")
    return tensors, files[-1].name
