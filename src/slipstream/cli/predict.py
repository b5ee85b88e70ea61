"""`slipstream predict`: what a plain token and a speculative cycle would cost, by part."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli import case_options as case
from slipstream.cli.case_options import find_machine, find_shares

if TYPE_CHECKING:
    from slipstream.lab.case import Case
    from slipstream.lab.predict import Shares


def predict(
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
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="First measure SmolLM2's steps here and fit the prediction to them."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Predict a cycle from a model's shape and a machine's ceilings."""
    from slipstream.errors import RequestError
    from slipstream.lab.cases import make_case

    if calibrate and machine is not None:
        raise RequestError("--calibrate measures the machine it runs on: give no --machine")
    box = find_machine(machine)
    shares = _calibrate(dtype, weights, threads) if calibrate else find_shares(box, machine is not None)
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
        shares=shares,
    )
    if as_json:
        costs = {"plain": found.plain_cost.to_json(), "speculative": found.fast_cost.to_json()}
        speeds = {"plain_tokens_per_s": found.plain_speed, "speculative_tokens_per_s": found.fast_speed}
        print(json.dumps({**costs, **speeds, "tokens_needed": found.tokens_needed}))
    else:
        _print(found)


def _print(found: Case) -> None:
    from slipstream.cli.console import print_numbers, stdout
    from slipstream.lab.plan import split

    plain, fast = split(found.plain_cost), split(found.fast_cost)
    rows = [
        (name, *(f"{parts[name] / 1e3:.3f}" if name in parts else "" for parts in (plain, fast)))
        for name in fast | plain
    ]
    rows.append(("together", *(f"{cost.total_us / 1e3:.3f}" for cost in (found.plain_cost, found.fast_cost))))
    head = ("milliseconds", "plain token", f"cycle of {found.fast.rows} rows")
    print_numbers(f"{found.model} on {found.name}, predicted", head, rows)
    out = stdout()
    out.print(
        f"{found.plain_speed:.1f} tokens a second plain; {found.fast_speed:.1f} speculative at an acceptance of "
        f"{found.acceptance:.2f}; break-even at {found.tokens_needed:.2f} tokens a cycle."
    )
    for line in dict.fromkeys([*found.plain_cost.evidence, *found.fast_cost.evidence]):
        out.print(f"note: {line}", markup=False)


def _calibrate(dtype: str, weights: str | None, threads: int | None) -> Shares:
    from slipstream.cli.console import progress_bar, say
    from slipstream.lab import shares
    from slipstream.lab.cases import make_case
    from slipstream.machine.machine import Machine

    box = Machine.here()
    say("loading smollm2-135m")
    import slipstream

    engine = slipstream.Engine(
        dtype=dtype, weights=weights or dtype, draft=None, max_batch=1, threads=threads
    )
    used = engine.describe()["threads"]
    assert isinstance(used, int)
    with progress_bar() as progress:
        steps = shares.measure(engine, progress)
    described = make_case(box, "smollm2-135m", dtype=dtype, weights=weights or dtype, threads=used)
    found = shares.fit(box, described.shape, described.plain, steps)
    replaced = shares.path_for(box).exists()
    say(f"{'replaced' if replaced else 'wrote'} {shares.save(box, found)}")
    return found
