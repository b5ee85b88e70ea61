"""`slipstream drafter eval`: how much of what a drafter drafts is accepted, in every convention that is in use."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.console import print_numbers, progress_bar, say
from slipstream.cli.drafter.data import check_device
from slipstream.cli.options import ALL_REDUCE_HELP, TP_HELP, Dtype
from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from slipstream.draft.eagle3.checkpoint import Checkpoint
    from slipstream.engine.request import SamplingParams
    from slipstream.train.drafted import DraftShape


def evaluate(
    drafter: Annotated[str, typer.Argument(help="A drafter's folder, or eagle3: the one that is shipped.")],
    target: Annotated[
        str, typer.Option(help="The model that it is for: a name, a folder, a .gguf file or an id.")
    ] = "smollm2-135m",
    prompts: Annotated[
        Path | None,
        typer.Option(help="Answer the prompts of this .jsonl or .txt file; default: the shipped set."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Instead, test it on the conversations of this .jsonl file, held out of training."),
    ] = None,
    chain: Annotated[int, typer.Option(min=0, help="Tokens of a chain; 0 leaves it out.")] = 4,
    tree: Annotated[
        str, typer.Option(help="A tree: nodes kept a level, levels, tokens; 0 leaves it out.")
    ] = "4,6,15",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest answer, in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only that many prompts or samples.")] = None,
    max_length: Annotated[
        int, typer.Option(min=2, help="The longest prompt and answer, or conversation, in tokens.")
    ] = 2048,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the computation.")] = Dtype.AUTO,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    tp: Annotated[int, typer.Option(min=1, help=TP_HELP)] = 1,
    all_reduce: Annotated[str, typer.Option(help=ALL_REDUCE_HELP)] = "auto",
) -> None:
    """Measure how much of a drafter's guesses is accepted.

    With prompts, the model answers them plainly, with chains and with trees: the texts must be the same, and what a
    cycle yields is counted. With --data, every token of the answers is a beginning, and the text goes on as it stands
    there whatever is guessed (teacher forcing), as trainers report it.
    """
    from slipstream.engine.request import SamplingParams

    if prompts and data:
        raise SlipstreamError("--prompts and --data exclude each other: they are two different tests")
    if data and tp > 1:
        raise SlipstreamError("--tp is for --prompts: the test on --data runs on one rank")
    shapes = _shapes(chain, tree)
    params = SamplingParams(max_new_tokens, temperature)
    check_device(device)
    checkpoint = _checkpoint(drafter)
    settings: dict[str, Any] = {"drafter": drafter, "target": target, "dtype": str(dtype)}
    if data:
        if not chain:
            raise SlipstreamError("--chain is 0: the test on --data is one of a chain")
        found = _forced(checkpoint, target, data, chain, limit, max_length, dtype, device)
    else:
        runs = {
            "dtype": dtype,
            "max_length": max_length,
            "device": device,
            "tp": tp,
            "all_reduce": all_reduce,
        }
        found = _answered(checkpoint, target, prompts, shapes, params, limit, runs)
    if as_json:
        print(json.dumps({**settings, **found}, ensure_ascii=False))
    else:
        from slipstream.cli.drafter import figures

        for title, head, rows in figures.tables(found):
            print_numbers(title, head, rows)
        print("\n".join(figures.notes(found)))
    if different := found.get("different"):
        raise SlipstreamError(f"the text differs from plain decoding for prompt {_listed(different)}")


def _shapes(chain: int, tree: str) -> list[DraftShape]:
    from slipstream.train.drafted import DraftShape

    shapes = [DraftShape.chain(chain)] if chain else []
    if tree != "0":
        try:
            top_k, depth, size = (int(part) for part in tree.split(","))
        except ValueError:
            raise SlipstreamError(
                f"--tree is {tree!r}; it must be three whole numbers, as in 4,6,15, or 0"
            ) from None
        if top_k < 2 or depth < 1 or size < 1:
            raise SlipstreamError(f"--tree is {tree!r}; it keeps at least 2 nodes a level, and has one level")
        shapes.append(DraftShape(top_k, depth, size))
    if not shapes:
        raise SlipstreamError("--chain and --tree are both 0: there is nothing to draft")
    return shapes


def _checkpoint(drafter: str) -> Checkpoint:
    from slipstream.draft.eagle3.checkpoint import load
    from slipstream.draft.eagle3.drafter import drafter_folder

    return load(drafter_folder(drafter))


def _answered(
    checkpoint: Checkpoint,
    target: str,
    prompts: Path | None,
    shapes: list[DraftShape],
    params: SamplingParams,
    limit: int | None,
    runs: dict[str, Any],
) -> dict[str, Any]:
    """The real cycle. runs: how the engine is to run."""
    from slipstream.lab.prompts import load_prompts

    chosen = load_prompts(prompts)[:limit]
    say(f"loading {target}")
    import slipstream
    from slipstream.draft.eagle3.drafter import Eagle3Drafter
    from slipstream.train.drafted import drafted

    engine = slipstream.Engine(target, draft=Eagle3Drafter(checkpoint), max_batch=4, **runs)
    with progress_bar() as bar:
        results = drafted(engine, [each.prompt for each in chosen], params, shapes, progress=bar)
    kinds = [each.kind for each in chosen]
    return {
        "test": "prompts",
        "prompts": str(prompts or "the shipped set"),
        "count": len(chosen),
        "params": {"max_new_tokens": params.max_new_tokens, "temperature": params.temperature},
        "looping": [number + 1 for number in results[0].looping],
        "different": sorted({n + 1 for each in results for n, a in enumerate(each.answers) if not a.is_same}),
        "shapes": [
            {
                "name": each.shape.name,
                **asdict(each.shape),
                "levels": each.shape.levels,
                "all": each.as_dict(),
                "without_loops": each.without_loops().as_dict(),
                "by_kind": {kind: each.of(kinds, kind).as_dict() for kind in dict.fromkeys(kinds)},
                "answers": [
                    {**asdict(answer.stats), "loops": answer.loops, "is_same": answer.is_same}
                    for answer in each.answers
                ],
            }
            for each in results
        ],
    }


def _forced(
    checkpoint: Checkpoint,
    target: str,
    data: Path,
    steps: int,
    limit: int | None,
    max_length: int,
    dtype: Dtype,
    device: str,
) -> dict[str, Any]:
    """The teacher-forced test."""
    import torch

    from slipstream.target.load import load
    from slipstream.train.acceptance import Acceptance
    from slipstream.train.evaluate import looping, module_of, teacher_forced
    from slipstream.train.samples import read_samples
    from slipstream.train.states import OnlineStates

    say(f"loading {target}")
    model = load(target, dtype=dtype.value, device=device, positions=max_length)
    with progress_bar() as bar:
        samples, report = read_samples(
            data,
            model.tokenizer,
            max_length,
            lambda done, total: bar("reading (bytes)", done, max(1, total)),
            vocabulary=model.shape.vocab_size,
        )
    samples = samples.select(torch.arange(min(len(samples), limit or len(samples))))
    module = module_of(checkpoint, model.target, max_length + steps)
    assert module.shape.taps is not None
    states = OnlineStates(model.target, module.shape.taps)
    loops, row_length = looping(samples), max(1024, int(samples.lengths.max()))
    parts: list[Acceptance] = []
    with progress_bar() as bar:
        for what, which in (("looping samples", loops), ("samples", ~loops)):
            if bool(which.any()):
                title = f"evaluating {what} (batches)"
                part = samples.select(which)
                parts.append(
                    teacher_forced(
                        module,
                        model.target,
                        part,
                        states,
                        steps,
                        row_length,
                        rows=4,
                        progress=partial(bar, title),
                    )
                )
    everything = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    return {
        "test": "data",
        "data": str(data),
        "count": len(samples),
        "too_long": report.too_long,
        "looping": (loops.nonzero()[:, 0] + 1).tolist(),
        "all": everything.as_dict(),
        "without_loops": None if bool(loops.all()) else parts[-1].as_dict(),
    }


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
