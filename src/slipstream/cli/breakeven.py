"""`slipstream breakeven`: from what a plain token and a cycle cost to the acceptance that speculation needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.errors import RequestError

if TYPE_CHECKING:
    from slipstream.lab.break_even import Costs, DraftShape

LONGEST = 8


def breakeven(
    baseline_ms: Annotated[float, typer.Option(help="What a token of plain decoding costs.")],
    verify_ms: Annotated[float, typer.Option(help="What a verify step of the chain or tree costs.")],
    draft_ms: Annotated[float, typer.Option(help="What drafting costs in a cycle.")] = 0.0,
    host_ms: Annotated[float, typer.Option(help="What a cycle costs beside drafting and verifying.")] = 0.0,
    chain: Annotated[
        int, typer.Option(min=1, max=64, help="Drafted tokens; of a tree of N nodes its depth.")
    ] = 3,
    tree: Annotated[
        str | None,
        typer.Option(help="A tree instead: its number of nodes (15), or candidates by depth (4,2,1)."),
    ] = None,
    row_ms: Annotated[
        float, typer.Option(help="What each row more or less changes in a verify step; 0: it is flat.")
    ] = 0.0,
    acceptance: Annotated[
        float | None, typer.Option(min=0, max=1, help="The acceptance a position that you have.")
    ] = None,
    speed: Annotated[
        float | None, typer.Option(help="The tokens a second that you see with speculation.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Draw the speed-up here (.png, .svg, .pdf).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the tables.")] = False,
) -> None:
    """Say how many tokens a cycle must yield to pay, and which acceptance that takes."""
    from slipstream.lab import break_even as lab

    given = {"baseline": baseline_ms, "verify": verify_ms}
    for name, ms in given.items():
        if not 0 < ms < float("inf"):
            raise RequestError(f"--{name}-ms is {ms}; it must be more than 0")
    beside = {"draft-ms": draft_ms, "host-ms": host_ms, "row-ms": row_ms, "speed": speed or 0.0}
    for name, value in beside.items():
        if not 0 <= value < float("inf"):
            raise RequestError(f"--{name} is {value}; it must not be below 0")
    shape = lab.chain(chain) if tree is None else _tree(tree, chain)
    costs = lab.Costs(
        plain_us=baseline_ms * 1e3,
        verify_us=verify_ms * 1e3,
        rows=shape.drafted + 1,
        draft_us=draft_ms * 1e3,
        depth=shape.depth,
        row_us=row_ms * 1e3,
        host_us=host_ms * 1e3,
    )
    lengths = sorted({*range(1, LONGEST + 1), chain})
    shapes = [lab.chain(length) for length in lengths] + [
        lab.best_tree(nodes, max(chain, 4)) for nodes in (7, 15)
    ]
    if tree is not None:
        shapes.append(shape)
    facts = _facts(costs, shape, shapes, acceptance, speed)
    if out is not None:
        from slipstream.lab.break_even_plot import draw

        existed = out.exists()
        drawn = [lab.chain(length) for length in sorted({1, 3, 5, 7, chain})] + shapes[len(lengths) :]
        draw(costs, drawn, acceptance, out)
        from slipstream.cli.console import say

        say(f"{'replaced' if existed else 'wrote'} {out}")
    print(json.dumps(facts)) if as_json else _print(facts)


def _tree(text: str, depth: int) -> DraftShape:
    from slipstream.lab import break_even as lab

    try:
        widths = [int(part) for part in text.split(",")]
    except ValueError:
        widths = [0]
    if min(widths) < 1 or len(widths) > 16:
        raise RequestError(f"--tree is {text!r}; give a number of nodes (15) or candidates by depth (4,2,1)")
    shape = (
        lab.best_tree(widths[0], depth) if len(widths) == 1 and widths[0] <= 4096 else lab.full_tree(widths)
    )
    if shape.drafted > 4096:
        raise RequestError(f"--tree {text} has {shape.drafted} nodes; 4096 are the most")
    return shape


def _facts(
    costs: Costs,
    shape: DraftShape,
    shapes: list[DraftShape],
    acceptance: float | None,
    speed: float | None,
) -> dict[str, Any]:
    from slipstream.lab import break_even as lab

    table = []
    for each in shapes:
        cycle_us = costs.cycle_us(each.drafted, each.depth)
        needed_tokens = cycle_us / costs.plain_us
        row = {
            "shape": each.name,
            "drafted": each.drafted,
            "cycle_us": cycle_us,
            "tokens_needed": needed_tokens,
            "acceptance_needed": each.needed(needed_tokens),
        }
        if acceptance is not None:
            tokens = each.tokens(acceptance)
            row |= {
                "tokens": tokens,
                "tokens_per_s": tokens / cycle_us * 1e6,
                "speed_up": lab.speed_up(costs, each, acceptance),
                "verify_us_that_pays": lab.verify_us_that_pays(costs, each, acceptance),
            }
        table.append(row)
    cycle_us = costs.cycle_us(shape.drafted, shape.depth)
    asked = next(row for row in table if row["shape"] == shape.name)
    facts: dict[str, Any] = {
        "baseline_us": costs.plain_us,
        "verify_us": costs.verify_us,
        "draft_us": costs.draft_us,
        "row_us": costs.row_us,
        "host_us": costs.host_us,
        "acceptance": acceptance,
        "asked": asked,
        "shapes": table,
        "speed_up_by_acceptance": {
            f"{step / 20:.2f}": lab.speed_up(costs, shape, step / 20) for step in range(21)
        },
    }
    if speed:
        tokens = speed * cycle_us / 1e6
        facts["seen"] = {"tokens_per_s": speed, "tokens": tokens, "acceptance": shape.needed(tokens)}
    return facts


def _print(facts: dict[str, Any]) -> None:
    from slipstream.cli.console import print_numbers, stdout

    asked, acceptance = facts["asked"], facts["acceptance"]
    cycle_ms, plain_ms = asked["cycle_us"] / 1e3, facts["baseline_us"] / 1e3
    out = stdout()
    needed = asked["acceptance_needed"]
    how = "no acceptance is enough" if needed is None else f"an acceptance of {needed:.2f} a position"
    out.print(
        f"A cycle of {cycle_ms:.1f} ms against {plain_ms:.1f} ms a plain token: break-even at "
        f"{asked['tokens_needed']:.2f} tokens a cycle; for a {asked['shape']}, {how}.",
        style="bold",
    )
    if acceptance is not None:
        pays = asked["verify_us_that_pays"] / 1e3
        dearest = (
            f"it pays once a verify step costs less than {pays:.1f} ms"
            if pays > 0
            else "drafting alone costs more than it brings"
        )
        out.print(
            f"At {acceptance:.2f} a position: {asked['tokens']:.2f} tokens a cycle, {asked['tokens_per_s']:.1f} "
            f"tokens a second, {asked['speed_up']:.2f} times plain decoding; {dearest}."
        )
    if seen := facts.get("seen"):
        chance = (
            "more than the draft can yield" if seen["acceptance"] is None else f"{seen['acceptance']:.2f}"
        )
        out.print(
            f"{seen['tokens_per_s']:g} tokens a second are {seen['tokens']:.2f} tokens a cycle; acceptance: {chance}."
        )
    out.print()
    head = ["draft", "rows", "cycle, ms", "tokens needed", "acceptance needed"]
    if acceptance is not None:
        head += [f"speed-up at {acceptance:.2f}", "verify that pays, ms"]
    rows = []
    for each in facts["shapes"]:
        chance = "cannot" if each["acceptance_needed"] is None else f"{each['acceptance_needed']:.2f}"
        row = [
            each["shape"],
            str(each["drafted"] + 1),
            f"{each['cycle_us'] / 1e3:.1f}",
            f"{each['tokens_needed']:.2f}",
        ]
        row.append(chance)
        if acceptance is not None:
            row += [f"{each['speed_up']:.2f}", f"{each['verify_us_that_pays'] / 1e3:.1f}"]
        rows.append(row)
    print_numbers("By what is drafted (drafting costs by its depth)", head, rows)
    speed = [
        (f"{float(chance):.2f}", f"{ratio:.2f}")
        for chance, ratio in facts["speed_up_by_acceptance"].items()
        if round(float(chance) * 20) % 2 == 0
    ]
    print_numbers(f"Speed-up of the {asked['shape']}", ("acceptance", "speed-up"), speed)
