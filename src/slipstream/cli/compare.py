"""`slipstream compare`: two costs of a cycle side by side, measured, read from traces or predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.errors import RequestError

if TYPE_CHECKING:
    from slipstream.lab.compare import Comparison, Difference
    from slipstream.lab.cycle_cost import CycleCost

_HELP = "A trace, or JSON from trace, profile, diagnose or predict."


def compare(
    a: Annotated[Path, typer.Argument(help=_HELP)],
    b: Annotated[Path, typer.Argument(help="The other one; both may be the same file.")],
    cycle_a: Annotated[
        str | None, typer.Option(help="Which cycle of A, where it holds several, as `decode 1 row`.")
    ] = None,
    cycle_b: Annotated[str | None, typer.Option(help="Which cycle of B.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the tables.")] = False,
) -> None:
    """Lay two costs of a cycle side by side, with the differences by part."""
    from slipstream.lab import compare as lab

    left, right = _choose(a, cycle_a), _choose(b, cycle_b)
    found = lab.compare(left, right)
    if as_json:
        print(json.dumps({"a": left.to_json(), "b": right.to_json(), **found.to_json()}))
    else:
        _print(found, left, right)


def print_costs(costs: dict[str, CycleCost]) -> None:
    """One cost, or the first one beside the second one, with their names as heads."""
    from slipstream.cli.console import print_numbers, stdout
    from slipstream.lab.compare import Difference, compare

    names = list(costs)
    every = [costs[name] for name in names]
    lines = compare(every[0], every[-1])
    rows = [
        (line.name.replace(".", ": "), *(_us(us) for us in (line.a_us, line.b_us)[: len(every)]))
        for line in (*lines.parts, lines.total, lines.wall, Difference("", None, None))
        if line.name
    ]
    rows.append(
        (
            "share of the clock's time",
            *(f"{cost.attributed:.2%}" if cost.attributed else "-" for cost in every),
        )
    )
    rows.append(("cycles", *(str(cost.cycles) for cost in every)))
    rows.append(("tokens a cycle", *("-" if cost.tokens is None else f"{cost.tokens:.2f}" for cost in every)))
    print_numbers("Where a cycle's time goes (microseconds)", ("part", *names), rows)
    for name, cost in costs.items():
        for note in cost.evidence:
            stdout().print(f"note on {name}: {note}", markup=False)


def _choose(path: Path, name: str | None) -> CycleCost:
    from slipstream.lab.compare import load_costs

    costs = load_costs(path)
    if name is None:
        return next(iter(costs.values()))
    if name not in costs:
        raise RequestError(
            f"{path} has no cycle {name!r}; it has {', '.join(each or 'one' for each in costs)}"
        )
    return costs[name]


def _print(found: Comparison, a: CycleCost, b: CycleCost) -> None:
    from slipstream.cli.console import print_numbers, stdout

    head = ("", "A", "B", "B - A", "B / A")
    about = [
        ("source", a.source, b.source, "", ""),
        ("rows", _number(a.rows), _number(b.rows), "", ""),
        ("tokens a cycle", _number(a.tokens), _number(b.tokens), "", ""),
        ("ranks", str(a.ranks), str(b.ranks), "", ""),
        ("cycles measured", str(a.cycles), str(b.cycles), "", ""),
    ]
    print_numbers("What is compared", head[:3], [row[:3] for row in about])
    sections = [
        ("By phase (microseconds a cycle)", [*found.phases, found.total, found.wall]),
        ("By part", found.parts),
        ("By what the time is spent on", found.kinds),
        ("Communication", found.traffic),
    ]
    for title, lines in sections:
        if lines:
            print_numbers(title, head, [_row(line) for line in lines])
    biggest = found.biggest()
    if biggest:
        named = ", ".join(f"{line.name.replace('.', ': ')} {line.more_us:+,.0f} us" for line in biggest)
        stdout().print(
            f"B takes {found.total.more_us:+,.0f} us against A; most of it: {named}.", markup=False
        )
    else:
        stdout().print("A and B cost the same in every part.")


def _row(line: Difference) -> tuple[str, ...]:
    both = line.a_us is not None and line.b_us is not None
    ratio = f"{line.b_us / line.a_us:.2f}" if both and line.a_us and line.b_us is not None else "-"
    return (line.name.replace(".", ": "), _us(line.a_us), _us(line.b_us), f"{line.more_us:+,.0f}", ratio)


def _us(us: float | None) -> str:
    return "-" if us is None else f"{us:,.0f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
