"""How long an all-reduce takes by its size: straight pieces, at least one a protocol, with steps between protocols."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field

from slipstream.machine import units


@dataclass(frozen=True)
class Segment:
    """latency_us + bytes / bytes_per_s from `from_bytes` up to the next segment; without a bandwidth it is flat.

    The latency is where the line would meet zero bytes: where measured points are joined it can be negative.

    The bandwidth is the message's size over the time beyond the latency ("algorithm bandwidth", not bus bandwidth).
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    protocol: str
    from_bytes: units.Bytes
    latency_us: units.Us
    bytes_per_s: units.BytesPerS | None = None

    def us(self, size: float) -> float:
        """Microseconds of a message of so many bytes."""
        return self.latency_us + (size / self.bytes_per_s * 1e6 if self.bytes_per_s else 0.0)


@dataclass(frozen=True)
class AllReduceCurve:
    """One backend's all-reduce among so many ranks, eager or captured in a CUDA graph, in one setting.

    `setting` names the box and configuration that was measured, where there are several; `source` is a key of the
    machine's sources. Times are what the median call takes; outside `from`..`to_bytes` the end pieces are drawn on.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    backend: str
    ranks: Annotated[int, Field(ge=2)]
    captured: bool
    source: str
    to_bytes: units.Bytes
    segments: Annotated[tuple[Segment, ...], Field(min_length=1)]
    setting: str = "default"

    def __post_init__(self) -> None:
        starts = [segment.from_bytes for segment in self.segments]
        if starts != sorted(set(starts)) or starts[-1] > self.to_bytes:
            raise ValueError("segments begin at rising sizes below to_bytes")
        for segment in self.segments:
            if segment.us(segment.from_bytes) <= 0:
                raise ValueError(f"the segment from {segment.from_bytes} bytes takes no time at its start")

    @property
    def from_bytes(self) -> int:
        """The smallest size that was measured."""
        return self.segments[0].from_bytes

    def covers(self, size: int) -> bool:
        """Whether a size is within what was measured."""
        return self.from_bytes <= size <= self.to_bytes

    def us(self, size: int) -> float:
        """Microseconds of a message of `size` bytes; below the first size measured it costs as much as that one."""
        size = max(size, self.from_bytes)
        after = bisect.bisect_right(self.segments, size, key=lambda segment: segment.from_bytes)
        return self.segments[after - 1].us(size)


def through(points: Sequence[tuple[int, float]], protocol: str = "measured") -> tuple[Segment, ...]:
    """Segments that join the measured (bytes, us), ascending in bytes.

    Where a larger message took less time, the piece before it is flat and the curve steps down there.
    """
    segments = []
    for (size, us), (next_size, next_us) in itertools.pairwise(points):
        rise = next_us - us
        rate = (next_size - size) / rise * 1e6 if rise > 0 else None
        segments.append(Segment(protocol, size, us - (size / rate * 1e6 if rate else 0.0), rate))
    last, us = points[-1]
    # Beyond the last point the time grows with the size; a step there keeps the point itself exact.
    return (*segments, Segment(protocol, last, 0.0, last / us * 1e6))
