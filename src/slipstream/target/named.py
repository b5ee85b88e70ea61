"""Shapes that are known by name: the numbers of public configs, so that a plan needs no download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slipstream.errors import ModelError
from slipstream.target.config import ModelConfig, read_config

_FOLDER = Path(__file__).parent / "shapes"


def names() -> list[str]:
    """All names, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def find_config(model: str) -> ModelConfig:
    """The config of a name, a folder or a config.json. Raises ModelError."""
    if model in names():
        return read_config(_read(_FOLDER / f"{model}.json"))
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json" and path.exists():
        return read_config(_read(path))
    raise ModelError(
        f"unknown model {model!r}; give a folder with a config.json, such a file, or one of {', '.join(names())}"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} is not a JSON object")
    return found
