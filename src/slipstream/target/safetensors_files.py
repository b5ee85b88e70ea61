"""Checkpoints as Hugging Face writes them: config.json beside one or several safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.kernels.linear import GROUP, Weight
from slipstream.target.config import read_config
from slipstream.target.quantisation import fp8_to_float, unpack_int4
from slipstream.target.weights import Part, cut


class SafetensorsFolder:
    """An open checkpoint folder; tensors are read one by one, or in parts. Raises ModelError naming file and tensor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: dict[str, Any] = _json(folder / "config.json")
        generation = folder / "generation_config.json"
        if generation.exists():  # it is the authority on what ends a text
            self.config["eos_token_id"] = _json(generation).get("eos_token_id") or self.config.get(
                "eos_token_id"
            )
        self._model = read_config(self.config)
        self.shape, self.notes = self._model.shape, self._model.notes
        self._files: dict[str, tuple[Any, str]] = {}
        """By our name: the open file, and the name in it."""
        for path in self._paths():
            try:
                opened = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is not a whole safetensors file ({error}); copy it again") from None
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                if not name.startswith(self._model.ignored):
                    self._files[self._without_prefix(name)] = (opened, name)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight, by name; a quantised one is named and sized as if it were not."""
        sizes: dict[str, tuple[int, ...]] = {}
        for name in self._files:
            if name.endswith((".weight_packed", ".weight_shape", ".weight_scale", ".weight_scale_inv")):
                if name.endswith(".weight_packed"):
                    rows, words = self._slice(name).get_shape()
                    sizes[name.removesuffix("_packed")] = (rows, words * 8)
                continue
            sizes[name] = tuple(self._slice(name).get_shape())
        return sizes

    def fetch(self, name: str, part: Part | None = None) -> Weight:
        """A tensor, in the file's own dtype where it is not quantised; with `part`, only that piece is read."""
        if f"{name}_packed" in self._files:
            return self._fetch_int4(name, part)
        weight = self._read(name, part)
        if f"{name}_scale_inv" in self._files:
            return self._dequantised_fp8(name, weight, part)
        if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ModelError(
                f"{self.folder}: tensor {name} is {weight.dtype}, which the config does not explain"
            )
        return weight

    def _dequantised_fp8(self, name: str, weight: Tensor, part: Part | None) -> Tensor:
        quantisation = self._model.quantisation
        if quantisation is None or quantisation.format != "fp8":
            raise ModelError(
                f"{self.folder}: tensor {name} has fp8 scales, but the config names no fp8 quantisation"
            )
        scale = self._read(f"{name}_scale_inv", None)
        first = [0, 0]
        if part:
            first[part.dim] = part.start
        return fp8_to_float(weight, scale, quantisation.block, (first[0], first[1]))

    def _fetch_int4(self, name: str, part: Part | None) -> Weight:
        quantisation = self._model.quantisation
        if quantisation is None or quantisation.format != "int4":
            raise ModelError(
                f"{self.folder}: tensor {name} is packed, but the config names no int4 quantisation"
            )
        whole = part.widened(GROUP) if part else None  # a piece of a group would be left without its scale
        words, scale = (whole.scaled(8), whole.scaled(GROUP)) if whole else (None, None)
        weight = unpack_int4(self._read(f"{name}_packed", words), self._read(f"{name}_scale", scale))
        return cut(weight, part, whole)

    def _read(self, name: str, part: Part | None) -> Tensor:
        if name not in self._files:
            raise ModelError(f"{self.folder} lacks the tensor {name}")
        opened, stored = self._files[name]
        try:
            if part is None:
                tensor: Tensor = opened.get_tensor(stored)
                return tensor
            whole, own = opened.get_slice(stored), slice(part.start, part.stop)
            selected: Tensor = whole[own] if part.dim == 0 else whole[:, own]
            return selected
        except SafetensorError as error:
            raise ModelError(f"{self.folder}: tensor {name} cannot be read ({error})") from None

    def _slice(self, name: str) -> Any:
        opened, stored = self._files[name]
        return opened.get_slice(stored)

    def _without_prefix(self, name: str) -> str:
        for prefix in self._model.prefixes:
            if prefix and name.startswith(prefix):
                rest = name.removeprefix(prefix)
                # transformers keeps the inner model's layers right below its own name, without another "model."
                return rest if rest.startswith(("model.", "lm_head.")) else f"model.{rest}"
        return name

    def _paths(self) -> list[Path]:
        index = self.folder / "model.safetensors.index.json"
        single = self.folder / "model.safetensors"
        if index.exists():
            weight_map = _json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ModelError(f"{index} has no weight_map")
            names = sorted({str(name) for name in weight_map.values()})
            if any(Path(name).name != name for name in names):
                raise ModelError(f"{index} names files outside its own folder")
            paths = [self.folder / name for name in names]
            missing = [path.name for path in paths if not path.exists()]
            if missing:
                raise ModelError(f"{self.folder} lacks {', '.join(missing)}, which its index names")
            return paths
        if single.exists():
            return [single]
        if any(self.folder.glob("*.bin")) or any(self.folder.glob("*.pt")):
            raise ModelError(
                f"{self.folder} holds pickled weights, which can run code when they are opened; convert them with"
                " transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
            )
        raise ModelError(f"{self.folder} holds no model.safetensors")


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} holds no {path.name}, so it is not a model") from None
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} is not a JSON object")
    return found
