"""`slipstream drafter train`: an EAGLE-3 drafter for a model, from scratch or from one that exists."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.options import Dtype

if TYPE_CHECKING:
    from slipstream.target.load import LoadedModel
    from slipstream.train.job import Job
    from slipstream.train.ranks import Ranks
    from slipstream.train.samples import Samples

_SHAPE = ("vocabulary", "layers", "attention", "flags", "taps", "rope_theta", "max_positions")


def train(
    context: typer.Context,
    target: Annotated[
        str, typer.Option(help="The model to draft for: a name, a folder, a .gguf file, an id.")
    ],
    data: Annotated[
        list[Path], typer.Option(help="Conversations, .jsonl; repeatable. `drafter data` makes them.")
    ],
    out: Annotated[Path, typer.Option(help="The drafter's folder; a training that stopped there goes on.")],
    start: Annotated[
        Path | None,
        typer.Option("--from", help="A drafter to fine-tune; its shape and map of tokens are kept."),
    ] = None,
    vocabulary: Annotated[
        int, typer.Option(help="Tokens that can be drafted; the target's most frequent.")
    ] = 32000,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the drafter.")] = 1,
    attention: Annotated[str, typer.Option(help="grouped, or latent as the target's.")] = "grouped",
    flags: Annotated[
        str,
        typer.Option(
            help="Norm flags, with commas: norm_before_residual, norm_before_fc, fc_norm, norm_output."
        ),
    ] = "",
    taps: Annotated[
        str, typer.Option(help="The target's states to read, as boundaries between layers: 2,15,27.")
    ] = "",
    rope_theta: Annotated[float, typer.Option(help="Base of the drafter's rotary embedding.")] = 10000.0,
    max_positions: Annotated[int, typer.Option(help="The longest text that it will draft for.")] = 2048,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the training-time test.")] = 5,
    decay: Annotated[float, typer.Option(help="The weight of each step beside the one before it.")] = 0.9,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the data.")] = 3,
    lr: Annotated[float | None, typer.Option(help="Learning rate; default 3e-4, to fine-tune 3e-5.")] = None,
    warmup: Annotated[float, typer.Option(help="Share of the updates in which the rate rises.")] = 0.03,
    weight_decay: Annotated[float, typer.Option(help="AdamW's.")] = 0.0,
    clip: Annotated[float, typer.Option(help="The longest gradient.")] = 0.5,
    row_length: Annotated[int, typer.Option(help="Tokens of a row that samples are packed in.")] = 1024,
    rows: Annotated[int, typer.Option(min=1, help="Rows of one forward, on each rank.")] = 8,
    accumulate: Annotated[int, typer.Option(min=1, help="Forwards of one update.")] = 1,
    precision: Annotated[
        str, typer.Option(help="auto, float32 or bfloat16: of the multiplications.")
    ] = "auto",
    held_out: Annotated[int, typer.Option(min=0, help="Samples to evaluate on, at most a tenth.")] = 512,
    eval_every: Annotated[int, typer.Option(min=0, help="Updates between evaluations; 0: at the end.")] = 0,
    save_every: Annotated[int, typer.Option(min=1, help="Updates between saved states.")] = 200,
    states: Annotated[
        Path | None,
        typer.Option(help="Keep the target's states in this folder instead of computing them anew."),
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop in time; the same command goes on.")] = None,
    weights: Annotated[
        str, typer.Option(help="Number format of the written drafter: bfloat16, float32.")
    ] = "bfloat16",
    dtype: Annotated[Dtype, typer.Option(help="Number format of the target's computation.")] = Dtype.AUTO,
    device: Annotated[
        str, typer.Option(help="auto, cpu or cuda; under torchrun each rank has its own GPU.")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="The same seed trains the same drafter.")] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin anew where a training stopped.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Train an EAGLE-3 drafter. Stopped in any way, the same command goes on, bit for bit.

    Several GPUs: torchrun --nproc-per-node 8 -m slipstream drafter train ...
    """
    from slipstream.draft.eagle3.checkpoint import load as load_drafter
    from slipstream.errors import DataError
    from slipstream.train import ranks as ranks_of
    from slipstream.train.begin import Design
    from slipstream.train.job import Job
    from slipstream.train.trainer import Recipe

    if weights not in ("bfloat16", "float32") or precision not in ("auto", "bfloat16", "float32"):
        raise DataError("--weights is bfloat16 or float32, --precision auto, bfloat16 or float32")
    try:
        boundaries = tuple(int(each) for each in taps.split(",")) if taps else None
    except ValueError:
        raise DataError(f"--taps is {taps!r}; it must be numbers with commas, such as 2,15,27") from None
    if start:
        _check_start(start, out, context)
    given = load_drafter(start) if start else None
    ranks = ranks_of.join(device)
    try:
        if precision == "auto":
            precision = "bfloat16" if ranks.device.startswith("cuda") else "float32"
        recipe = Recipe(
            steps=steps, decay=decay, row_length=row_length, rows=rows, accumulate=accumulate, epochs=epochs,
            lr=(3e-5 if start else 3e-4) if lr is None else lr, weight_decay=weight_decay, clip=clip, warmup=warmup,
            precision=precision, seed=seed,
        )  # fmt: skip
        design = Design(
            vocabulary, layers, attention, None, rope_theta, max_positions, boundaries,
            tuple(flag for flag in flags.split(",") if flag),
        )  # fmt: skip
        job = Job(
            out, recipe, design, given, held_out, save_every, eval_every, minutes, weights, states, overwrite
        )
        _train(job, target, data, dtype, ranks, as_json)
    finally:
        ranks_of.leave()


def _check_start(start: Path, out: Path, context: typer.Context) -> None:
    """A drafter that is fine-tuned stays where it is, and keeps its shape."""
    from slipstream.errors import DataError

    if out.resolve() == start.resolve():
        raise DataError(f"{out} is the drafter that --from names; give another folder")
    sources = {name: context.get_parameter_source(name) for name in _SHAPE}
    shaped = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if shaped:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in shaped)
        raise DataError(f"--from keeps the shape of {start}; leave out {named}")


def _train(job: Job, target: str, data: list[Path], dtype: str, ranks: Ranks, as_json: bool) -> None:
    from slipstream.cli.console import say
    from slipstream.train import job as jobs
    from slipstream.train.ranks import be_deterministic

    be_deterministic()
    model, samples = _load(target, data, dtype, job.recipe.row_length, ranks)
    with _display(ranks) as (on_update, progress):
        facts = jobs.run(job, model, samples, ranks, say, on_update, progress)
    if not ranks.is_first:
        return
    if as_json:
        print(json.dumps(facts))
    else:
        _print(facts)
    if facts["interrupted"]:
        raise typer.Exit(130)


def _load(
    target: str, data: list[Path], dtype: str, row_length: int, ranks: Ranks
) -> tuple[LoadedModel, Samples]:
    from slipstream.cli.console import progress_bar, say
    from slipstream.target.load import load
    from slipstream.train.samples import read_samples

    if ranks.is_first:
        say(f"loading {target}")
    model = load(target, dtype=dtype, device=ranks.device, positions=row_length)
    with progress_bar() as bar:
        samples, report = read_samples(
            data,
            model.tokenizer,
            row_length,
            (lambda done, total: bar("reading", done, max(total, 1)))
            if ranks.is_first
            else lambda done, total: None,
            vocabulary=model.shape.vocab_size,
        )
    if ranks.is_first:
        say(
            f"{report.read} conversations read, {report.kept} samples kept, {report.loss_tokens} answer tokens;"
            f" left out: {report.too_long} longer than {row_length} tokens, {report.without_loss} without an answer"
        )
    return model, replace(samples)


class _Display:
    """A bar on a terminal; elsewhere a line at every twentieth of the way."""

    def __init__(self, ranks: Ranks) -> None:
        from slipstream.cli.console import progress_bar

        self._is_first, self._context = ranks.is_first, progress_bar()
        self._said = -1

    def __enter__(self) -> tuple[Any, Any]:
        self._bar = self._context.__enter__()
        return self._on_update, self._progress

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def _progress(self, what: str, done: int, total: int) -> None:
        if self._is_first:
            self._bar(what, done, max(total, 1))

    def _on_update(self, update: Any, speed: float) -> None:
        from slipstream.cli.console import is_terminal, say

        if not self._is_first:
            return
        shown = " ".join(f"{rate:.2f}" for rate in update.accepted)
        line = f"loss {update.loss:.3f}  accepted {shown}  {speed:,.0f} tokens/s"
        if is_terminal():
            self._bar(line, update.number, update.of)
        elif (part := 20 * update.number // update.of) > self._said:
            self._said = part
            say(f"{update.number}/{update.of}  {line}")


def _display(ranks: Ranks) -> _Display:
    return _Display(ranks)


def _print(facts: dict[str, Any]) -> None:
    from slipstream.cli.console import print_numbers

    rows = [
        ["updates", f"{facts['updates']} of {facts['of']}"],
        ["tokens a second", f"{facts['tokens_a_second']:,.0f}"],
        ["peak memory", f"{facts['peak_gb']:.1f} GB"],
        ["draft vocabulary covers", f"{facts['coverage']:.2%}"],
    ]
    for position, accepted in enumerate(facts.get("accepted", ())):
        rows.append([f"held out, accepted at position {position + 1}", f"{accepted:.3f}"])
    if "evaluation" in facts:
        rows.append(["tokens a cycle, chain", f"{facts['evaluation']['tokens_a_cycle']:.2f}"])
    print_numbers("Trained", ["", ""][1:], rows)
