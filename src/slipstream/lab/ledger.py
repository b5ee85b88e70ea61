"""Every trial ever made, in one SQLite file that is only appended to.

A trial is written when it begins, each measured run when it ends, the verdict when there is one: whatever ends the
process, what was measured is there, as a trial without a verdict. Several processes may write at once (write-ahead
log); rows are never changed or removed, and the database itself refuses it.
"""

from __future__ import annotations

import datetime
import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from slipstream.errors import SlipstreamError

Arm = Literal["best", "trial"]
"""The best settings so far, or those with the item applied."""
VERDICTS = ("kept", "reverted", "broken", "failed", "interrupted")
"""kept: faster, surely. reverted: not surely faster. broken: other text or other acceptance. failed: it did not run.
interrupted: no verdict was written."""

_VERSION = 1
_WAIT_S = 30.0
_SCHEMA = f"""
CREATE TABLE trials (id INTEGER PRIMARY KEY, started TEXT NOT NULL, item TEXT NOT NULL, machine TEXT NOT NULL,
    topology TEXT NOT NULL, record TEXT NOT NULL);
CREATE TABLE samples (id INTEGER PRIMARY KEY, trial INTEGER NOT NULL REFERENCES trials(id), arm TEXT NOT NULL,
    record TEXT NOT NULL);
CREATE TABLE verdicts (trial INTEGER PRIMARY KEY REFERENCES trials(id), ended TEXT NOT NULL, verdict TEXT NOT NULL,
    note TEXT NOT NULL, record TEXT NOT NULL);
CREATE INDEX samples_of ON samples(trial);
PRAGMA user_version = {_VERSION};
""" + "".join(
    f"CREATE TRIGGER {table}_{verb} BEFORE {verb} ON {table} "
    "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;\n"
    for table in ("trials", "samples", "verdicts")
    for verb in ("update", "delete")
)


@dataclass(frozen=True)
class Sample:
    """One timed run."""

    arm: Arm
    us_per_token: float
    facts: dict[str, Any] = field(default_factory=dict)
    """What else was seen: the prompt, tokens a cycle, how often each position was tried and accepted."""


@dataclass(frozen=True)
class Outcome:
    """What came of a trial."""

    verdict: str
    note: str
    measured: float | None = None
    """Time a token with the item over without it; below 1 is faster. None where nothing could be measured."""
    low: float | None = None
    """Of its 95 % interval."""
    high: float | None = None
    acceptance: tuple[float | None, float | None] = (None, None)
    """Accepted over verified drafted tokens, without and with the item."""


@dataclass(frozen=True)
class Entry:
    """One trial as the ledger has it."""

    id: int
    started: str
    """UTC, ISO 8601."""
    item: str
    machine: str
    topology: str
    """The hash of the machine's topology: figures of different ones are not comparable."""
    record: dict[str, Any]
    """versions, environment, the model, the settings of both arms, and what was predicted (a ratio, as measured)."""
    samples: tuple[Sample, ...]
    outcome: Outcome
    ended: str | None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class Ledger:
    """An open ledger. Use it as a context manager."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Opens it, and makes it unless it is there or `read_only` is asked for. Raises SlipstreamError."""
        self.path = path
        with self._plainly():
            self._db = self._open_to_read() if read_only else self._open_to_write()
            try:
                self._check(read_only)
            except BaseException:
                self._db.close()
                raise

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    def begin(self, item: str, machine: str, topology: str, record: dict[str, Any]) -> int:
        """A trial begins; its number."""
        return self._insert(
            "INSERT INTO trials (started, item, machine, topology, record) VALUES (?, ?, ?, ?, ?)",
            (_now(), item, machine, topology, json.dumps(record)),
        )

    def add(self, trial: int, sample: Sample) -> None:
        """A run of a trial was measured."""
        record = json.dumps({"us_per_token": sample.us_per_token, "facts": sample.facts})
        self._insert("INSERT INTO samples (trial, arm, record) VALUES (?, ?, ?)", (trial, sample.arm, record))

    def end(self, trial: int, outcome: Outcome) -> None:
        """The verdict; there is only one. Raises SlipstreamError at a second."""
        if outcome.verdict not in VERDICTS:
            raise ValueError(f"unknown verdict {outcome.verdict!r}")
        record = asdict(outcome)
        verdict, note = record.pop("verdict"), record.pop("note")
        self._insert(
            "INSERT INTO verdicts (trial, ended, verdict, note, record) VALUES (?, ?, ?, ?, ?)",
            (trial, _now(), verdict, note, json.dumps(record)),
        )

    def entries(
        self,
        *,
        item: str | None = None,
        verdict: str | None = None,
        topology: str | None = None,
        since: str | None = None,
        last: int | None = None,
    ) -> list[Entry]:
        """The trials that match, oldest first. topology: the beginning of a hash. since: an ISO date. last: at most."""
        conditions: dict[str, str | None] = {
            "item = ?": item,
            "COALESCE(verdict, 'interrupted') = ?": verdict,
            "topology LIKE ? || '%'": topology,
            "started >= ?": since,
        }
        asked = {condition: value for condition, value in conditions.items() if value is not None}
        where = " AND ".join(asked) or "1"
        values: list[object] = [*asked.values(), -1 if last is None else last]
        return self._entries(f"{where} ORDER BY id DESC LIMIT ?", values)[::-1]

    def entry(self, trial: int) -> Entry:
        """One trial. Raises SlipstreamError when there is none of that number."""
        found = self._entries("id = ?", [trial])
        if not found:
            raise SlipstreamError(
                f"the ledger {self.path} has no trial {trial}; slipstream ledger lists them"
            )
        return found[0]

    def _entries(self, where: str, values: Sequence[object]) -> list[Entry]:
        with self._plainly():
            rows = self._db.execute(
                "SELECT id, started, item, machine, topology, trials.record, ended, verdict, note, verdicts.record"
                f" FROM trials LEFT JOIN verdicts ON verdicts.trial = id WHERE {where}",
                values,
            ).fetchall()
            return [self._entry(row) for row in rows]

    def _entry(self, row: Sequence[Any]) -> Entry:
        trial, started, item, machine, topology, record, ended, verdict, note, result = row
        samples = self._db.execute(
            "SELECT arm, record FROM samples WHERE trial = ? ORDER BY id", (trial,)
        ).fetchall()
        outcome = Outcome("interrupted", "it ended before a verdict; the runs that were measured are kept")
        if verdict is not None:
            figures = json.loads(result)
            figures["acceptance"] = tuple(figures["acceptance"])
            outcome = Outcome(verdict, note, **figures)
        return Entry(
            trial,
            started,
            item,
            machine,
            topology,
            json.loads(record),
            tuple(Sample(arm, **json.loads(text)) for arm, text in samples),
            outcome,
            ended,
        )

    def _open_to_write(self) -> sqlite3.Connection:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Root may write everywhere; whoever took all write permissions away meant it all the same.
            if self.path.exists() and not self.path.stat().st_mode & 0o222:
                raise PermissionError
        except PermissionError:
            raise SlipstreamError(
                f"the ledger {self.path} cannot be written: it is read-only; name another with --ledger"
            ) from None
        except OSError as error:
            raise SlipstreamError(f"the ledger {self.path} cannot be made: {error.strerror}") from None
        db = sqlite3.connect(self.path, timeout=_WAIT_S, isolation_level=None)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        return db

    def _open_to_read(self) -> sqlite3.Connection:
        if not self.path.exists():
            raise SlipstreamError(f"there is no ledger at {self.path}; slipstream try begins one")
        uri = self.path.absolute().as_uri()
        db = sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=_WAIT_S)
        try:
            db.execute("PRAGMA user_version").fetchone()
        except (
            sqlite3.OperationalError
        ):  # in a folder where the log's index cannot be made, a closed ledger opens so
            db.close()
            db = sqlite3.connect(f"{uri}?immutable=1", uri=True)
        return db

    def _check(self, read_only: bool) -> None:
        """Makes the tables where there are none; refuses what is not a ledger, or a later one."""
        if not read_only:
            self._db.execute("BEGIN IMMEDIATE")  # two processes that both begin one: the second finds it made
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        known = {name for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if version > _VERSION:
            raise SlipstreamError(
                f"the ledger {self.path} was written by a later slipstream; update slipstream"
            )
        if known and not {"trials", "samples", "verdicts"} <= known:
            raise SlipstreamError(f"{self.path} is a database of something else, not a ledger")
        if not read_only:
            if not known:
                for statement in _statements(_SCHEMA):
                    self._db.execute(statement)
            self._db.execute("COMMIT")
        elif not known:
            raise SlipstreamError(f"the ledger {self.path} is empty; slipstream try begins one")

    def _insert(self, statement: str, values: Sequence[object]) -> int:
        with self._plainly():
            number = self._db.execute(statement, values).lastrowid
        assert number is not None
        return number

    @contextmanager
    def _plainly(self) -> Iterator[None]:
        """Errors of the database as one line that says what to do."""
        try:
            yield
        except sqlite3.Error as error:
            what = str(error)
            if "readonly" in what or "unable to open" in what:
                what = "it cannot be written; name another with --ledger"
            elif "locked" in what:
                what = f"another process held it for more than {_WAIT_S:.0f} s; try again"
            elif isinstance(error, sqlite3.DatabaseError) and "not a database" in what:
                what = "it is not a ledger"
            raise SlipstreamError(f"the ledger {self.path}: {what}") from None


def _statements(script: str) -> Iterator[str]:
    """The statements of a script, one by one: `executescript` would commit on its own."""
    pending = ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            yield pending
            pending = ""


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
