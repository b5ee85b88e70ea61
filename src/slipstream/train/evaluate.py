"""Acceptance over samples (stand-in until the evaluation room is merged)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from slipstream.target.family import Target
from slipstream.train.eagle3_model import Eagle3Module
from slipstream.train.losses import States, features_of, goals_of, outcome_of
from slipstream.train.packing import batch_of, pack_epoch
from slipstream.train.samples import Samples


@dataclass(frozen=True)
class Acceptance:
    conditional: list[float]
    tokens_a_cycle: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def teacher_forced(
    module: Eagle3Module,
    target: Target,
    samples: Samples,
    states: States,
    *,
    steps: int,
    row_length: int,
    rows: int,
    precision: str,
) -> Acceptance:
    device, is_low = target.device, precision == "bfloat16"
    every = pack_epoch(samples.lengths.tolist(), row_length, 0, 0)
    right, counted = torch.zeros(steps), torch.zeros(steps)
    for begin in range(0, len(every), rows):
        batch = batch_of(samples, every[begin : begin + rows], row_length, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=is_low):
            features, hidden = features_of(batch, states)
            goals = goals_of(target, hidden, module.ids, torch.bfloat16 if is_low else torch.float32)
            found = outcome_of(module, batch, features, goals, steps)
        right, counted = right + found.right.cpu(), counted + found.counted.cpu()
    conditional = (right / counted.clamp_min(1)).tolist()
    total, reach = 1.0, 1.0
    for rate in conditional[:4]:
        reach *= rate
        total += reach
    return Acceptance(conditional, total)
