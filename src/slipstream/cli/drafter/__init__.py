"""`slipstream drafter`: making drafters. One short file a command."""

from __future__ import annotations

import typer

from slipstream.cli.drafter import data
from slipstream.cli.drafter import eval as evaluation

app = typer.Typer(
    help="Make a drafter for a model: its training data, its training, its tests.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command("data")(data.data)
app.command("eval")(evaluation.evaluate)


@app.callback()
def drafter() -> None:
    """Make a drafter for a model."""
