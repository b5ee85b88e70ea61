"""The command line. One short file a command; heavy imports happen inside the commands, so that --help is instant."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from slipstream.cli import (
    allreduce,
    breakeven,
    compare,
    diagnose,
    drafter,
    generate,
    ledger,
    machine,
    plan,
    predict,
    profile,
    shape,
    trace,
    try_,
)
from slipstream.cli.options import is_silent
from slipstream.cli.unsupported import RefusesUnsupported
from slipstream.errors import RankError, SlipstreamError

app = typer.Typer(
    help="Makes speculative decoding pay: measure it, run it, see where its time goes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("diagnose", cls=RefusesUnsupported)(diagnose.diagnose)
app.command("breakeven")(breakeven.breakeven)
app.command("predict")(predict.predict)
app.command("plan")(plan.plan)
app.command("try")(try_.try_)
app.command("shape")(shape.shape)
app.command("machine")(machine.machine)
app.command("profile", cls=RefusesUnsupported)(profile.profile)
app.command("trace")(trace.trace)
app.command("compare")(compare.compare)
app.command("generate", cls=RefusesUnsupported)(generate.generate)
app.command("allreduce")(allreduce.allreduce)
app.add_typer(drafter.app, name="drafter")
app.add_typer(ledger.app, name="ledger")


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"slipstream {version('slipstream')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop."),
    ] = False,
) -> None:
    """Makes speculative decoding pay: measure it, run it, see where its time goes."""


def main(argv: list[str] | None = None) -> None:
    """The entry point: status 0 done, 1 what was asked failed, 2 wrong usage, 130 interrupted."""
    try:
        app(args=argv)
    except SlipstreamError as error:
        if not is_silent() or isinstance(error, RankError):
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if os.environ.get("SLIPSTREAM_DEBUG"):
            raise
        first = next(iter(str(error).splitlines()), "")
        print(
            f"error: {type(error).__name__}: {first} (a defect of slipstream; SLIPSTREAM_DEBUG=1 shows where)",
            file=sys.stderr,
        )
        sys.exit(1)
