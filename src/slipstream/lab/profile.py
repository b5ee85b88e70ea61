"""Measures where a cycle of our own engine spends its time, by the spans that the engine's code marks.

Each cycle is taken by itself: the spans and the clock between one piece of text and the next. So cycles of different
rows are never mixed, and what the spans miss shows as the part of the clock's time that is not explained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING

from torch import Tensor

from slipstream import spans
from slipstream.draft.drafter import Drafter
from slipstream.draft.text import Text
from slipstream.draft.tree import Tree
from slipstream.engine.request import SamplingParams
from slipstream.errors import SlipstreamError
from slipstream.lab.cycle_cost import CycleCost

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine
    from slipstream.target.family import Target

Progress = Callable[[str, int, int], None]
WARM_UP_TOKENS = 8


def profile(
    engine: Engine,
    prompts: Sequence[str],
    *,
    rows: int = 8,
    new_tokens: int = 64,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, CycleCost]:
    """The mean cost of a speculative cycle of `rows` rows and of a plain one, as `verify 8 rows` and `decode 1 row`.

    Every prompt runs plain and with rows - 1 drafted tokens, in turn. Cycles in which the drafter had nothing to draft
    are left out. An engine without a drafter gives the plain cycle alone. Raises SlipstreamError where nothing was
    decoded.
    """
    if rows < 2:
        raise SlipstreamError(f"rows is {rows}; a verify step has at least 2")
    drafter = engine.drafter
    watched = _Watched(drafter) if drafter else None
    if watched:
        engine.use(watched)
    sums = {1: _Sum(), rows: _Sum()} if watched else {1: _Sum()}
    try:
        for drafted in (rows - 1, 0) if watched else (0,):
            params = SamplingParams(max_new_tokens=WARM_UP_TOKENS, ignore_eos=True)
            engine.generate(prompts[0], params, speculate=drafted > 0, draft_tokens=drafted or None)
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            progress(f"prompt {index + 1} of {len(prompts)}", index, len(prompts))
            _run(engine, prompt, params, 0, None, sums)
            if watched:
                _run(engine, prompt, params, rows - 1, watched, sums)
    finally:
        if drafter:
            engine.use(drafter)
    progress("done", len(prompts), len(prompts))
    span_us = _span_us()
    named = {f"verify {rows} rows": rows, "decode 1 row": 1} if watched else {"decode 1 row": 1}
    costs = {
        name: sums[number].cost(number, span_us) for name, number in named.items() if sums[number].cycles
    }
    if not costs:
        raise SlipstreamError("nothing was decoded: ask for more than one new token")
    return costs


def _run(
    engine: Engine,
    prompt: str,
    params: SamplingParams,
    drafted: int,
    watched: _Watched | None,
    sums: dict[int, _Sum],
) -> None:
    """One text. What its first piece took is the prefill, and not counted."""
    stream = engine.stream(prompt, params, speculate=drafted > 0, draft_tokens=drafted or None)
    next(stream, None)
    with spans.recording() as recorded:
        begun, at = 0, perf_counter()
        for chunk in stream:
            now = perf_counter()
            rows = 1 + watched.size if watched else 1
            if watched and rows == 1:
                sums[1 + drafted].without_draft += 1
            else:
                sums[rows].add(recorded.events[begun:], (now - at) * 1e6, len(chunk.token_ids))
            begun, at = len(recorded.events), perf_counter()


class _Sum:
    """Cycles of one number of rows."""

    def __init__(self) -> None:
        self.self_us: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.wall_us = 0.0
        self.cycles = self.tokens = self.without_draft = 0

    def add(self, events: list[tuple[str | None, int]], wall_us: float, tokens: int) -> None:
        """One cycle."""
        one = spans.Spans()
        one.events = events
        self.self_us.update(one.self_us())
        self.calls.update(name for name, _ in events if name is not None)
        self.wall_us += wall_us
        self.cycles += 1
        self.tokens += tokens

    def cost(self, rows: int, span_us: float) -> CycleCost:
        """Their mean."""
        spans_each = sum(self.calls.values()) / self.cycles
        evidence = [
            f"Spans were on: {spans_each:.0f} a cycle, which cost about {span_us * spans_each:.0f} us of it."
        ]
        if self.without_draft:
            evidence.append(
                f"The drafter had nothing to draft in {self.without_draft} other cycles, which are left out."
            )
        return CycleCost.from_spans(
            self.self_us,
            cycles=self.cycles,
            rows=rows,
            tokens=self.tokens / self.cycles,
            wall_us=self.wall_us,
            calls=self.calls,
            evidence=evidence,
        )


def _span_us(count: int = 20_000) -> float:
    """Microseconds that one recorded span costs."""
    with spans.recording():
        start = perf_counter_ns()
        for _ in range(count):
            with spans.span("host"):
                pass
        return (perf_counter_ns() - start) / 1e3 / count


class _Watched(Drafter):
    """A drafter that tells the size of the last cycle's tree; cycles are read as they are run (lag 0, on a CPU)."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.size = drafter, 0
        self.name, self.max_drafted, self.taps = drafter.name, drafter.max_drafted, drafter.taps
        self.is_free, self.is_tree, self.is_capturable = (
            drafter.is_free,
            drafter.is_tree,
            drafter.is_capturable,
        )

    def attach(self, target: Target, slots: int, width: int) -> None:
        self._drafter.attach(target, slots, width)
        self.taps = self._drafter.taps

    def reset(self, slot: int) -> None:
        self._drafter.reset(slot)

    def before(self, text: Text, slots: Sequence[int], size: int, observed: int) -> int:
        self.size = size
        return self._drafter.before(text, slots, size, observed)

    def observe(self, text: Text, slots: Tensor, first: Tensor, features: Tensor) -> None:
        self._drafter.observe(text, slots, first, features)

    def outlook(self, text: Text, slots: Tensor) -> Tensor:
        return self._drafter.outlook(text, slots)

    def draft(self, text: Text, slots: Tensor, size: int) -> Tree:
        return self._drafter.draft(text, slots, size)
