"""Requests in, tokens out: gives slots to waiting requests and runs cycle after cycle over those that run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from slipstream.draft.drafter import OUTLOOKS, Drafter
from slipstream.engine.controller import Controller
from slipstream.engine.cycle import cycle, prefill
from slipstream.engine.followers import Followers
from slipstream.engine.output import Output
from slipstream.engine.request import Chunk, SamplingParams, Stats
from slipstream.engine.state import State
from slipstream.spans import span
from slipstream.target.family import Target

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Batch buckets: a batch is padded to the next of them."""
PREFILL_CHUNK = 256


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
    chunks: deque[Chunk] = field(default_factory=deque)
    """What came of it and was not fetched yet; the one with a finish reason is the last."""


class Scheduler:
    """Runs requests over a fixed number of slots, in order of arrival."""

    def __init__(
        self,
        target: Target,
        state: State,
        controller: Controller | None,
        followers: Followers | None = None,
    ) -> None:
        """followers: the other ranks, which are told of all that changes the state."""
        self.target, self.state, self.controller = target, state, controller
        self.followers = followers or Followers()
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self._free = list(range(state.padding_slot))[::-1]
        self._slots: dict[tuple[int, ...], Tensor] = {}

    @torch.inference_mode()
    def step(self) -> None:
        """Admits what fits and runs one cycle; what came of it is in the requests' chunks."""
        self._admit()
        if not self.running:
            return
        # A cycle has one shape: plain requests and speculative ones take turns when both are present.
        with span("host"):
            first = self.running[0]
            group = [
                each for each in self.running if each.drafter is first.drafter and each.size == first.size
            ]
            self.running = [each for each in self.running if each not in group] + group
            self._cycle(group)

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
            params = request.params
            self.followers.begin(request.slot, request.prompt, params, request.drafter)
            self.state.put(
                request.slot,
                request.prompt,
                0.0 if params.is_greedy else params.temperature,
                params.top_k,
                params.top_p,
                params.seed,
            )
            prefill(self.target, request.drafter, self.state, request.slot, PREFILL_CHUNK)
            request.stats.prompt_tokens = len(request.prompt)
            request.stats.prefill_s = perf_counter() - start

    def _cycle(self, group: list[Running]) -> None:
        start = perf_counter()
        drafter = group[0].drafter
        slots = self._batch([each.slot for each in group])
        outlooks = self._outlooks(drafter, slots, len(group))
        size = self._size(group[0], outlooks)
        longest = max(len(each.prompt) + each.stats.new_tokens for each in group)
        is_greedy = all(each.params.is_greedy for each in group)
        shadows = self._shadow_drafts(drafter, slots, group, outlooks) if size == 0 else {}
        self.followers.cycle(
            [each.slot for each in group], len(slots), drafter, size, longest + size, is_greedy
        )
        path = cycle(self.target, drafter, self.state, slots, size, longest + size, is_greedy)
        accepted, tokens, rows = path.accepted.tolist(), path.tokens.tolist(), path.rows.tolist()
        levels = path.tokens.shape[1] - 1
        if self.controller is not None and drafter is not None:
            self.controller.costs.observe(len(slots), size, (perf_counter() - start) * 1e6)
        for index, request in enumerate(group):
            committed = tokens[index][: accepted[index] + 1]
            nodes = [row - 1 for row in rows[index][1 : accepted[index] + 1]]
            self._learn(request, outlooks[index], size, nodes, committed, shadows.get(request.slot))
            drafted, tried = (size, levels) if outlooks[index] else (0, 0)
            request.chunks.append(self._push(request, committed, drafted, tried, accepted[index]))
        elapsed_s = perf_counter() - start
        for request in group:
            request.stats.decode_s += elapsed_s

    def _batch(self, slots: list[int]) -> Tensor:
        """The slots as a tensor, padded to a bucket."""
        bucket = next((size for size in BATCHES if size >= len(slots)), len(slots))
        key = (*slots, *[self.state.padding_slot] * (bucket - len(slots)))
        known = self._slots.get(key)
        if known is None:
            self._slots.clear()
            known = self._slots[key] = torch.tensor(key, device=self.state.table.device)
        if len(key) > len(slots):  # it would grow with every cycle otherwise
            self.state.text.length[self.state.padding_slot] = 1
        return known

    def _outlooks(self, drafter: Drafter | None, slots: Tensor, count: int) -> list[int]:
        if drafter is None:
            return [0] * count
        with span("draft"):
            outlooks: list[int] = drafter.outlook(self.state.text, slots).clamp(0, OUTLOOKS - 1).tolist()
        return outlooks[:count]

    def _size(self, request: Running, outlooks: list[int]) -> int:
        if request.drafter is None:
            return 0
        if request.size is not None:
            return request.size if any(outlooks) else 0
        assert self.controller is not None
        return self.controller.choose(outlooks)

    def _shadow_drafts(
        self, drafter: Drafter | None, slots: Tensor, group: list[Running], outlooks: list[int]
    ) -> dict[int, list[int]]:
        """By slot, what would have been drafted, where the controller wants to know how it would have fared."""
        if drafter is None or self.controller is None:
            return {}
        wanted = [
            index
            for index, request in enumerate(group)
            if self.controller.wants_shadow(request.slot, outlooks[index])
        ]
        if not wanted:
            return {}
        drafted = drafter.draft(self.state.text, slots, drafter.max_drafted).tokens.tolist()
        return {group[index].slot: drafted[index] for index in wanted}

    def _learn(
        self,
        request: Running,
        outlook: int,
        size: int,
        nodes: Sequence[int],
        committed: Sequence[int],
        shadow: list[int] | None,
    ) -> None:
        if self.controller is None or request.drafter is None:
            return
        if size:
            self.controller.observe_verified(request.slot, outlook, size, nodes)
            return
        if shadow is not None:
            self.controller.shadow(request.slot, outlook, shadow)
        self.controller.observe_text(request.slot, committed)

    def _push(
        self, request: Running, committed: Sequence[int], drafted: int, levels: int, accepted: int
    ) -> Chunk:
        """Hands a request its tokens, keeps its stats, and frees its slot when it is done.

        drafted: the tokens of its tree. levels: the longest path that the tree allowed.
        """
        stats, output = request.stats, request.output
        text, taken = output.push(committed)
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
