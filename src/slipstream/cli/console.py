"""What a diagnosis looks like on a terminal; plain text without boxes or bars when it goes elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from slipstream.cli.options import is_silent

if TYPE_CHECKING:
    from slipstream.lab import diagnosis as lab
    from slipstream.lab.summary import Summary

_err = Console(stderr=True, highlight=False, soft_wrap=True, quiet=is_silent())


def say(line: str) -> None:
    """A line about the progress, on the standard error."""
    _err.print(line, markup=False)


def is_terminal() -> bool:
    """Whether progress goes to a terminal."""
    return _err.is_terminal


@contextmanager
def progress_bar() -> Iterator[lab.Progress]:
    """A bar on a terminal; elsewhere a line at every quarter."""
    if not _err.is_terminal:
        said: set[int] = set()

        def report(what: str, done: int, total: int) -> None:
            quarter = 4 * done // total
            if quarter not in said:
                said.add(quarter)
                say(f"{25 * quarter} %: {what}")

        yield report
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=_err, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def stdout() -> Console:
    """The standard output; a file has no edge to wrap at."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


def print_numbers(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table of which all columns but the first hold numbers, under its title."""
    console = stdout()
    table = _table(console, "", *head)
    table.title, table.show_header = None, any(head)
    for row in rows:
        table.add_row(*row)
    console.print(title, style="bold", markup=False)
    console.print(table)
    console.print()


def print_diagnosis(found: lab.Diagnosis) -> None:
    """The verdict, then the tables behind it."""
    from slipstream.lab.summary import summarise
    from slipstream.lab.verdict import verdict

    console = stdout()
    summary = summarise(found)
    for table in (
        _speeds(console, summary),
        _cycle(console, found),
        _verify(console, summary),
        _accept(console, summary),
    ):
        if table.row_count:
            console.print(table)
            console.print()
    if found.speculative and found.results:
        same = len(found.results) - len(found.mismatches)
        console.print(f"Same text, token for token: {same} of {len(found.results)} prompts.")
    if summary.overall and summary.cycle_ratio:
        console.print(
            f"Tokens a cycle: {summary.overall.tokens_per_cycle:.2f}; break-even at {summary.cycle_ratio:.2f}."
        )
    judged = verdict(found, summary)
    style = {True: "bold green", False: "bold red", None: "bold"}[judged.good]
    console.print()
    console.print(judged.sentence, style=style, markup=False)


def _table(console: Console, title: str, *columns: str) -> Table:
    lines = box.SIMPLE_HEAD if console.is_terminal else None
    table = Table(title=title, title_justify="left", title_style="bold", box=lines, pad_edge=False)
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _speeds(console: Console, summary: Summary) -> Table:
    table = _table(
        console,
        "Tokens a second (median, quartiles)",
        *("kind", "prompts", "plain", "speculative", "speed-up", "95 % interval", "tokens a cycle"),
    )
    rows = dict(summary.by_kind)
    if summary.overall:
        rows["all"] = summary.overall
    for kind, one in rows.items():
        spreads = [f"{s.middle:.1f} ({s.low:.1f}-{s.high:.1f})" for s in (one.plain, one.speculative)]
        interval = f"{one.low:.2f}-{one.high:.2f}"
        table.add_row(
            kind, str(one.prompts), *spreads, f"{one.speedup:.2f}", interval, f"{one.tokens_per_cycle:.2f}"
        )
    if not summary.overall and summary.plain:
        spread = summary.plain
        table.add_row("all", "", f"{spread.middle:.1f} ({spread.low:.1f}-{spread.high:.1f})", *[""] * 4)
    return table


def _cycle(console: Console, found: lab.Diagnosis) -> Table:
    table = _table(console, "Where one cycle's time goes (microseconds)", "part", "plain", "speculative")
    costs = (found.plain_cycle, found.speculative_cycle)
    by_part = [cost.by_part() if cost else {} for cost in costs]
    for name in by_part[1] | by_part[0]:
        table.add_row(
            name.replace(".", ": "), *(f"{parts[name]:.0f}" if name in parts else "" for parts in by_part)
        )
    if table.row_count:
        table.add_row("all", *(f"{cost.total_us:.0f}" if cost else "" for cost in costs))
        shares = [cost.attributed if cost else None for cost in costs]
        table.add_row(
            "share of the clock's time", *("" if share is None else f"{share:.1%}" for share in shares)
        )
    return table


def _verify(console: Console, summary: Summary) -> Table:
    table = _table(
        console,
        "Cost of a verify step, and what must come out of it",
        *("rows", "cost, one row = 1", "tokens a cycle to break even", "acceptance needed"),
    )
    needed = {entry.drafted + 1: entry for entry in summary.break_even}
    for rows, ratio in summary.verify_ratio.items():
        entry = needed.get(rows)
        cells = ("", "")
        if entry:
            chance = "cannot" if entry.acceptance is None else f"{entry.acceptance:.0%}"
            cells = (f"{entry.tokens:.2f}", chance)
        table.add_row(str(rows), f"{ratio:.2f}", *cells)
    return table


def _accept(console: Console, summary: Summary) -> Table:
    table = _table(console, "Guesses that were right", "position", "checked", "this guess", "all up to it")
    for one in summary.acceptance:
        if one.position > 8 and one.position % 8:
            continue  # the page shows them all
        table.add_row(str(one.position), str(one.tried), f"{one.conditional:.0%}", f"{one.cumulative:.0%}")
    return table
