"""What the host may do with a device."""

from __future__ import annotations

import torch


def reads_freely(device: torch.device) -> bool:
    """Whether looking at a tensor's values waits for no other work: the host itself computes them."""
    return device.type == "cpu"
