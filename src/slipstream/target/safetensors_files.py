"""Checkpoints as Hugging Face writes them: config.json beside one or several safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.target.shape import ModelShape


class SafetensorsFolder:
    """An open checkpoint folder; tensors are read one by one. Raises ModelError naming file and tensor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: dict[str, Any] = _json(folder / "config.json")
        generation = folder / "generation_config.json"
        if generation.exists():  # it is the authority on what ends a text
            self.config["eos_token_id"] = _json(generation).get("eos_token_id") or self.config.get(
                "eos_token_id"
            )
        self.shape = ModelShape.from_config(self.config)
        self._files: dict[str, Any] = {}
        for path in self._paths():
            try:
                opened = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is not a whole safetensors file ({error}); copy it again") from None
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                self._files[name] = opened

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, by name."""
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}

    def fetch(self, name: str) -> Tensor:
        """A tensor, in the file's own dtype."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

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
