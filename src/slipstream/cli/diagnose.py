"""`slipstream diagnose`: does speculative decoding pay here, and where does the time go?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.cli.options import ALL_REDUCE_HELP, DRAFT_HELP, TP_HELP, Dtype, Weights, draft_or_none


def diagnose(
    model: Annotated[
        str, typer.Argument(help="A name, a folder, a .gguf file or a Hugging Face id.")
    ] = "smollm2-135m",
    draft: Annotated[str, typer.Option(help=DRAFT_HELP)] = "ngram",
    dtype: Annotated[Dtype, typer.Option(help="Number format of the computation.")] = Dtype.AUTO,
    weights: Annotated[Weights, typer.Option(help="Number format of the weights.")] = Weights.AUTO,
    prompts: Annotated[
        Path | None,
        typer.Option(help="A .jsonl file with a kind and a prompt a line; default: the shipped set."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write for each prompt.")] = 128,
    out: Annotated[Path, typer.Option(help="The folder for the report.")] = Path("slipstream-report"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON and nothing else.")] = False,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="The longest prompt and answer together; default: 2048 tokens.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads (of each rank); default: all cores.")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help=TP_HELP)] = 1,
    all_reduce: Annotated[str, typer.Option(help=ALL_REDUCE_HELP)] = "auto",
) -> None:
    """Measure whether speculation pays, and write a report."""
    from slipstream.cli.console import print_diagnosis, progress_bar, say
    from slipstream.engine.request import SamplingParams
    from slipstream.lab.prompts import load_prompts

    # All that can be wrong with the request is found before the minutes of measuring.
    chosen = load_prompts(prompts)
    SamplingParams(max_new_tokens=max_new_tokens)
    from slipstream.lab import diagnosis as lab
    from slipstream.lab import report
    from slipstream.lab.provenance import provenance

    replaced = report.check_writable(out)
    say(f"loading {model}")
    import slipstream

    engine = slipstream.Engine(
        model,
        draft=draft_or_none(draft),
        dtype=dtype,
        weights=weights,
        max_length=max_length,
        threads=threads,
        tp=tp,
        all_reduce=all_reduce,
    )
    notes: Any = engine.describe().get("notes", ())
    for note in notes:
        say(f"note: {note}")
    settings = {"prompts": str(prompts or "the shipped set"), "max_new_tokens": max_new_tokens}
    with progress_bar() as progress:
        found = lab.diagnose(
            engine,
            chosen,
            provenance=provenance(),
            settings=settings,
            max_new_tokens=max_new_tokens,
            progress=progress,
        )
    written = report.write_report(found, out)
    if as_json:
        print(json.dumps(report.to_json(found), ensure_ascii=False))
    else:
        print_diagnosis(found)
    for path in written:
        say(f"{'replaced' if path in replaced else 'wrote'} {path}")
    for number, why in found.failed.items():
        print(f"error: prompt {number} was not run: {why}", file=sys.stderr)
    if found.mismatches:
        numbers = ", ".join(str(result.number) for result in found.mismatches)
        print(
            f"error: the speculative text differs from the plain text for prompt {numbers}", file=sys.stderr
        )
    if found.error:
        print(f"error: it ended early: {' '.join(found.error.split())}", file=sys.stderr)
        raise typer.Exit(1)
    if found.partial:
        raise typer.Exit(130)
    if found.failed or found.mismatches:
        raise typer.Exit(1)
