"""What a training needs to go on where it stopped, in one safetensors file that is whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.errors import DataError
from slipstream.train.ranks import settle
from slipstream.train.trainer import Trainer, full

STATE = "training.state"
"""Not named *.safetensors: whoever loads the drafter would take it for a part of its weights."""


class DiskError(DataError):
    """Something could not be written."""


@contextmanager
def writing(path: Path, kept: str) -> Iterator[None]:
    """Around what writes `path`: a full disk is one line that says what is kept, and leaves no half file behind."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # a RuntimeError is torch.save's
        for half in path.parent.glob(".*.tmp"):
            with suppress(OSError):
                half.unlink()
        raise DiskError(f"{path} cannot be written ({error}); {kept}") from None


def settings_of(trainer: Trainer, **digests: str) -> dict[str, Any]:
    """All that must be the same for a training to continue. digests: of the data, the target and the like, by name."""
    return {
        **digests,
        "recipe": asdict(trainer.recipe),
        "ranks": trainer.ranks,
        "shape": repr(trainer.module.shape),
        "samples": len(trainer.samples),
    }


def save_state(folder: Path, trainer: Trainer, settings: dict[str, Any]) -> None:
    """Writes the weights, the optimiser's moments and how far it has come; rank 0 writes, all must call it.

    Raises DiskError; the state before is then still there.
    """
    settle(trainer.module)
    tensors: dict[str, Tensor] = {}
    for name, parameter in trainer.module.named_parameters():
        tensors[f"weight.{name}"] = full(parameter.detach())
        for kind, value in trainer.optimiser.state.get(parameter, {}).items():
            tensors[f"{kind}.{name}"] = full(value)
    tensors["ids"] = trainer.module.ids
    if trainer.rank:
        return
    described = {"done": str(trainer.done), "settings": json.dumps(settings, sort_keys=True)}
    temporary = folder / f".{STATE}.tmp"
    path = folder / STATE
    with writing(path, f"the state before is kept, if there was one; {trainer.done} updates were done"):
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in tensors.items()},
            temporary,
            metadata=described,
        )
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)


def load_state(folder: Path, trainer: Trainer, settings: dict[str, Any]) -> bool:
    """Continues from what `save_state` wrote; False when there is nothing.

    Raises DataError when it is damaged or of another training.
    """
    path = folder / STATE
    if not path.exists():
        return False
    try:
        with safe_open(path, framework="pt", device=str(trainer.device)) as file:
            described = file.metadata() or {}
            _compare(path, json.loads(described["settings"]), settings)
            names = set(file.keys())
            _fill(trainer, file, names)
            trainer.done = int(described["done"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}; begin anew with --overwrite") from None
    return True


@torch.no_grad()
def _fill(trainer: Trainer, file: Any, names: set[str]) -> None:
    if not torch.equal(file.get_tensor("ids"), trainer.module.ids):
        raise ValueError("its draft vocabulary is another one")
    for name, parameter in trainer.module.named_parameters():
        _copy(parameter, file.get_tensor(f"weight.{name}"))
        if f"step.{name}" in names:
            state = trainer.optimiser.state[parameter]
            state["step"] = file.get_tensor(f"step.{name}").cpu()
            for kind in ("exp_avg", "exp_avg_sq"):
                state[kind] = torch.zeros_like(parameter)
                _copy(state[kind], file.get_tensor(f"{kind}.{name}"))


def _copy(into: Tensor, whole: Tensor) -> None:
    """Copies a whole tensor into one that may be sharded over the ranks."""
    mesh = getattr(into, "device_mesh", None)
    if mesh is not None:
        from torch.distributed.tensor import distribute_tensor

        whole = distribute_tensor(whole, mesh, into.placements)  # type: ignore[attr-defined]
    into.copy_(whole)


def _compare(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    now = json.loads(json.dumps(now))
    flat_before, flat_now = ({**each.get("recipe", {}), **each} for each in (before, now))
    changed = [
        f"{key} was {flat_before.get(key)!r} and is {flat_now.get(key)!r}"
        for key in {**flat_before, **flat_now}
        if key != "recipe" and flat_before.get(key) != flat_now.get(key)
    ]
    if changed:
        raise DataError(
            f"{path} is of a training with other settings ({'; '.join(changed)}); go on with those, or begin anew"
            " with --overwrite"
        )
