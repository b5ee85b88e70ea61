"""All-reduce with a payload of 8 bits: a half or a quarter of the bytes, and another sum. Lossy: only if asked for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.collectives.gloo import OrderedGloo
from slipstream.collectives.interface import Backend
from slipstream.collectives.meeting import Meeting
from slipstream.collectives.shm import Shm

BLOCK = 32
"""Values of a row that share a float32 scale: 36 bytes instead of 64 in bfloat16, of 128 in float32."""


def quantise(x: Tensor) -> Tensor:
    """x [..., H] as bytes [..., B * (4 + BLOCK)]: each block's scale, then its values to the nearest of -127..127.

    A block with an infinity or a NaN comes back as NaN; zeros stay zeros.
    """
    blocks = F.pad(x.float(), (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    values = (blocks / torch.where(scale > 0, scale, 1)).round().clamp(-127, 127).nan_to_num(0).to(torch.int8)
    return torch.cat(
        [scale.clone(memory_format=torch.contiguous_format).view(torch.uint8), values.view(torch.uint8)],
        dim=-1,
    ).flatten(-2)


def dequantise(payload: Tensor, width: int) -> Tensor:
    """The float32 values [..., width] of `quantise`."""
    blocks = payload.unflatten(-1, (-1, 4 + BLOCK))
    scale = blocks[..., :4].contiguous().view(torch.float32)
    values: Tensor = blocks[..., 4:].contiguous().view(torch.int8) * scale
    return values.flatten(-2)[..., :width]


class Quantised(Backend):
    """Every rank's x in 8 bits with a scale for each 32 values, gathered, and summed in float32 in rank order.

    An element's error is at most half of its block's scale (1/254 of the block's greatest magnitude) for each rank.
    Blocks lie within rows, so a row's bits depend on that row alone.
    """

    name = "quantised"
    row_invariant = True
    is_lossy = True
    gives_up = "each rank's part is rounded to 8 bits before it is summed"

    @classmethod
    def unavailable(cls, meeting: Meeting) -> str | None:
        return cls._carrier(meeting).unavailable(meeting)

    @staticmethod
    def _carrier(meeting: Meeting) -> type[Backend]:
        return OrderedGloo if Shm.unavailable(meeting) else Shm

    def __init__(self, meeting: Meeting) -> None:
        self.rank, self.size = meeting.rank, meeting.size
        self._inner = self._carrier(meeting)(meeting)

    def all_reduce(self, x: Tensor) -> Tensor:
        payload = quantise(x)
        parts = self._inner.all_gather(payload).unflatten(-1, (self.size, payload.shape[-1]))
        total = dequantise(parts[..., 0, :], x.shape[-1])
        for rank in range(1, self.size):
            total += dequantise(parts[..., rank, :], x.shape[-1])
        return total.to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._inner.all_gather(x)

    def broadcast(self, x: Tensor) -> Tensor:
        return self._inner.broadcast(x)

    def barrier(self) -> None:
        self._inner.barrier()

    def close(self) -> None:
        self._inner.close()
