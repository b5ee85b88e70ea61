"""Runs cycles for the scheduler and hands over what they brought, at once or one cycle later."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.draft.drafter import Drafter
from slipstream.engine.cycle import Outcome, cycle, prefill
from slipstream.engine.request import SamplingParams
from slipstream.engine.state import State
from slipstream.target.family import Target

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Batch buckets: a batch is padded to the next of them."""
PREFILL_CHUNK = 256
"""The most rows of one forward of a prompt."""


def bucket_of(count: int) -> int:
    """The batch bucket that holds so many requests."""
    return next((size for size in BATCHES if size >= count), count)


class Pending(ABC):
    """A cycle that was started."""

    @abstractmethod
    def read(self) -> list[Outcome]:
        """Waits for it; one outcome for each request, in the order of the slots."""


class Runner(ABC):
    """Starts cycles over slots of one state."""

    lag: int = 0
    """Cycles that may be started before the one that is read: 1 where waiting for the device would leave it idle."""

    def __init__(self, target: Target, state: State) -> None:
        self.target, self.state = target, state

    def begin(
        self, drafter: Drafter | None, slot: int, prompt: Sequence[int], params: SamplingParams
    ) -> Outcome:
        """Puts a request into a slot and runs its prompt, see `prefill`."""
        temperature = 0.0 if params.is_greedy else params.temperature
        self.state.put(slot, list(prompt), temperature, params.top_k, params.top_p, params.seed)
        return prefill(self.target, drafter, self.state, slot, len(prompt), PREFILL_CHUNK)

    def rewind(self, slot: int, length: int) -> None:
        """Cuts a slot's text, or restores what was cut."""
        self.state.text.length[slot] = length

    @abstractmethod
    def start(
        self, drafter: Drafter | None, slots: Sequence[int], size: int, extent: int, is_greedy: bool
    ) -> Pending:
        """Starts one cycle, see `cycle`."""

    def forget(self) -> None:
        """Another drafter is used from now on: what was kept for the old one is let go."""


class Eager(Runner):
    """Runs every cycle operation by operation."""

    def __init__(self, target: Target, state: State, lag: int = 0) -> None:
        super().__init__(target, state)
        self.lag = lag
        self._known: tuple[tuple[int, ...], Tensor] | None = None

    def start(
        self, drafter: Drafter | None, slots: Sequence[int], size: int, extent: int, is_greedy: bool
    ) -> Pending:
        if drafter is not None:
            drafter.before(self.state.text, slots, size, size + 1)
        padding = bucket_of(len(slots)) - len(slots)
        key = (*slots, *[self.state.padding_slot] * padding)
        if self._known is None or self._known[0] != key:
            self._known = key, torch.tensor(key, device=self.state.table.device)
        if padding:  # it would grow with every cycle otherwise
            self.state.text.length[self.state.padding_slot :].fill_(1)
        brought, levels = cycle(self.target, drafter, self.state, self._known[1], size, extent, is_greedy)
        return _Done(brought, levels, len(slots))


class _Done(Pending):
    def __init__(self, brought: Tensor, levels: int, count: int) -> None:
        self._brought, self._levels, self._count = brought, levels, count

    def read(self) -> list[Outcome]:
        rows = self._brought[: self._count].tolist()
        return [Outcome.read(row, self._levels) for row in rows]
