"""How the kernels follow each other: each may start while the one before it still ends (programmatic dependent launch).

A kernel launched so begins when every block of the one before has called `gdc_launch_dependents` or ended, does what
does not depend on it, and waits in `gdc_wait` until all that it wrote can be seen.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor

PDL_CAPABILITY = 9
"""Compute capability from which on the hardware can."""


@functools.cache
def _overlaps(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] >= PDL_CAPABILITY


def overlap(x: Tensor) -> dict[str, Any]:
    """The keyword arguments of a launch: `PDL`, a constexpr of every kernel here, and the launch attribute."""
    if x.is_cuda and _overlaps(x.device.index or 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def power_of_two(count: int) -> int:
    """The next one, which is what a block's width must be."""
    return int(triton.next_power_of_2(count))
