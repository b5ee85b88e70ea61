"""`slipstream plan`: what to do about the verify step, in which order, as a document that others can carry out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli import case_options as case
from slipstream.cli.case_options import find_machine, find_shares

if TYPE_CHECKING:
    from slipstream.lab.plan import Plan


def plan(
    machine: case.MachineName = None,
    shape: case.Shape = "smollm2-135m",
    rows: case.Rows = 4,
    depth: case.Depth = None,
    context: case.Context = 1024,
    batch: case.Batch = 1,
    tp: case.Tp = 1,
    all_reduce: case.Backend = None,
    setting: case.Setting = None,
    eager_verify: case.Eager = False,
    draft: Annotated[case.Drafter, typer.Option(help="What drafts.")] = case.Drafter.EAGLE3,
    draft_ms: case.DraftMs = None,
    acceptance: case.Acceptance = None,
    dtype: case.Dtype = "bfloat16",
    weights: case.StoredWeights = None,
    threads: case.Threads = None,
    cost: Annotated[
        list[Path] | None,
        typer.Option(help="A diagnosis.json or the cost of a cycle: moves the predictions; repeatable."),
    ] = None,
    case_study: Annotated[
        bool, typer.Option("--case-study", help="Write the reference case instead (docs/case-study.md).")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="The file; default: fast-verify-plan.md.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the ranking as JSON, write no file.")
    ] = False,
) -> None:
    """Write the plan: the breakdown, what would help, how, and what cannot work."""
    from slipstream.cli.console import say
    from slipstream.lab.cases import make_case
    from slipstream.lab.files import read_costs, write_text
    from slipstream.lab.plan import make_plan, to_markdown

    if case_study:
        from slipstream.lab.case_study import case_study as write_case_study

        path = out or Path("case-study.md")
        replaced = write_text(path, write_case_study())
        say(f"{'replaced' if replaced else 'wrote'} {path}")
        return
    box = find_machine(machine)
    found = make_case(
        box,
        shape,
        rows=rows,
        depth=depth,
        context=context,
        batch=batch,
        tp=tp,
        backend=all_reduce,
        setting=setting,
        eager_verify=eager_verify,
        draft=draft.value,
        draft_ms=draft_ms,
        acceptance=acceptance,
        dtype=dtype,
        weights=weights,
        threads=threads,
        shares=find_shares(box, machine is not None),
    )
    for path in cost or ():
        found = found.seen(*read_costs(path))
    made = make_plan(found)
    if as_json:
        print(json.dumps(_facts(made)))
        return
    path = out or Path("fast-verify-plan.md")
    replaced = write_text(path, to_markdown(made))
    _print(made)
    say(f"{'replaced' if replaced else 'wrote'} {path}")


def _facts(made: Plan) -> dict[str, Any]:
    """The ranking and the end states in plain values."""
    ranking = [
        {
            "name": one.item.name,
            "title": one.item.title,
            "effort": one.item.effort,
            "feasible": one.feasible.answer,
            "because": one.feasible.because,
            "gain": one.gain,
            "plain_us": one.after.plain_cost.total_us if one.after else None,
            "cycle_us": one.after.fast_cost.total_us if one.after else None,
            "plain_tokens_per_s": one.after.plain_speed if one.after else None,
            "speculative_tokens_per_s": one.after.fast_speed if one.after else None,
        }
        for one in made.ranking
    ]
    ends = [
        {
            "with": name,
            "applied": end.applied,
            "plain_tokens_per_s": end.case.plain_speed,
            "speculative_tokens_per_s": end.case.fast_speed,
        }
        for name, end in made.ends
    ]
    now = made.case
    return {
        "plain": now.plain_cost.to_json(),
        "speculative": now.fast_cost.to_json(),
        "plain_tokens_per_s": now.plain_speed,
        "speculative_tokens_per_s": now.fast_speed,
        "ranking": ranking,
        "end_states": ends,
    }


def _print(made: Plan) -> None:
    from slipstream.cli.console import print_numbers, stdout

    now = made.case
    rows = [
        (
            one.item.name,
            one.feasible.answer,
            one.item.effort,
            f"{one.after.plain_speed:.0f}",
            f"{one.after.fast_speed:.0f}",
        )
        for one in made.helpful
        if one.after is not None
    ]
    title = f"{now.model} on {now.name}: {now.plain_speed:.0f} tokens a second plain, {now.fast_speed:.0f} speculative"
    head = (
        "what would help, each alone",
        "can it work",
        "effort",
        "plain, tokens/s",
        "speculative, tokens/s",
    )
    if rows:
        print_numbers(title, head, rows)
    else:
        stdout().print(f"{title}; nothing is predicted to help.")
    ends = [(name, f"{end.case.plain_speed:.0f}", f"{end.case.fast_speed:.0f}") for name, end in made.ends]
    print_numbers("All together, with", ("", "plain, tokens/s", "speculative, tokens/s"), ends)
