"""`slipstream drafter convert`: a drafter in another tool's dialect."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.errors import DataError

if TYPE_CHECKING:
    from slipstream.draft.eagle3.checkpoint import Checkpoint


class To(StrEnum):
    """Whose conventions are written: the values of `draft.eagle3.dialects.Dialect`, which takes torch to import."""

    EAGLE = "eagle"
    SPECFORGE = "specforge"
    SPECULATORS = "speculators"
    MODELOPT = "modelopt"


def convert(
    drafter: Annotated[str, typer.Argument(help="A drafter's folder, or eagle3, the one that is shipped.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    to: Annotated[To, typer.Option(help="The dialect to write.")],
    target: Annotated[
        str | None,
        typer.Option(help="The drafter's model: EAGLE's dialect has no layer ids, they must be its default."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write into a folder with files.")] = False,
) -> None:
    """Write a drafter in the dialect of EAGLE, SpecForge, speculators or ModelOpt, bit for bit the same weights."""
    from slipstream.draft.eagle3.checkpoint import load, save
    from slipstream.draft.eagle3.dialects import CONVENTIONS, Dialect
    from slipstream.draft.eagle3.drafter import drafter_folder

    folder, dialect = drafter_folder(drafter), Dialect(to.value)
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file; convert writes a folder")
    if out.exists() and any(out.iterdir()) and not overwrite:
        raise DataError(f"{out} holds other files; give another folder, or --overwrite")
    if out.exists() and out.resolve() == folder.resolve():
        raise DataError(f"{out} is the drafter itself; write another folder")
    found = load(folder)
    _refuse_other_weights(out, CONVENTIONS[dialect].weights)
    layers = None if target is None else _layers(target)
    paths = save(out, found, dialect, layers)
    print(f"{folder}, in the dialect of {found.dialect}, as {dialect}: {', '.join(str(p) for p in paths)}.")
    for line in _lost(found, dialect):
        print(line)


def _refuse_other_weights(out: Path, weights: str) -> None:
    """Whoever reads a folder takes all *.safetensors first: other weights must not lie beside the new ones."""
    others = [path.name for path in sorted(out.glob("*.safetensors")) if path.name != weights]
    if others:
        raise DataError(
            f"{out} holds {others[0]}, which would be read instead or as well; give another folder"
        )


def _layers(model: str) -> int:
    """Of the target. Raises ModelError."""
    from slipstream.target.gguf_file import GGUFFile
    from slipstream.target.named import find_config

    path = Path(model).expanduser()
    return GGUFFile(path).shape.layers if path.suffix == ".gguf" else find_config(model).shape.layers


def _lost(found: Checkpoint, dialect: str) -> list[str]:
    """What the dialect has no place for, and why that is no loss."""
    from slipstream.draft.eagle3.dialects import CONVENTIONS, Dialect

    lines = []
    if "t2d" in found.tensors and not CONVENTIONS[Dialect(dialect)].has_t2d:
        lines.append(f"{dialect} holds no t2d: it follows from d2t.")
    if dialect == Dialect.EAGLE and found.config.get("taps") is not None:
        lines.append("eagle holds no layer ids: they are its default for this target.")
    if dialect == Dialect.EAGLE and any(flag in found.config for flag in ("norm_output", "norm_before_fc")):
        lines.append("eagle holds no norm flags: all are off.")
    return lines
