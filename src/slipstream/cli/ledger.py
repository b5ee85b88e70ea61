"""`slipstream ledger`: every trial that was made, with what was predicted and what was measured."""

from __future__ import annotations

import csv
import io
import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.options import LEDGER_HELP
from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from slipstream.lab.ledger import Entry, Ledger

app = typer.Typer(help="List, show and export the trials that were made.", rich_markup_mode=None)

LedgerFile = Annotated[Path | None, typer.Option("--ledger", help=LEDGER_HELP)]
ItemFilter = Annotated[str | None, typer.Option("--item", help="Only trials of this optimisation.")]
VerdictFilter = Annotated[
    str | None, typer.Option("--verdict", help="Only kept, reverted, broken, failed or interrupted ones.")
]
TopologyFilter = Annotated[
    str | None, typer.Option("--topology", help="Only of machines whose topology hash begins so.")
]
SinceFilter = Annotated[str | None, typer.Option("--since", help="Only from this date on (2026-12-03).")]

_COLUMNS = (
    *(
        "id",
        "started",
        "ended",
        "item",
        "machine",
        "topology",
        "predicted",
        "measured",
        "low",
        "high",
        "runs",
    ),
    *("acceptance_before", "acceptance_with", "verdict", "note"),
)


class Format(StrEnum):
    """What the export is written as."""

    JSONL = "jsonl"
    CSV = "csv"


@app.callback(invoke_without_command=True)
def ledger(context: typer.Context, file: LedgerFile = None) -> None:
    """List, show and export the trials that were made."""
    if context.invoked_subcommand is None:
        list_(file=file)
    elif file is not None:
        raise SlipstreamError(f"give --ledger after {context.invoked_subcommand}")


@app.command("list")
def list_(
    item: ItemFilter = None,
    verdict: VerdictFilter = None,
    topology: TopologyFilter = None,
    since: SinceFilter = None,
    last: Annotated[int, typer.Option(min=1, help="At most so many, the latest.")] = 50,
    file: LedgerFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """List trials, oldest first."""
    with _open(file) as opened:
        found = _find(opened, item, verdict, topology, since, last)
    if as_json:
        print(json.dumps([entry.to_json() for entry in found], ensure_ascii=False))
        return
    from slipstream.cli.console import print_numbers, stdout

    if not found:
        stdout().print("No trial matches.")
        return
    rows = [
        (
            f"{entry.id}  {entry.item}",
            entry.started[:16].replace("T", " "),
            entry.topology[:8],
            change(entry.record.get("predicted")),
            change(entry.outcome.measured),
            _interval(entry),
            _acceptance(entry),
            entry.outcome.verdict,
        )
        for entry in found
    ]
    head = ("trial", "began", "topology", "predicted", "measured", "95 % interval", "acceptance", "verdict")
    print_numbers("Trials (time a token, against the best before)", head, rows)


@app.command()
def show(
    trial: Annotated[int, typer.Argument(help="Its number, as the list has it.")],
    file: LedgerFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the text.")] = False,
) -> None:
    """Show all that is known of one trial."""
    with _open(file) as opened:
        entry = opened.entry(trial)
    if as_json:
        print(json.dumps(entry.to_json(), ensure_ascii=False))
        return
    from slipstream.cli.console import print_numbers, stdout

    out = stdout()
    out.print(f"Trial {entry.id}, {entry.item}: {entry.outcome.verdict}", style="bold", markup=False)
    out.print(entry.outcome.note, markup=False)
    facts = [
        ("began", entry.started),
        ("ended", entry.ended or "without a verdict"),
        ("machine", f"{entry.machine}, topology {entry.topology}"),
        ("predicted", change(entry.record.get("predicted"))),
        ("measured", f"{change(entry.outcome.measured)} ({_interval(entry) or 'no interval'})"),
        ("acceptance, without and with it", _acceptance(entry)),
        ("runs measured", ", ".join(f"{count} {arm}" for arm, count in _runs(entry).items()) or "none"),
    ]
    known = ("predicted",)
    facts += [(name, _text(value)) for name, value in entry.record.items() if name not in known]
    print_numbers("", ("", ""), facts)


@app.command()
def export(
    out: Annotated[Path | None, typer.Option(help="The file; default: the standard output.")] = None,
    format_: Annotated[Format, typer.Option("--format", help="What to write.")] = Format.JSONL,
    item: ItemFilter = None,
    verdict: VerdictFilter = None,
    topology: TopologyFilter = None,
    since: SinceFilter = None,
    file: LedgerFile = None,
) -> None:
    """Write trials as JSON lines (everything) or CSV (a row a trial)."""
    with _open(file) as opened:
        found = _find(opened, item, verdict, topology, since, None)
    text = _csv(found) if format_ is Format.CSV else _jsonl(found)
    if out is None:
        print(text, end="")
        return
    from slipstream.cli.console import say

    existed = out.exists()
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SlipstreamError(f"cannot write {out}: {error.strerror}") from None
    say(f"{'replaced' if existed else 'wrote'} {out}: {len(found)} trials")


def _open(file: Path | None) -> Ledger:
    from slipstream.knobs import ledger_path
    from slipstream.lab.ledger import Ledger

    return Ledger(file or ledger_path(), read_only=True)


def _find(
    opened: Ledger,
    item: str | None,
    verdict: str | None,
    topology: str | None,
    since: str | None,
    last: int | None,
) -> list[Entry]:
    from slipstream.lab.ledger import VERDICTS

    if verdict is not None and verdict not in VERDICTS:
        raise SlipstreamError(f"--verdict {verdict}: known are {', '.join(VERDICTS)}")
    return opened.entries(item=item, verdict=verdict, topology=topology, since=since, last=last)


def _jsonl(found: list[Entry]) -> str:
    return "".join(json.dumps(entry.to_json(), ensure_ascii=False) + "\n" for entry in found)


def _csv(found: list[Entry]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS)
    writer.writeheader()
    for entry in found:
        outcome, (before, with_it) = entry.outcome, entry.outcome.acceptance
        given = {name: getattr(entry, name) for name in _COLUMNS if hasattr(entry, name)}
        given |= {name: getattr(outcome, name) for name in _COLUMNS if hasattr(outcome, name)}
        given |= {"predicted": entry.record.get("predicted"), "runs": len(entry.samples)}
        writer.writerow(given | {"acceptance_before": before, "acceptance_with": with_it})
    return text.getvalue()


def _runs(entry: Entry) -> dict[str, int]:
    arms = [sample.arm for sample in entry.samples]
    return {arm: arms.count(arm) for arm in dict.fromkeys(arms)}


def change(ratio: float | None) -> str:
    """A ratio of times as the change it is; empty where there is none."""
    return "" if ratio is None else f"{100 * (ratio - 1):+.1f} %"


def _interval(entry: Entry) -> str:
    low, high = entry.outcome.low, entry.outcome.high
    return "" if low is None or high is None else f"{change(low)} to {change(high)}"


def _acceptance(entry: Entry) -> str:
    before, with_it = entry.outcome.acceptance
    return "" if before is None or with_it is None else f"{before:.3f}, {with_it:.3f}"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items()) or "none"
    return str(value)
