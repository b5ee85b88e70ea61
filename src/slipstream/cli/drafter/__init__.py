"""`slipstream drafter`: making drafters, and mending them. One short file a command."""

from __future__ import annotations

import typer

from slipstream.cli.drafter import check, convert, data, eval, train

app = typer.Typer(
    help="Make a drafter for a model: its data, its training, its figures; and find out why one does not pay.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command("check")(check.check)
app.command("eval")(eval.evaluate)
app.command("data")(data.data)
app.command("train")(train.train)
app.command("convert")(convert.convert)


@app.callback()
def drafter() -> None:
    """Make a drafter for a model."""
