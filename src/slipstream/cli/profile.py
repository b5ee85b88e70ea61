"""`slipstream profile`: where a cycle of this engine spends its time, here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.options import DRAFT_HELP, Dtype, Weights, draft_or_none


def profile(
    model: Annotated[
        str, typer.Argument(help="A name, a folder, a .gguf file or a Hugging Face id.")
    ] = "smollm2-135m",
    draft: Annotated[str, typer.Option(help=DRAFT_HELP)] = "ngram",
    rows: Annotated[
        int, typer.Option(min=2, help="Rows of a verify step: the drafted tokens and one more.")
    ] = 8,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the computation.")] = Dtype.AUTO,
    weights: Annotated[Weights, typer.Option(help="Number format of the weights.")] = Weights.AUTO,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A .jsonl file with a kind and a prompt a line; default: one of each kind shipped."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens to write for each prompt, both ways.")
    ] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON and nothing else.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; default: all cores.")] = None,
) -> None:
    """Measure where a plain and a speculative cycle spend their time on this machine."""
    from slipstream.cli.console import progress_bar, say
    from slipstream.lab.prompts import load_prompts

    chosen = (
        {prompt.kind: prompt.prompt for prompt in reversed(load_prompts(prompts))} if prompts is None else {}
    )
    texts = list(chosen.values()) or [prompt.prompt for prompt in load_prompts(prompts)]
    say(f"loading {model}")
    import slipstream
    from slipstream.cli.compare import print_costs
    from slipstream.lab.profile import profile as measure
    from slipstream.lab.provenance import provenance

    engine = slipstream.Engine(
        model, draft=draft_or_none(draft), dtype=dtype, weights=weights, threads=threads
    )
    with progress_bar() as progress:
        costs = measure(engine, texts, rows=rows, new_tokens=max_new_tokens, progress=progress)
    if as_json:
        value = {
            "schema": "slipstream.profile/1",
            "provenance": provenance(),
            "engine": engine.describe(),
            "costs": {name: cost.to_json() for name, cost in costs.items()},
            "cycle": next(iter(costs.values())).to_json(),
        }
        print(json.dumps(value, ensure_ascii=False))
    else:
        print_costs(costs)
