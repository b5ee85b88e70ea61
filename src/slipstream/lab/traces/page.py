"""The tables of a reading, for the terminal and for a Markdown file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.lab.cycle_cost import CycleCost, Part
from slipstream.lab.traces.reading import Reading, StepKind
from slipstream.lab.traces.words import sentences

KINDS_HEAD = (
    "phase", "rows", "steps", "total", "GPU busy", "waits for host", "between kernels", "graphs", "collectives",
    "their time", "wire", "skew",
)  # fmt: skip
BIGGEST_HEAD = ("part", "us", "share", "calls", "us a call")
BIGGEST = 12


def kind_row(kind: StepKind) -> tuple[str, ...]:
    """The cells of a line of the steps' table; a dash for what is not known."""
    count = sum(kind.collectives.values())
    return (
        {"host": "between cycles"}.get(kind.phase, kind.phase),
        "-" if kind.rows is None else str(kind.rows),
        str(kind.steps),
        *(_ms(us) for us in (kind.total_us, kind.busy_us, kind.host_wait_us, kind.between_kernels_us)),
        f"{kind.graphs:.0f}",
        f"{count:.0f}",
        _ms(kind.collective_us) if count else "-",
        "-" if kind.wire_us is None else _ms(kind.wire_us),
        "-" if kind.skew_us is None else _ms(kind.skew_us),
    )


def biggest(cost: CycleCost, most: int = BIGGEST) -> list[tuple[str, ...]]:
    """The largest parts, with the smaller ones together."""
    parts = sorted(cost.parts, key=lambda part: -part.us)
    rows: list[tuple[str, ...]] = [
        (
            f"{part.phase}: {_part_name(part)}",
            f"{part.us:.0f}",
            f"{part.us / max(cost.total_us, 1e-9):.0%}",
            "-" if part.count is None else f"{part.count:.4g}",
            f"{part.us / part.count:.1f}" if part.count else "-",
        )
        for part in parts[:most]
    ]
    rest = sum(part.us for part in parts[most:])
    if rest:
        rows.append(
            (f"{len(parts) - most} smaller parts", f"{rest:.0f}", f"{rest / cost.total_us:.0%}", "", "")
        )
    return rows


def _part_name(part: Part) -> str:
    idle = {
        "launch": "not launched yet",
        "host_sync": "host had waited",
        "between_kernels": "between kernels",
    }
    if part.kind in ("launch_gap", "host_sync"):
        return f"GPU idle, {idle[part.name]}" if part.name in idle else part.name.replace("_", " ")
    return part.name.replace("_", "-") + (f", {part.traffic.by}" if part.traffic and part.traffic.by else "")


def write_reading(reading: Reading, folder: Path) -> list[Path]:
    """Writes `trace.json` and `trace.md`. Raises SlipstreamError where that cannot be."""
    text = [
        "# Where the time of a step goes",
        *(f"- {source}" for source in reading.sources),
        *sentences(reading),
        "## Steps (medians, milliseconds)",
        _table(KINDS_HEAD, [kind_row(kind) for kind in reading.kinds]),
        f"## The parts of a cycle ({next(iter(reading.costs))})",
        _table(BIGGEST_HEAD, biggest(reading.cost, len(reading.cost.parts))),
        "## What this rests on",
        *(f"- {each}" for each in reading.evidence),
    ]
    contents = {
        "trace.json": json.dumps(reading.to_json(), indent=2, ensure_ascii=False) + "\n",
        "trace.md": "\n\n".join(text) + "\n",
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_text(content, encoding="utf-8")
    except OSError as error:
        raise SlipstreamError(f"cannot write the report to {folder}: {error.strerror}") from None
    return [folder / name for name in contents]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _ms(us: float) -> str:
    return f"{us / 1e3:.2f}"
