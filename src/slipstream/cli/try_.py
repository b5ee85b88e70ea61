"""`slipstream try`: applies optimisations one by one, measures each, keeps what helps, writes everything down."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.options import (
    ALL_REDUCE_HELP,
    DRAFT_HELP,
    LEDGER_HELP,
    TP_HELP,
    Dtype,
    Weights,
    draft_or_none,
)
from slipstream.errors import RequestError

if TYPE_CHECKING:
    from slipstream.lab.prompts import Prompt
    from slipstream.lab.trials import Bench, EngineSettings, Trial, Tried


def try_(
    items: Annotated[
        list[str] | None, typer.Argument(help="Optimisations by name; slipstream plan --json lists them.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All that can be applied here.")] = False,
    model: Annotated[
        str, typer.Option(help="A name, a folder, a .gguf file or a Hugging Face id.")
    ] = "smollm2-135m",
    draft: Annotated[str, typer.Option(help=DRAFT_HELP)] = "ngram",
    dtype: Annotated[Dtype, typer.Option(help="Number format of the computation.")] = Dtype.BFLOAT16,
    weights: Annotated[Weights, typer.Option(help="Number format of the weights.")] = Weights.AUTO,
    tp: Annotated[int, typer.Option(min=1, help=TP_HELP)] = 1,
    all_reduce: Annotated[str, typer.Option("--all-reduce", help=ALL_REDUCE_HELP)] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of a rank; default: all cores.")] = None,
    draft_tokens: Annotated[
        int | None, typer.Option(min=0, help="Draft so many each cycle; default: the controller decides.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="A prompt file; default: the shipped set.")] = None,
    count: Annotated[int, typer.Option(min=2, help="Prompts to use, of different kinds.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="How often each prompt is run both ways.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to write for each prompt.")] = 64,
    lossy: Annotated[bool, typer.Option("--lossy", help="Also keep what changes the text.")] = False,
    ledger: Annotated[Path | None, typer.Option(help=LEDGER_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Try optimisations here: measured in turn against the best so far, kept or not, and written down."""
    from slipstream.cli.console import progress_bar, say
    from slipstream.knobs import ledger_path
    from slipstream.lab import optimisations, shares, trials
    from slipstream.lab.ledger import Ledger
    from slipstream.lab.prompts import load_prompts
    from slipstream.machine.machine import Machine

    known = optimisations.every()
    if every == bool(items):
        raise RequestError("name the optimisations to try, or give --all")
    chosen = items or [name for name, item in known.items() if item.here is not None]
    if unknown := [name for name in chosen if name not in known]:
        raise RequestError(f"unknown optimisation {unknown[0]!r}; known are {', '.join(known)}")
    box, path = Machine.here(), ledger or ledger_path()
    picked = _spread(load_prompts(prompts), count)
    best = trials.EngineSettings(
        model, draft_or_none(draft), dtype.value, weights.value, threads, tp, all_reduce, draft_tokens
    )
    with Ledger(path) as opened, progress_bar() as progress:
        bench = trials.Bench(
            box,
            picked,
            _make,
            opened,
            shares=shares.load(box),
            rounds=rounds,
            max_new_tokens=max_new_tokens,
            lossy=lossy,
            progress=progress,
        )
        try:
            done, best = _all(bench, chosen, best)
        finally:
            bench.close()
    say(f"written to {path}")
    if as_json:
        found = [asdict(trial) for trial in done]
        print(json.dumps({"trials": found, "best": vars(best)}))
    else:
        _print(done, best)


def _all(bench: Bench, chosen: list[str], best: EngineSettings) -> tuple[list[Trial], EngineSettings]:
    from slipstream.cli.console import say
    from slipstream.lab import optimisations, trials

    done = []
    for name in chosen:
        trial = trials.run(bench, optimisations.every()[name], best)
        done.append(trial)
        if trial.outcome.verdict == "kept":
            best = trial.settings
        bench.keep(best)
        say(f"{name}: {trial.outcome.verdict}: {trial.outcome.note}")
    return done, best


def _make(settings: EngineSettings) -> Tried:
    import slipstream

    return slipstream.Engine(**settings.start)


def _spread(prompts: list[Prompt], count: int) -> list[Prompt]:
    """Some of each kind, in turn."""
    from itertools import zip_longest

    kinds: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        kinds.setdefault(prompt.kind, []).append(prompt)
    mixed = [prompt for group in zip_longest(*kinds.values()) for prompt in group if prompt is not None]
    return mixed[:count]


def _print(done: list[Trial], best: EngineSettings) -> None:
    from slipstream.cli.console import print_numbers, stdout
    from slipstream.cli.ledger import change

    rows = []
    for trial in done:
        found = trial.outcome
        spread = f"{change(found.low)} to {change(found.high)}" if found.low is not None else ""
        rows.append((trial.item, change(trial.predicted), change(found.measured), spread, found.verdict))
    head = ("optimisation", "predicted", "measured", "95 % interval", "verdict")
    print_numbers("Time a token, against the best before", head, rows)
    settings = " ".join(f"{name}={value}" for name, value in vars(best).items() if value is not None)
    stdout().print(f"Best: {settings}", markup=False)
