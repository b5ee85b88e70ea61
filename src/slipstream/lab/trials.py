"""Trying optimisations one by one: applied, measured against the best so far in turn, kept or not, written down."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any, Protocol

from slipstream.engine.request import Completion, SamplingParams
from slipstream.errors import SlipstreamError
from slipstream.lab.case import Case
from slipstream.lab.cases import make_case
from slipstream.lab.cycle_cost import CycleCost
from slipstream.lab.diagnosis import WARM_UP_TOKENS, Measured, measured_cycle
from slipstream.lab.ledger import Arm, Ledger, Outcome, Sample
from slipstream.lab.optimisations.base import Optimisation
from slipstream.lab.predict import Shares
from slipstream.lab.prompts import Prompt
from slipstream.lab.provenance import provenance
from slipstream.machine.curve import AllReduceCurve, Segment
from slipstream.machine.machine import Machine

RESAMPLES = 4000
MOVED = 0.03
"""A change of the first position's acceptance by less than that is none, however sure it is."""
RECORDED = ("NCCL_", "SLIPSTREAM_", "OMP_", "GOMP_", "MKL_", "CUDA_", "TORCH_", "GLOO_")
"""Beginnings of the environment variables that go into the ledger; none of them holds a secret."""


class Tried(Measured, Protocol):
    """What a trial needs of an engine beyond a diagnosis."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class EngineSettings:
    """How an engine is started and asked."""

    model: str = "smollm2-135m"
    draft: str | None = "ngram"
    dtype: str = "bfloat16"
    weights: str = "auto"
    threads: int | None = None
    tp: int = 1
    all_reduce: str = "auto"
    draft_tokens: int | None = None
    """None leaves the number to the controller."""

    @property
    def start(self) -> dict[str, Any]:
        """The arguments of `slipstream.Engine`."""
        names = ("model", "draft", "dtype", "weights", "threads", "tp", "all_reduce")
        return {name: getattr(self, name) for name in names}

    def changes(self, other: EngineSettings) -> dict[str, Any]:
        """What the other has different."""
        return {name: value for name, value in vars(other).items() if getattr(self, name) != value}


@dataclass
class Bench:
    """Where and on what trials are made."""

    machine: Machine
    prompts: Sequence[Prompt]
    make: Callable[[EngineSettings], Tried]
    ledger: Ledger
    shares: Shares | None = None
    rounds: int = 3
    max_new_tokens: int = 64
    lossy: bool = False
    """Whether an item that changes the text may be kept."""
    progress: Callable[[str, int, int], None] = lambda what, done, total: None
    command: list[str] | None = None
    _engines: dict[str, Tried] = field(default_factory=dict)

    def engine(self, settings: EngineSettings) -> Tried:
        """The engine of these settings, warm; at most two are held, the best and the one on trial."""
        key = str(settings.start)
        if key not in self._engines:
            while len(self._engines) >= 2:
                self._engines.pop(list(self._engines)[-1]).close()
            engine = self.make(settings)
            engine.generate(
                self.prompts[0].prompt, SamplingParams(max_new_tokens=WARM_UP_TOKENS), speculate=True
            )
            self._engines[key] = engine
        return self._engines[key]

    def close(self) -> None:
        """Ends all engines."""
        while self._engines:
            self._engines.popitem()[1].close()

    def keep(self, settings: EngineSettings) -> None:
        """Ends all engines but that of these settings."""
        key = str(settings.start)
        for other in [name for name in self._engines if name != key]:
            self._engines.pop(other).close()


@dataclass(frozen=True)
class Trial:
    """What came of one item."""

    item: str
    settings: EngineSettings
    predicted: float | None
    """Time a token with it over without it."""
    outcome: Outcome
    number: int | None = None
    """In the ledger; None where nothing was run."""


def case_of(bench: Bench, settings: EngineSettings) -> Case:
    """The case that these settings are, its predictions moved to what is measured now."""
    engine = bench.engine(settings)
    described = engine.describe()
    speculates = settings.draft is not None
    params = SamplingParams(max_new_tokens=bench.max_new_tokens)
    some = bench.prompts[:4]
    plain = measured_cycle(engine, some, params, speculate=False)
    fast = measured_cycle(engine, some, params, speculate=True) if speculates else None
    rows = max(round(fast.rows), 1) if fast and fast.rows else 1
    case = make_case(
        bench.machine,
        settings.model,
        rows=rows,
        context=256,
        tp=settings.tp,
        backend=str(described.get("all_reduce")) if settings.tp > 1 else None,
        draft="ngram" if settings.draft in (None, "ngram") else "eagle3",
        dtype=str(described["dtype"]),
        weights=str(described["weights"]),
        threads=int(described["threads"]),
        shares=bench.shares,
    )
    tokens = fast.tokens if fast and fast.tokens else 1.0
    chance = case.draft_shape.needed(min(tokens, case.fast.drafted + 1)) if case.fast.drafted else 0.0
    case = replace(
        case,
        acceptance=chance or 0.0,
        acceptance_is_known=True,
        adaptive=speculates and settings.draft_tokens is None,
    )
    if case.fast.tp > 1 and not bench.machine.all_reduce_curves(case.fast.backend, case.fast.tp):
        case = case.both(curve=_seen_curve(case, plain))
    return case.seen(plain, fast)


def _seen_curve(case: Case, plain: CycleCost | None) -> AllReduceCurve:
    """What a call of a backend took that the machine has no curve of, whatever its size."""
    calls = len(case.shape.collectives(1, case.fast.tp, 2))
    us = plain.kind_us("collective", "verify") / calls if plain else 0.0
    segment = Segment("measured", 1, max(us, 0.1))
    source = "measured in the engine itself, one size"
    return AllReduceCurve(case.fast.backend, case.fast.tp, False, source, 2**20, (segment,))


def settings_for(item: Optimisation, case: Case, best: EngineSettings) -> EngineSettings | None:
    """The settings with the item applied; None where it is not an engine setting here, or is in use."""
    if item.here is None:
        return None
    changes = dict(item.here)
    if changes.get("draft_tokens") == "best":
        changes["draft_tokens"] = item.change(case).fast.drafted
    applied = replace(best, **changes)  # type: ignore[arg-type]
    return None if applied == best else applied


def predicted_ratio(case: Case, item: Optimisation) -> float:
    """Time a token with it over without it, of the decoding that is measured."""
    after = item.change(case)
    if case.fast.drafted:
        return case.fast_speed / after.fast_speed
    return case.plain_speed / after.plain_speed


def run(bench: Bench, item: Optimisation, best: EngineSettings) -> Trial:
    """One item against the best settings so far. Ctrl-C ends the trial, writes that down, and is raised again."""
    case = case_of(bench, best)
    feasible = item.feasible(case)
    if not feasible.possible:
        return Trial(item.name, best, None, Outcome("failed", f"cannot work here: {feasible.because}"))
    settings = settings_for(item, case, best)
    if settings is None:
        return Trial(item.name, best, None, Outcome("failed", "there is nothing to change for it here"))
    predicted = predicted_ratio(case, item)
    number = bench.ledger.begin(
        item.name, bench.machine.name, bench.machine.fingerprint, _record(bench, best, settings, predicted)
    )
    samples: list[Sample] = []
    try:
        outcome = _measure(bench, item, best, settings, number, samples)
    except KeyboardInterrupt:
        note = f"interrupted after {len(samples)} measured runs"
        bench.ledger.end(number, Outcome("interrupted", note))
        raise
    except SlipstreamError as error:
        outcome = Outcome("failed", f"it did not run: {' '.join(str(error).split())}")
    bench.ledger.end(number, outcome)
    return Trial(item.name, settings, predicted, outcome, number)


def _measure(
    bench: Bench,
    item: Optimisation,
    best: EngineSettings,
    settings: EngineSettings,
    number: int,
    samples: list[Sample],
) -> Outcome:
    """Runs both in turn, every second time the other way round, and judges."""
    arms: Mapping[Arm, EngineSettings] = {"best": best, "trial": settings}
    engines = {arm: bench.engine(each) for arm, each in arms.items()}
    total = bench.rounds * len(bench.prompts)
    for round_ in range(bench.rounds):
        for index, prompt in enumerate(bench.prompts):
            bench.progress(f"{item.name}: round {round_ + 1}", round_ * len(bench.prompts) + index, total)
            order: tuple[Arm, ...] = ("best", "trial") if (round_ + index) % 2 == 0 else ("trial", "best")
            for arm in order:
                done = _generate(engines[arm], prompt, bench.max_new_tokens, arms[arm])
                sample = _sample(arm, index, round_, done)
                if sample is not None:
                    bench.ledger.add(number, sample)
                    samples.append(sample)
    bench.progress(f"{item.name}: done", total, total)
    return judge(samples, changes_text=item.changes_text, may_change_text=bench.lossy)


def _generate(engine: Tried, prompt: Prompt, tokens: int, settings: EngineSettings) -> Completion:
    options: dict[str, Any] = {}
    if settings.draft_tokens is not None:
        options["draft_tokens"] = settings.draft_tokens
    params = SamplingParams(max_new_tokens=tokens)
    return engine.generate(prompt.prompt, params, speculate=settings.draft is not None, **options)


def _sample(arm: Arm, prompt: int, round_: int, done: Completion) -> Sample | None:
    """None where the prefill gave the whole text and nothing was decoded."""
    stats = done.stats
    if not stats.cycles or not stats.new_tokens:
        return None
    text = hashlib.sha256(repr(done.token_ids).encode()).hexdigest()[:16]
    facts = {
        "prompt": prompt,
        "round": round_,
        "tokens": stats.new_tokens,
        "cycles": stats.cycles,
        "tried": list(stats.tried),
        "accepted": list(stats.accepted),
        "text": text,
    }
    return Sample(arm, stats.decode_s * 1e6 / stats.new_tokens, facts)


def judge(samples: Sequence[Sample], *, changes_text: bool, may_change_text: bool) -> Outcome:
    """The verdict on measured pairs: the same text, the same acceptance, and surely faster."""
    pairs = _pairs(samples)
    if len(pairs) < 2:
        return Outcome("failed", "too little was decoded to compare")
    acceptance = (_acceptance(samples, "best"), _acceptance(samples, "trial"))
    different = sorted(
        {best.facts["prompt"] + 1 for best, trial in pairs if best.facts["text"] != trial.facts["text"]}
    )
    times = [(best.us_per_token, trial.us_per_token) for best, trial in pairs]
    ratio, low, high = _ratio(times), *interval(times)
    texts = (
        f"other text for prompt {', '.join(map(str, different))}" if different else "the same text everywhere"
    )
    found = Outcome("reverted", "", ratio, low, high, acceptance)
    if different and not changes_text:
        return replace(found, verdict="broken", note=f"{texts}: it must change nothing")
    if _moved(samples) and not changes_text:
        return replace(found, verdict="broken", note="the acceptance of the first position moved")
    sure = f"{len(pairs)} pairs of runs, {texts}"
    if high >= 1:
        return replace(found, note=f"not surely faster; {sure}")
    if different and not may_change_text:
        return replace(found, note=f"faster, but it changes the text (--lossy would keep it); {sure}")
    return replace(found, verdict="kept", note=f"surely faster; {sure}")


def interval(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Bootstrap over the pairs, 2.5 % to 97.5 % of the ratio; the seed is fixed, so that it can be made again."""
    draw = random.Random(0)
    ratios = sorted(_ratio(draw.choices(times, k=len(times))) for _ in range(RESAMPLES))
    return ratios[int(0.025 * RESAMPLES)], ratios[int(0.975 * RESAMPLES) - 1]


def _ratio(times: Sequence[tuple[float, float]]) -> float:
    return sum(trial for _, trial in times) / sum(best for best, _ in times)


def _pairs(samples: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    by_run: dict[tuple[int, int], dict[str, Sample]] = {}
    for sample in samples:
        by_run.setdefault((sample.facts["round"], sample.facts["prompt"]), {})[sample.arm] = sample
    return [(both["best"], both["trial"]) for both in by_run.values() if len(both) == 2]


def _counts(samples: Sequence[Sample], arm: Arm, positions: int | None = None) -> tuple[int, int]:
    """Drafted tokens that were tried and accepted."""
    tried = sum(sum(each.facts["tried"][:positions]) for each in samples if each.arm == arm)
    accepted = sum(sum(each.facts["accepted"][:positions]) for each in samples if each.arm == arm)
    return tried, accepted


def _acceptance(samples: Sequence[Sample], arm: Arm) -> float | None:
    tried, accepted = _counts(samples, arm)
    return accepted / tried if tried else None


def _moved(samples: Sequence[Sample]) -> bool:
    """Whether the first position is accepted surely more or less often; later ones depend on the draft's size."""
    (tried_a, hits_a), (tried_b, hits_b) = (_counts(samples, arm, 1) for arm in ("best", "trial"))
    if not tried_a or not tried_b:
        return False
    difference = abs(hits_a / tried_a - hits_b / tried_b)
    pooled = (hits_a + hits_b) / (tried_a + tried_b)
    error = sqrt(pooled * (1 - pooled) * (1 / tried_a + 1 / tried_b))
    return difference > MOVED and difference > 3 * error


def _record(bench: Bench, best: EngineSettings, settings: EngineSettings, predicted: float) -> dict[str, Any]:
    about = provenance(bench.command)
    versions = {name: about[name] for name in ("python", "torch", "slipstream")}
    versions |= {name: value for name, value in vars(bench.machine.versions).items() if value}
    return {
        "predicted": predicted,
        "changed": best.changes(settings),
        "settings_before": vars(best),
        "settings_with": vars(settings),
        "versions": versions,
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(RECORDED)
        },
        "prompts": len(bench.prompts),
        "rounds": bench.rounds,
        "max_new_tokens": bench.max_new_tokens,
        "command": about["command"],
    }
