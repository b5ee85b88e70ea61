"""The diagnosis: the same prompts plain and speculative in turn, what each cost, and whether the text is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any, Protocol

from slipstream import spans
from slipstream.engine.request import Chunk, Completion, SamplingParams
from slipstream.errors import RequestError
from slipstream.lab.cycle_cost import CycleCost
from slipstream.lab.prompts import Prompt

SCHEMA = "slipstream.diagnosis/1"
STEP_ROWS = (1, 2, 4, 8, 16, 32)
WARM_UP_TOKENS = 16
PROFILED_PROMPTS = 4
"""How many prompts, of different kinds where there are, run once more with spans on."""

Progress = Callable[[str, int, int], None]
"""Called before each piece of work: what it is, how many pieces are done, how many there are."""


class Measured(Protocol):
    """What a diagnosis needs of an engine; `slipstream.Engine` has it."""

    def generate(self, prompt: str, params: SamplingParams, *, speculate: bool) -> Completion: ...

    def stream(self, prompt: str, params: SamplingParams, *, speculate: bool) -> Iterator[Chunk]: ...

    def step_costs(self, rows: Sequence[int], *, context: int) -> dict[int, float]: ...

    def describe(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Run:
    """One timed run of a prompt; the fields of `engine.request.Stats` that the report uses. Times in seconds."""

    new_tokens: int
    cycles: int
    prefill_s: float
    decode_s: float
    finish_reason: str
    cycles_by_drafted: dict[int, int]
    tried: list[int]
    accepted: list[int]

    @property
    def tokens_per_s(self) -> float:
        """New tokens a second of decoding; 0 where the prefill alone gave the whole text and nothing was decoded."""
        return self.new_tokens / self.decode_s if self.cycles and self.decode_s else 0.0

    @classmethod
    def of(cls, completion: Completion) -> Run:
        """The figures of a completion."""
        stats = completion.stats
        return cls(
            new_tokens=stats.new_tokens,
            cycles=stats.cycles,
            prefill_s=stats.prefill_s,
            decode_s=stats.decode_s,
            finish_reason=completion.finish_reason,
            cycles_by_drafted=dict(stats.cycles_by_drafted),
            tried=list(stats.tried),
            accepted=list(stats.accepted),
        )


@dataclass(frozen=True)
class PromptResult:
    """One prompt, both ways."""

    number: int
    """Counted from 1, in the order of the prompt file."""
    kind: str
    prompt: str
    text: str
    """The plain output."""
    plain: Run
    speculative: Run | None
    """None where no drafter was asked for."""
    first_difference: int | None = None
    """The first token at which the speculative output left the plain one; None when they are the same."""

    @property
    def speedup(self) -> float | None:
        """Plain time over speculative time of the same text; None where one of them decoded nothing."""
        if self.speculative is None or not self.plain.tokens_per_s or not self.speculative.tokens_per_s:
            return None
        return self.speculative.tokens_per_s / self.plain.tokens_per_s


@dataclass
class Diagnosis:
    """All that was measured. It grows while it is measured, so that an interruption keeps what is there."""

    provenance: dict[str, Any]
    engine: dict[str, Any]
    settings: dict[str, Any]
    prompts_asked: int
    results: list[PromptResult] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    """By prompt number: why it could not be run (it does not fit, say)."""
    plain_cycle: CycleCost | None = None
    speculative_cycle: CycleCost | None = None
    step_us: dict[int, float] = field(default_factory=dict)
    """Microseconds of verify, accept and commit together, by the number of rows; as the engine measures them."""
    partial: bool = False
    """It ended before the end."""
    error: str | None = None
    """What ended it, where that was not the user."""

    @property
    def mismatches(self) -> list[PromptResult]:
        """The prompts whose speculative output is not the plain one: always a defect."""
        return [result for result in self.results if result.first_difference is not None]

    @property
    def speculative(self) -> bool:
        """Whether a drafter took part."""
        return bool(self.engine.get("draft"))

    def to_json(self) -> dict[str, Any]:
        """Plain values; the keys of dicts by number become texts, as JSON has it."""
        value = {"schema": SCHEMA} | asdict(self)
        for name in ("plain_cycle", "speculative_cycle"):
            cost: CycleCost | None = getattr(self, name)
            value[name] = cost.to_json() if cost else None
        value["step_us"] = {str(rows): us for rows, us in self.step_us.items()}
        value["failed"] = {str(number): why for number, why in self.failed.items()}
        for result in value["results"]:
            for run in (result["plain"], result["speculative"]):
                if run:
                    run["cycles_by_drafted"] = {
                        str(n): count for n, count in run["cycles_by_drafted"].items()
                    }
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Diagnosis:
        """The inverse of `to_json`; what others added beside it (the summary) is left aside."""
        if value.get("schema") != SCHEMA:
            raise ValueError(f"not a {SCHEMA} file: schema is {value.get('schema')!r}")
        costs = {
            name: CycleCost.from_json(value[name]) if value[name] else None
            for name in ("plain_cycle", "speculative_cycle")
        }
        return cls(
            provenance=value["provenance"],
            engine=value["engine"],
            settings=value["settings"],
            prompts_asked=value["prompts_asked"],
            results=[_result_from_json(result) for result in value["results"]],
            failed={int(number): why for number, why in value["failed"].items()},
            step_us={int(rows): us for rows, us in value["step_us"].items()},
            partial=value["partial"],
            error=value.get("error"),
            **costs,
        )


def diagnose(
    engine: Measured,
    prompts: Sequence[Prompt],
    *,
    provenance: dict[str, Any],
    settings: dict[str, Any],
    max_new_tokens: int = 128,
    progress: Progress = lambda what, done, total: None,
) -> Diagnosis:
    """Runs everything. Ctrl-C ends it early: what was measured until then comes back, marked as partial."""
    diagnosis = Diagnosis(provenance, engine.describe(), settings, prompts_asked=len(prompts))
    params = SamplingParams(max_new_tokens=max_new_tokens)
    profiled = _one_of_each_kind(prompts)[:PROFILED_PROMPTS]
    total = len(prompts) + len(profiled) + 2
    try:
        progress("warming up", 0, total)
        _warm_up(engine, prompts[0], diagnosis.speculative)
        for index, prompt in enumerate(prompts):
            progress(f"{prompt.kind} prompt {index + 1} of {len(prompts)}", index + 1, total)
            _measure(engine, index + 1, prompt, params, diagnosis)
        _profile(
            engine,
            profiled,
            params,
            diagnosis,
            lambda what, done: progress(what, len(prompts) + 1 + done, total),
        )
        progress("measuring a step by its rows", total - 1, total)
        diagnosis.step_us = dict(engine.step_costs(STEP_ROWS, context=256))
        progress("done", total, total)
    except KeyboardInterrupt:
        diagnosis.partial = True
    except Exception as error:  # minutes of measuring must not be lost to whatever it is
        diagnosis.partial, diagnosis.error = True, f"{type(error).__name__}: {error}"
    return diagnosis


def _warm_up(engine: Measured, prompt: Prompt, speculative: bool) -> None:
    """The first passes pay for memory and packed weights; nobody should count them."""
    params = SamplingParams(max_new_tokens=WARM_UP_TOKENS)
    for speculate in (False, True) if speculative else (False,):
        try:
            engine.generate(prompt.prompt, params, speculate=speculate)
        except RequestError:
            return  # the measuring itself will say which prompt does not fit, and why


def _measure(
    engine: Measured, number: int, prompt: Prompt, params: SamplingParams, diagnosis: Diagnosis
) -> None:
    """One prompt both ways; every second prompt the other way round, so that a drift of the machine hits both."""
    order = (False,) if not diagnosis.speculative else (False, True) if number % 2 else (True, False)
    try:
        done = {speculate: engine.generate(prompt.prompt, params, speculate=speculate) for speculate in order}
    except RequestError as error:
        diagnosis.failed[number] = str(error)
        return
    plain, speculative = done[False], done.get(True)
    diagnosis.results.append(
        PromptResult(
            number=number,
            kind=prompt.kind,
            prompt=prompt.prompt,
            text=plain.text,
            plain=Run.of(plain),
            speculative=Run.of(speculative) if speculative else None,
            first_difference=first_difference(plain.token_ids, speculative.token_ids)
            if speculative
            else None,
        )
    )


def first_difference(plain: Sequence[int], speculative: Sequence[int]) -> int | None:
    """The first position at which two token lists differ, a missing token included; None when they are equal."""
    for position, (a, b) in enumerate(zip(plain, speculative, strict=False)):
        if a != b:
            return position
    return None if len(plain) == len(speculative) else min(len(plain), len(speculative))


def _profile(
    engine: Measured,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    diagnosis: Diagnosis,
    progress: Callable[[str, int], None],
) -> None:
    """Where a cycle's time goes, from runs apart from the timed ones, as spans cost a little themselves."""
    sums = {False: _SpanSum(), True: _SpanSum()}
    for index, prompt in enumerate(prompts):
        progress("looking inside a cycle", index)
        for speculate in (False, True) if diagnosis.speculative else (False,):
            try:
                sums[speculate].add(engine.stream(prompt.prompt, params, speculate=speculate))
            except RequestError:
                continue  # listed as failed already
            diagnosis.plain_cycle = sums[False].cost()
            diagnosis.speculative_cycle = sums[True].cost()


def measured_cycle(
    engine: Measured, prompts: Sequence[Prompt], params: SamplingParams, *, speculate: bool
) -> CycleCost | None:
    """The mean cycle over these prompts, by part; None where no prompt took a cycle."""
    total = _SpanSum()
    for prompt in prompts:
        total.add(engine.stream(prompt.prompt, params, speculate=speculate))
    return total.cost()


class _SpanSum:
    """Spans of several streamed runs together, each from its first piece of text on: the prefill stays outside."""

    def __init__(self) -> None:
        self.self_us: dict[str, float] = {}
        self.wall_us = 0.0
        self.cycles = self.tokens = 0
        self.rows = 0.0  # summed over whole runs, so divided by the cycles of whole runs
        self.run_cycles = 0

    def add(self, chunks: Iterator[Chunk]) -> None:
        """Runs the stream to its end."""
        next(chunks, None)
        with spans.recording() as recorded:
            start = perf_counter()
            rest = list(chunks)
            wall_s = perf_counter() - start
        cycles = sum(name == "verify" for name, _ in recorded.events)
        if not cycles:
            return
        self.cycles += cycles
        self.wall_us += wall_s * 1e6
        self.tokens += sum(len(chunk.token_ids) for chunk in rest)
        for name, us in recorded.self_us().items():
            self.self_us[name] = self.self_us.get(name, 0.0) + us
        stats = rest[-1].stats
        for drafted, count in (stats.cycles_by_drafted if stats else {}).items():
            self.rows += (1 + drafted) * count
            self.run_cycles += count

    def cost(self) -> CycleCost | None:
        """The mean cycle; None while there was none."""
        if not self.cycles:
            return None
        return CycleCost.from_spans(
            self.self_us,
            cycles=self.cycles,
            rows=self.rows / self.run_cycles if self.run_cycles else 1.0,
            tokens=self.tokens / self.cycles,
            wall_us=self.wall_us,
        )


def _one_of_each_kind(prompts: Sequence[Prompt]) -> list[Prompt]:
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(prompt.kind, prompt)
    return list(first.values())


def _result_from_json(value: dict[str, Any]) -> PromptResult:
    runs = {name: _run_from_json(value[name]) if value[name] else None for name in ("plain", "speculative")}
    return PromptResult(**(value | runs))


def _run_from_json(value: dict[str, Any]) -> Run:
    return Run(**(value | {"cycles_by_drafted": {int(n): c for n, c in value["cycles_by_drafted"].items()}}))
