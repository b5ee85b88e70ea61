"""`slipstream drafter check`: the drafter doctor on a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.console import print_numbers, progress_bar, stdout
from slipstream.cli.options import Dtype
from slipstream.errors import DataError, ModelError

if TYPE_CHECKING:
    from slipstream.train.doctor import Diagnosis
    from slipstream.train.doctor_trials import Acceptance

_MARKS = {"ok": "✓ ok", "warn": "! look", "fail": "✗ wrong"}
_PROMPTS = 12


def check(
    drafter: Annotated[str, typer.Argument(help="A drafter's folder, or eagle3, the one that is shipped.")],
    target: Annotated[
        str, typer.Option(help="The model that it is for: a name, a folder, a .gguf file or an id.")
    ],
    prompts: Annotated[
        Path | None, typer.Option(help="A prompt file; default: twelve of the shipped chat and code prompts.")
    ] = None,
    mend: Annotated[
        Path | None, typer.Option(help="Write the cured drafter into this folder, which must be empty.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="The longest answer, in tokens.")] = 128,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the computation.")] = Dtype.AUTO,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Check a drafter against its target, find what is misread in it, and mend it.

    The target writes answers; the drafter's guesses at them are counted, as it is and with every fact read otherwise
    (d2t, layer ids, norm flags, rope, alignment, embedding). Status 0: healthy; 1: not, and the last line says why.
    """
    from slipstream.draft.eagle3.checkpoint import read, save
    from slipstream.draft.eagle3.drafter import drafter_folder
    from slipstream.lab.prompts import load_prompts
    from slipstream.train.doctor import examine
    from slipstream.train.doctor_trials import write_answers

    folder = drafter_folder(drafter)
    if mend is not None and mend.exists() and (not mend.is_dir() or any(mend.iterdir())):
        raise DataError(f"{mend} is there and not empty; --mend writes into an empty folder")
    checkpoint, claimed = read(folder), _claims(folder)
    asked = load_prompts(prompts)
    if prompts is None:
        asked = [each for each in asked if each.kind in ("chat", "code")][:_PROMPTS]
    import slipstream

    with progress_bar() as bar:
        bar("loading the target", 0, 1)
        engine = slipstream.Engine(
            target, draft=None, dtype=dtype.value, device=device, max_batch=min(_PROMPTS, len(asked))
        )
        bar("letting the target write", 0, 1)
        texts = write_answers(engine, [each.prompt for each in asked], max_new_tokens)
        found = examine(checkpoint, engine.model.target, texts, claimed, bar)
    print(_json(found)) if as_json else _print(found)
    if mend is not None and found.mended is not None:
        paths = save(mend, found.mended, target_layers=engine.model.shape.layers)
        _note(as_json, f"The mended drafter: {', '.join(str(path) for path in paths)}.")
    elif mend is not None:
        _note(as_json, "Nothing was written: there is nothing to mend in the drafter's files.")
    if not as_json:
        style = "bold green" if found.healthy else "bold red"
        stdout().print(found.verdict, style=style, markup=False, soft_wrap=True)
    if not found.healthy:
        raise typer.Exit(1)


def _claims(folder: Path) -> list[float] | None:
    """Acceptance by position as the drafter's training says, from `training.json` beside it. Raises ModelError."""
    path = folder / "training.json"
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        claimed = found.get("accepted") if isinstance(found, dict) else None
        return [float(each) for each in claimed] if claimed else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None


def _note(as_json: bool, line: str) -> None:
    """On the standard error beside JSON, which stays alone on the standard output."""
    typer.echo(line, err=as_json)


def _print(found: Diagnosis) -> None:
    facts = [(_MARKS[fact.status], fact.name, fact.found) for fact in found.facts]
    width = max(len(name) for _, name, _ in facts)
    console = stdout()
    console.print("What it is", style="bold")
    for mark, name, text in facts:
        console.print(f"  {mark:<8} {name:<{width}}  {text}", markup=False, soft_wrap=True)
    console.print()
    if found.acceptance is not None:
        _print_acceptance(found)
    if found.trials:
        rows = [
            (
                f"{trial.fact}: {trial.now}" + (" (kept)" if trial.is_kept else ""),
                f"{trial.acceptance.conditional[0]:.2f}",
                f"{trial.acceptance.tokens_a_cycle:.2f}",
            )
            for trial in found.trials
        ]
        print_numbers("Read otherwise", ("reading", "position 1", "tokens a cycle"), rows)


def _print_acceptance(found: Diagnosis) -> None:
    as_is, cured, claimed = found.acceptance, found.cured, found.claimed or []
    assert as_is is not None
    rows = []
    for place in range(as_is.steps):
        cells = [str(place + 1), str(as_is.checked[place]), f"{as_is.conditional[place]:.2f}"]
        cells.append(f"{as_is.cumulative[place]:.2f}")
        cells.append(f"{claimed[place]:.2f}" if place < len(claimed) else "-")
        rows.append([*cells, f"{cured.conditional[place]:.2f}" if cured else "-"])
    head = ("position", "checked", "right, given all before", "right with all before", "claimed", "cured")
    print_numbers("Acceptance on the target's greedy answers", head, rows)
    print(
        f"Tokens a cycle with a chain of {as_is.steps}: {as_is.tokens_a_cycle:.2f} with the target's own token,"
        f" {as_is.tokens_a_cycle - 1:.2f} without.\nA token outside the draft vocabulary counts as wrong; trees accept"
        " more than chains.\n"
    )


def _json(found: Diagnosis) -> str:
    return json.dumps(
        {
            "healthy": found.healthy,
            "verdict": found.verdict,
            "facts": [vars(fact) for fact in found.facts],
            "acceptance": _figures(found.acceptance),
            "claimed": found.claimed,
            "cured": _figures(found.cured),
            "trials": [
                {
                    "fact": trial.fact,
                    "was": trial.was,
                    "now": trial.now,
                    "kept": trial.is_kept,
                    "acceptance": _figures(trial.acceptance),
                }
                for trial in found.trials
            ],
        },
        ensure_ascii=False,
    )


def _figures(acceptance: Acceptance | None) -> dict[str, object] | None:
    if acceptance is None:
        return None
    return {
        "checked": acceptance.checked,
        "conditional": acceptance.conditional,
        "cumulative": acceptance.cumulative,
        "tokens_a_cycle": acceptance.tokens_a_cycle,
    }
