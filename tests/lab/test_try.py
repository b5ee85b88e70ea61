"""Trials: with engines of known speeds, what is kept and what is not; nothing that was measured is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.cli import main
from slipstream.engine.request import Chunk, Completion, SamplingParams, Stats
from slipstream.errors import SlipstreamError
from slipstream.lab import trials
from slipstream.lab.ledger import Ledger, Sample
from slipstream.lab.optimisations import every
from slipstream.lab.prompts import Prompt
from slipstream.machine.machine import Machine
from slipstream.spans import span
from tests.lab.boxes import cpu

PROMPTS = [Prompt("chat", "one"), Prompt("code", "two"), Prompt("edit", "three")]


@dataclass
class Behaviour:
    """How the invented engines behave, by what they were started with."""

    shm: float = 0.3
    """Time of a cycle with the shared-memory all-reduce over that with Gloo."""
    int8: float = 0.6
    other_text: tuple[str, ...] = ()
    """Settings that change the text."""
    acceptance: float = 0.5
    shm_acceptance: float = 0.5
    broken: str = ""
    interrupt_after: int | None = None
    runs: int = 0


class Invented:
    """An engine whose every cycle takes a known time."""

    def __init__(self, behaviour: Behaviour, settings: dict[str, Any]) -> None:
        self.behaviour, self.settings = behaviour, settings
        if behaviour.broken in (settings["all_reduce"], settings["weights"]):
            raise SlipstreamError("the backend cannot\nrun here")

    def generate(
        self, prompt: str, params: SamplingParams, *, speculate: bool, draft_tokens: int | None = None
    ) -> Completion:
        it = self.behaviour
        if it.runs == it.interrupt_after:
            raise KeyboardInterrupt
        it.runs += 1
        tokens = list(range(params.max_new_tokens))
        if self.settings["all_reduce"] in it.other_text or self.settings["weights"] in it.other_text:
            tokens[3] = 7
        chance = it.shm_acceptance if self.settings["all_reduce"] == "shm" else it.acceptance
        stats = Stats(prompt_tokens=9, new_tokens=len(tokens), cycles=len(tokens) // 2)
        stats.tried, stats.accepted = [2000], [round(2000 * chance)]
        stats.decode_s = stats.cycles * self._cycle_s() * (1 + 0.01 * (it.runs % 3))
        return Completion("text", tokens, "length", stats)

    def stream(self, prompt: str, params: SamplingParams, *, speculate: bool) -> Iterator[Chunk]:
        yield Chunk("first", [0])
        for index in range(3):
            with span("verify"):
                for name, seconds in (("attention", 1e-4), ("mlp", 1e-4), ("all_reduce", 4e-3)):
                    with span(name):
                        time.sleep(seconds)
            stats = Stats(cycles=3, cycles_by_drafted={3 if speculate else 0: 3})
            yield Chunk("x", [1, 2] if speculate else [1], "length" if index == 2 else None, stats)

    def step_costs(self, rows: Sequence[int], *, context: int = 256) -> dict[int, float]:
        return dict.fromkeys(rows, self._cycle_s() * 1e6)

    def describe(self) -> dict[str, Any]:
        weights = "bfloat16" if self.settings["weights"] == "auto" else self.settings["weights"]
        backend = "gloo" if self.settings["all_reduce"] == "auto" else self.settings["all_reduce"]
        return {"dtype": "bfloat16", "weights": weights, "threads": 1, "all_reduce": backend}

    def close(self) -> None:
        self.settings = {}

    def _cycle_s(self) -> float:
        it, seconds = self.behaviour, 0.03
        seconds *= it.shm if self.settings["all_reduce"] == "shm" else 1
        return seconds * (it.int8 if self.settings["weights"] == "int8" else 1)


BASE = trials.EngineSettings(tp=2, all_reduce="gloo", threads=1)


def bench(tmp_path: Path, behaviour: Behaviour, **options: Any) -> trials.Bench:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    return trials.Bench(
        cpu(),
        PROMPTS,
        lambda settings: Invented(behaviour, settings.start),
        ledger,
        **({"rounds": 2} | options),
    )


def test_what_is_surely_faster_is_kept(tmp_path: Path) -> None:
    on = bench(tmp_path, Behaviour())
    trial = trials.run(on, every()["shared_memory"], BASE)
    assert trial.outcome.verdict == "kept"
    assert trial.settings == replace(BASE, all_reduce="shm")
    assert trial.outcome.measured == pytest.approx(0.3, rel=0.02)
    assert trial.outcome.low is not None
    assert trial.outcome.high is not None
    assert trial.outcome.low <= trial.outcome.measured <= trial.outcome.high < 1
    (entry,) = on.ledger.entries()
    assert len(entry.samples) == 2 * 2 * len(PROMPTS)
    assert entry.outcome == trial.outcome
    assert entry.record["changed"] == {"all_reduce": "shm"}
    assert entry.record["predicted"] == trial.predicted
    assert 0 < entry.record["predicted"] < 1
    assert entry.topology == on.machine.fingerprint
    assert {"torch", "slipstream", "python"} <= set(entry.record["versions"])
    arms = [sample.arm for sample in entry.samples]
    assert arms[:4] == ["best", "trial", "trial", "best"]  # in turn, every second time the other way round


@pytest.mark.parametrize(
    ("behaviour", "item", "verdict", "note"),
    [
        (Behaviour(shm=1.2), "shared_memory", "reverted", "not surely faster"),
        (Behaviour(shm=1.0), "shared_memory", "reverted", "not surely faster"),
        (Behaviour(other_text=("shm",)), "shared_memory", "broken", "other text for prompt 1, 2, 3"),
        (Behaviour(shm_acceptance=0.06), "shared_memory", "broken", "acceptance of the first position moved"),
        (Behaviour(broken="shm"), "shared_memory", "failed", "the backend cannot run here"),
        (Behaviour(other_text=("int8",)), "weight_format", "reverted", "--lossy would keep it"),
        (Behaviour(), "weight_format", "kept", "the same text everywhere"),
        (Behaviour(), "graph_verify", "failed", "there is no GPU here"),
        (Behaviour(), "acceptance", "failed", "n-grams cannot be trained"),
    ],
)
def test_verdicts(tmp_path: Path, behaviour: Behaviour, item: str, verdict: str, note: str) -> None:
    trial = trials.run(bench(tmp_path, behaviour), every()[item], BASE)
    assert (trial.outcome.verdict, note in trial.outcome.note) == (verdict, True)


def test_lossy_items_can_be_kept_on_request(tmp_path: Path) -> None:
    on = bench(tmp_path, Behaviour(other_text=("int8",)), lossy=True)
    assert trials.run(on, every()["weight_format"], BASE).outcome.verdict == "kept"


def test_an_interruption_loses_nothing(tmp_path: Path) -> None:
    on = bench(tmp_path, Behaviour(interrupt_after=2 + 5))  # two warm-ups, then five measured runs
    with pytest.raises(KeyboardInterrupt):
        trials.run(on, every()["shared_memory"], BASE)
    (entry,) = on.ledger.entries()
    assert len(entry.samples) == 5
    assert (entry.outcome.verdict, entry.outcome.note) == ("interrupted", "interrupted after 5 measured runs")


def pairs(*times: tuple[float, float], text: str = "a", hits: tuple[int, int] = (50, 50)) -> list[Sample]:
    samples = []
    for index, both in enumerate(times):
        for arm, us, accepted in zip(("best", "trial"), both, hits, strict=True):
            facts = {"prompt": index, "round": 0, "tried": [100], "accepted": [accepted], "text": text}
            samples.append(Sample(arm, us, facts))  # type: ignore[arg-type]
    return samples


def test_the_interval_decides() -> None:
    def verdict(*times: tuple[float, float]) -> str:
        return trials.judge(pairs(*times), changes_text=False, may_change_text=False).verdict

    assert verdict((10, 9), (10, 9.1), (10, 8.9)) == "kept"
    assert verdict((10, 5), (10, 14), (10, 8)) == "reverted"  # faster on the whole, but not surely
    assert verdict((10, 9)) == "failed"
    # Twenty points of acceptance, but of a few drafts each: chance.
    few = trials.judge(pairs((10, 9), (10, 9), hits=(50, 47)), changes_text=False, may_change_text=False)
    assert few.verdict == "kept"


class Started:
    """Stands in for `slipstream.Engine`."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour

    def __call__(self, **settings: Any) -> Invented:
        return Invented(self.behaviour, settings)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Behaviour:
    behaviour = Behaviour()
    monkeypatch.setitem(vars(slipstream), "Engine", Started(behaviour))
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: cpu()))
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SLIPSTREAM_LEDGER", str(tmp_path / "ledger.sqlite"))
    return behaviour


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["try", *argv])
    written = capsys.readouterr()
    return int(stop.value.code or 0), written.out, written.err


def test_command(here: Behaviour, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ("--tp", "2", "--all-reduce", "gloo", "--count", "4", "--rounds", "2", "--json")
    status, out, err = run(capsys, "shared_memory", "weight_format", *options)
    assert status == 0, err
    found = json.loads(out)
    assert [trial["outcome"]["verdict"] for trial in found["trials"]] == ["kept", "kept"]
    assert (found["best"]["all_reduce"], found["best"]["weights"]) == ("shm", "int8")
    assert str(tmp_path / "ledger.sqlite") in err
    with Ledger(tmp_path / "ledger.sqlite", read_only=True) as ledger:
        first, second = ledger.entries()
    assert second.record["settings_before"]["all_reduce"] == "shm"  # against the best so far
    assert first.record["settings_before"]["all_reduce"] == "gloo"


def test_all_takes_what_can_be_applied_here(here: Behaviour, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(
        capsys, "--all", "--tp", "2", "--all-reduce", "gloo", "--count", "2", "--rounds", "1"
    )
    assert status == 0
    assert "shared_memory" in out
    assert "Best:" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "name the optimisations to try, or give --all"),
        (("--all", "adaptive"), "or give --all"),
        (("warp_drive",), "unknown optimisation 'warp_drive'"),
    ],
)
def test_bad_input(
    here: Behaviour, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str
) -> None:
    status, out, err = run(capsys, *argv)
    assert (status, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_read_only_ledger_is_said_before_anything_runs(
    here: Behaviour, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "old.sqlite"
    Ledger(path).close()
    path.chmod(0o444)
    status, _, err = run(capsys, "shared_memory", "--ledger", str(path))
    assert status == 1
    assert "read-only" in err
    assert here.runs == 0
