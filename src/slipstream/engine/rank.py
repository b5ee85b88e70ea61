"""What every rank of an engine is made of: its part of the model, and the state of the requests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.collectives.interface import Collectives
from slipstream.draft.arbitrary import ArbitraryDrafter
from slipstream.draft.drafter import Drafter
from slipstream.engine.controller import SIZES
from slipstream.engine.graph import runner_for
from slipstream.engine.state import State
from slipstream.target.load import LoadedModel, load

MAX_ROWS = max(SIZES) + 1
_MAX_LENGTH = 2048
"""The longest text unless another limit is asked for: KV is allocated for it."""


@dataclass(frozen=True)
class Settings:
    """What all ranks are made with, as `Engine` takes it."""

    model: str
    dtype: str
    weights: str
    max_length: int | None
    max_batch: int
    device: str
    """cpu or cuda; of several GPUs each rank takes the one of its number on its machine."""
    tp: int
    all_reduce: str
    graph: bool = True
    """Cycles are captured where the device can."""


class Rank:
    """One rank's part."""

    def __init__(self, settings: Settings, collectives: Collectives, device: str) -> None:
        """Loads the model's shard and allocates the state. Raises ModelError."""
        self.model: LoadedModel = load(
            settings.model,
            dtype=settings.dtype,
            weights=settings.weights,
            device=device,
            positions=(settings.max_length or _MAX_LENGTH) + 2 * MAX_ROWS,
            longest=settings.max_length,
            collectives=collectives,
        )
        self.max_length = settings.max_length or min(_MAX_LENGTH, self.model.shape.max_positions)
        target = self.model.target
        self.state = State.allocate(
            target.kv_layout(),
            settings.max_batch,
            self.max_length,
            MAX_ROWS,
            self.model.dtype,
            torch.device(device),
        )
        self.runner = runner_for(target, self.state, settings.graph)
        self.arbitrary = ArbitraryDrafter(self.model.shape.vocab_size, MAX_ROWS - 1)
        self.drafter: Drafter | None = None

    def use(self, drafter: Drafter | None) -> None:
        """Drafts with this one from now on."""
        if drafter is not None:
            drafter.attach(self.model.target, self.state.padding_slot + 1, self.state.table.shape[1])
        self.runner.forget()
        self.drafter = drafter
