"""Requests in, tokens out: gives slots to waiting requests and runs cycle after cycle over those that run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from time import perf_counter

import torch

from slipstream.draft.drafter import Drafter
from slipstream.engine.controller import Controller
from slipstream.engine.cycle import Outcome
from slipstream.engine.output import Output
from slipstream.engine.request import Chunk, SamplingParams, Stats
from slipstream.engine.runner import Pending, Runner, bucket_of
from slipstream.spans import span


@dataclass(eq=False)
class Running:
    """A request on its way through the engine."""

    prompt: list[int]
    params: SamplingParams
    output: Output
    drafter: Drafter | None
    """None decodes plainly."""
    size: int | None = None
    """A fixed number of drafted tokens instead of the controller's choice."""
    stats: Stats = field(default_factory=Stats)
    slot: int = -1
    """-1 while it waits, and again when it has ended."""
    last: Outcome = field(default_factory=lambda: Outcome([], [], 0, 0, []))
    """What its last cycle brought, or its prefill."""
    flying: int = 0
    """Cycles on their way; each brings one token at least."""
    flying_most: int = 0
    """The most tokens that they can bring."""
    chunks: deque[Chunk] = field(default_factory=deque)
    """What came of it and was not fetched yet; the one with a finish reason is the last."""


@dataclass(frozen=True)
class _Started:
    """A cycle on its way."""

    group: list[Running]
    size: int
    pending: Pending
    start_s: float


class Scheduler:
    """Runs requests over a fixed number of slots, in order of arrival."""

    def __init__(self, runner: Runner, controller: Controller | None) -> None:
        self.runner, self.controller = runner, controller
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self._started: deque[_Started] = deque()
        self._free = list(range(runner.state.padding_slot))[::-1]
        self._finish_s = 0.0

    @torch.inference_mode()
    def step(self) -> None:
        """Admits what fits, starts a cycle, and takes in those that may be: what came is in the requests' chunks."""
        self._admit()
        with span("host"):
            if group := self._group():
                self._start(group)
            while self._started and (not group or len(self._started) > self.runner.lag):
                self._finish(self._started.popleft())

    def cancel(self, request: Running) -> None:
        """Forgets a request, whether it waits or runs."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self._release(request)

    def _admit(self) -> None:
        while self.waiting and self._free:
            request = self.waiting.popleft()
            request.slot = self._free.pop()
            self.running.append(request)
            start = perf_counter()
            request.last = self.runner.begin(request.drafter, request.slot, request.prompt, request.params)
            request.stats.prompt_tokens = len(request.prompt)
            request.stats.prefill_s = perf_counter() - start

    def _group(self) -> list[Running]:
        """The requests of the next cycle: those that will need it, whatever the cycles on their way bring."""
        needy = [
            each for each in self.running if each.stats.new_tokens + each.flying < each.params.max_new_tokens
        ]
        if not needy:
            return []
        # A cycle has one shape: plain requests and speculative ones take turns when both are present.
        first = needy[0]
        group = [each for each in needy if each.drafter is first.drafter and each.size == first.size]
        self.running = [each for each in self.running if each not in group] + group
        return group

    def _start(self, group: list[Running]) -> None:
        start = perf_counter()
        outlooks = [each.last.outlook for each in group]
        size = self._size(group[0], outlooks)
        longest = max(len(each.prompt) + each.stats.new_tokens + each.flying_most for each in group)
        is_greedy = all(each.params.is_greedy for each in group)
        slots = [each.slot for each in group]
        drafter = group[0].drafter
        pending = self.runner.start(drafter, slots, size, longest + size, is_greedy)
        for each in group:
            each.flying += 1
            each.flying_most += size + 1
        self._started.append(_Started(group, size, pending, start))

    def _finish(self, started: _Started) -> None:
        group, size = started.group, started.size
        outcomes = started.pending.read()
        now = perf_counter()
        elapsed_s, self._finish_s = now - max(started.start_s, self._finish_s), now
        if self.controller is not None and group[0].drafter is not None:
            slots = [each.slot for each in group]
            self.controller.observe_cycle(slots, bucket_of(len(group)), size, elapsed_s * 1e6)
        for request, outcome in zip(group, outcomes, strict=True):
            request.flying -= 1
            request.flying_most -= size + 1
            if request.slot < 0:  # it ended, or was cancelled, while this cycle ran
                continue
            before, request.last = request.last, outcome
            self._learn(request, size, outcome, before)
            has_draft = size > 0 and before.outlook > 0
            request.chunks.append(self._push(request, outcome, size if has_draft else 0))
            request.stats.decode_s += elapsed_s

    def _size(self, request: Running, outlooks: list[int]) -> int:
        if request.drafter is None:
            return 0
        if request.size is not None:
            return request.size if any(outlooks) else 0
        assert self.controller is not None
        return self.controller.choose(outlooks, bucket_of(len(outlooks)))

    def _learn(self, request: Running, size: int, outcome: Outcome, before: Outcome) -> None:
        """From a cycle with a tree of `size`, and what the drafter had said before it."""
        if self.controller is None or request.drafter is None:
            return
        if size:
            self.controller.observe_verified(request.slot, before.outlook, size, outcome.nodes)
            return
        if before.ahead and self.controller.wants_shadow(request.slot, before.outlook):
            self.controller.shadow(request.slot, before.outlook, before.ahead)
        self.controller.observe_text(request.slot, outcome.tokens)

    def _push(self, request: Running, outcome: Outcome, drafted: int) -> Chunk:
        """Hands a request its tokens, keeps its stats, and frees its slot when it is done.

        drafted: the tokens of its tree.
        """
        stats, output, accepted = request.stats, request.output, len(outcome.nodes)
        levels = outcome.levels if drafted else 0
        text, taken = output.push(outcome.tokens)
        stats.new_tokens += len(taken)
        stats.cycles += 1
        stats.cycles_by_drafted[drafted] = stats.cycles_by_drafted.get(drafted, 0) + 1
        stats.tried.extend([0] * (levels - len(stats.tried)))
        stats.accepted.extend([0] * (levels - len(stats.accepted)))
        for position in range(min(accepted + 1, levels)):
            stats.tried[position] += 1
            stats.accepted[position] += position < accepted
        if output.finish_reason is None:
            return Chunk(text, taken)
        self._release(request)
        return Chunk(text, taken, output.finish_reason, stats)

    def _release(self, request: Running) -> None:
        self.running.remove(request)
        self._free.append(request.slot)
        if self.controller is not None:
            self.controller.forget(request.slot)
        request.slot = -1
