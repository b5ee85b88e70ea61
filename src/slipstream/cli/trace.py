"""`slipstream trace`: where the time of another engine's steps goes, from the traces it wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from slipstream.lab.traces import Reading


def trace(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Traces of one job: torch profiler .json or .json.gz, Nsight Systems .sqlite; one a rank."
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON and nothing else.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Also write what was found to this folder, as JSON and as Markdown.")
    ] = None,
) -> None:
    """Read traces of SGLang, vLLM or anything else, and say where a step's time goes."""
    from slipstream.cli.console import progress_bar, say, stdout
    from slipstream.lab.traces import read_traces
    from slipstream.lab.traces.page import write_reading
    from slipstream.lab.traces.words import sentences

    with progress_bar() as progress:
        reading = read_traces(files, progress)
    if as_json:
        print(json.dumps(reading.to_json(), ensure_ascii=False))
    else:
        _print(reading)
        for sentence in sentences(reading):
            stdout().print(sentence, markup=False)
        for note in reading.evidence:
            stdout().print(f"note: {note}", markup=False)
    if out is not None:
        for path in write_reading(reading, out):
            say(f"wrote {path}")


def _print(reading: Reading) -> None:
    from slipstream.cli.console import print_numbers
    from slipstream.lab.traces.page import BIGGEST_HEAD, KINDS_HEAD, biggest, kind_row

    ranks = f"{reading.ranks} rank{'s' * (reading.ranks > 1)}"
    title = f"Steps, medians in ms ({reading.device or 'unknown device'}, {ranks})"
    print_numbers(title, KINDS_HEAD, [kind_row(kind) for kind in reading.kinds])
    print_numbers(
        f"The biggest parts of a cycle ({next(iter(reading.costs))})", BIGGEST_HEAD, biggest(reading.cost)
    )
