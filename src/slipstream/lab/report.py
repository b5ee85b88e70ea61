"""The diagnosis on disk: `diagnosis.json` for programs, `report.html` for people, one page that needs nothing else."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from slipstream.errors import SlipstreamError
from slipstream.lab.diagnosis import Diagnosis
from slipstream.lab.plots import PART_COLOURS, plots
from slipstream.lab.summary import summarise
from slipstream.lab.verdict import EXPLAINED, verdict

JSON_NAME = "diagnosis.json"
HTML_NAME = "report.html"

GLOSSARY = {
    "token": "A word or a part of a word; the unit in which a model reads and writes.",
    "plain decoding": "The model runs once for every token that it writes.",
    "speculative decoding": "Something cheap guesses the next few tokens, the model checks all of them in one run, and "
    "keeps those that it would have written itself: the text stays the same.",
    "n-gram drafter": "Guesses by looking up where the last few tokens stood before, in the prompt or in the text so "
    "far, and proposing what came after them there.",
    "cycle": "One round of guessing (draft), checking (verify), keeping what is right (accept), tidying up (commit).",
    "tokens a cycle": "How many tokens one cycle writes on average; plain decoding writes exactly 1.",
    "acceptance": "The share of guesses that turn out right, by their place in the draft.",
    "verify step": "The run of the model that checks the guesses: one row for each guess, and one more.",
    "break-even": "The tokens a cycle at which speculation is just as fast as plain decoding: what one of its cycles "
    "costs, counted in plain cycles.",
    "attention": "The part of the model that looks back at the text so far.",
    "mlp": "The part that works on each token by itself; it holds most of the weights.",
    "lm_head": "The last part, which turns the result into a score for every token of the vocabulary.",
    "rest": "What the verify step spends between its named parts.",
    "host": "The program around the model: choosing what to guess, stop strings, turning tokens into text.",
}


def to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The whole content of the JSON file: what was measured, and beside it what follows."""
    summary = summarise(diagnosis)
    found = verdict(diagnosis, summary)
    return diagnosis.to_json() | {
        "summary": summary.to_json() | {"verdict": {"case": found.case, "sentence": found.sentence}}
    }


def render(diagnosis: Diagnosis) -> str:
    """The page. Everything that a model or a user wrote is escaped by the template engine."""
    summary = summarise(diagnosis)
    folder = Path(__file__).parent / "templates"
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = lambda share: f"{100 * share:.0f} %"
    drawn = {name: Markup(svg) for name, svg in plots(diagnosis, summary).items()}
    return environment.get_template("report.html").render(
        d=diagnosis,
        s=summary,
        verdict=verdict(diagnosis, summary),
        plots={name: drawn.get(name) for name in ("speed", "acceptance", "verify", "cycle")},
        parts=_parts(diagnosis),
        glossary=GLOSSARY,
        explained=EXPLAINED,
        title=f"slipstream: {diagnosis.engine.get('model', 'model')}",
    )


def write_report(diagnosis: Diagnosis, folder: Path) -> list[Path]:
    """Writes both files and returns them. The JSON comes first: if drawing fails, the figures are safe."""
    value = to_json(diagnosis)
    json_path, html_path = folder / JSON_NAME, folder / HTML_NAME
    _write(json_path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    _write(html_path, render(diagnosis))
    return [json_path, html_path]


def check_writable(folder: Path) -> list[Path]:
    """Makes the folder if need be and returns the report's files that are there already; an error if it is no use."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError):
        raise SlipstreamError(f"cannot write the report to {folder}: it is, or lies in, a file") from None
    except OSError as error:
        raise SlipstreamError(f"cannot write the report to {folder}: {error.strerror}") from None
    present = [path for name in (JSON_NAME, HTML_NAME) if (path := folder / name).exists()]
    for path in present:
        if path.is_dir():
            raise SlipstreamError(f"cannot write {path}: it is a folder")
    return present


def _write(path: Path, text: str) -> None:
    """Through a neighbour and a rename, so that an interruption leaves the old file or the new one, never half."""
    neighbour = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # A lone surrogate can come out of a model's bytes; it must not cost the whole report.
        neighbour.write_text(text, encoding="utf-8", errors="backslashreplace")
        neighbour.replace(path)
    except OSError as error:
        neighbour.unlink(missing_ok=True)
        raise SlipstreamError(f"cannot write {path}: {error.strerror}") from None


def _parts(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """The rows of the cycle's table: a part, its colour, microseconds of the plain and of the speculative cycle."""
    plain = diagnosis.plain_cycle.by_part() if diagnosis.plain_cycle else {}
    fast = diagnosis.speculative_cycle.by_part() if diagnosis.speculative_cycle else {}
    names = [name for name in PART_COLOURS if name in plain or name in fast]
    names += sorted((set(plain) | set(fast)) - set(names))
    return [
        {
            "name": name.replace(".", ": "),
            "colour": PART_COLOURS.get(name, "host"),
            "plain": plain.get(name),
            "fast": fast.get(name),
        }
        for name in names
    ]
