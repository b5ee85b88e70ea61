"""An engine with invented figures: the lab's code runs fast on it, with known answers. Never a source."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from slipstream.engine.request import Chunk, Completion, SamplingParams, Stats
from slipstream.errors import RequestError
from slipstream.spans import span

GAIN = {"chat": 1.0, "code": 1.4, "summarise": 1.9, "edit": 3.2}


class FakeEngine:
    """Every cycle costs 10 ms plain and 12 ms speculative; tokens a cycle depend on the prompt's first word."""

    def __init__(
        self,
        *,
        gain: dict[str, float] | None = None,
        cycle_ms: float = 12.0,
        draft: str | None = "ngram",
        wrong: str = "",
        interrupt_after: int | None = None,
    ) -> None:
        self.gain, self.cycle_ms, self.draft, self.wrong = gain or GAIN, cycle_ms, draft, wrong
        self.interrupt_after = interrupt_after
        self.calls: list[tuple[str, bool]] = []

    def generate(
        self, prompt: str, params: SamplingParams, *, speculate: bool = True, raw: bool = False
    ) -> Completion:
        if len(self.calls) == self.interrupt_after:
            raise KeyboardInterrupt
        if "TOO LONG" in prompt:
            raise RequestError("the prompt has 9000 tokens; the limit is 2048")
        self.calls.append((prompt, speculate))
        tokens = list(range(params.max_new_tokens))
        if speculate and self.wrong and self.wrong in prompt:
            tokens[7] = -1
        return Completion(
            f"<b>text</b> & more of {prompt[:40]}",
            tokens,
            "length",
            self._stats(prompt, len(tokens), speculate),
        )

    def stream(
        self, prompt: str, params: SamplingParams, *, speculate: bool = True, raw: bool = False
    ) -> Iterator[Chunk]:
        stats = self._stats(prompt, params.max_new_tokens, speculate)
        yield Chunk("first", [0])
        for index in range(5):
            for name in ("draft",) if speculate else ():
                with span(name):
                    time.sleep(0.0003)
            with span("verify"):
                for name, seconds in (
                    ("embed", 0.0002),
                    ("attention", 0.002),
                    ("mlp", 0.004),
                    ("lm_head", 0.001),
                ):
                    with span(name):
                        time.sleep(seconds)
            for name in ("accept", "commit", "host"):
                with span(name):
                    time.sleep(0.0003)
            yield Chunk("x", [index], "length" if index == 4 else None, stats if index == 4 else None)

    def step_costs(self, rows: Sequence[int] = (), *, context: int = 256) -> dict[int, float]:
        return {count: 9000.0 * (1 + 0.02 * (count - 1)) for count in rows}

    def describe(self) -> dict[str, Any]:
        return {
            "model": "fake-135m",
            "dtype": "bfloat16",
            "weights": "bfloat16",
            "draft": self.draft,
            "threads": 2,
        }

    def _stats(self, prompt: str, tokens: int, speculate: bool) -> Stats:
        gain = next((gain for kind, gain in self.gain.items() if kind in prompt), 1.0) if speculate else 1.0
        cycles = max(1, round(tokens / gain))
        jitter = 1 + 0.01 * (len(prompt) % 7)
        stats = Stats(prompt_tokens=100, new_tokens=tokens, prefill_s=0.1, cycles=cycles)
        stats.decode_s = cycles * jitter * (self.cycle_ms if speculate and gain != 1.0 else 10.0) / 1e3
        if speculate and gain != 1.0:
            stats.cycles_by_drafted = {0: cycles // 4, 7: cycles - cycles // 4}
            share = 1 - 1 / gain
            stats.tried = [round(cycles * 0.75 * share**position) for position in range(7)]
            stats.accepted = [round(tried * share) for tried in stats.tried]
        else:
            stats.cycles_by_drafted = {0: cycles}
        return stats
