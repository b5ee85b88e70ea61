"""The speed-up by acceptance, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.lab.break_even import Costs, DraftShape, speed_up

SUFFIXES = (".png", ".svg", ".pdf")


def draw(costs: Costs, shapes: Sequence[DraftShape], acceptance: float | None, path: Path) -> None:
    """Writes the plot; its format follows the name. Raises SlipstreamError."""
    if path.suffix not in SUFFIXES:
        raise SlipstreamError(f"cannot draw into {path}: its name must end in {', '.join(SUFFIXES)}")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.add_subplot()
    chances = [step / 100 for step in range(101)]
    for shape in shapes:
        axes.plot(chances, [speed_up(costs, shape, chance) for chance in chances], label=shape.name)
    axes.axhline(1, color="black", linewidth=1, linestyle="--", label="plain decoding")
    if acceptance is not None:
        axes.axvline(
            acceptance, color="grey", linewidth=1, linestyle=":", label=f"acceptance {acceptance:.2f}"
        )
    axes.set_xlim(0, 1)
    axes.set_ylim(0, None)
    axes.set_xlabel("chance that a drafted token is accepted, all before it accepted")
    axes.set_ylabel("speed, plain decoding = 1")
    axes.grid(linewidth=0.4)
    axes.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise SlipstreamError(f"cannot write {path}: {error.strerror}") from None
