"""The micro-benchmark of the all-reduce: what each backend takes by message size, on these ranks, here and now.

A measured time of one rank holds two things: the wire, and waiting for the rank that came last. All ranks note when
they entered and left (one machine has one monotonic clock); of each round, the *wire* is the least time of any rank,
which is that of the last to enter, and the *skew* is the span between the first and the last to enter.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.collectives.choice import BACKENDS, connect, why_not
from slipstream.collectives.group import launch
from slipstream.collectives.interface import Collectives
from slipstream.collectives.meeting import Meeting
from slipstream.errors import SlipstreamError

SIZES = (2 << 10, 4 << 10, 9 << 10, 18 << 10, 36 << 10, 72 << 10, 256 << 10, 1 << 20)
"""Message bytes: 1 to 32 rows of SmolLM2 in float32 among them."""

_SLOWEST_S = 1.0
"""That one size of one backend may take, beyond its first rounds."""

_LEAST_ROUNDS = 20


@dataclass(frozen=True)
class Timing:
    """One backend at one message size. Times in microseconds over all rounds, of the slowest rank unless said."""

    backend: str
    message_bytes: int
    rows: int
    rounds: int
    median_us: float
    p90_us: float
    p99_us: float
    wire_us: float
    """Median over rounds of the least time of any rank."""
    skew_us: float
    """Median over rounds of the span between the first rank's and the last rank's entry."""
    algorithm_gb_s: float
    """Message bytes over the median."""
    bus_gb_s: float
    """That times 2 (n - 1) / n: what a bandwidth-optimal all-reduce moves through each rank's link."""
    error: float
    """Greatest |sum - float64's sum| over the sum of the parts' magnitudes."""
    same_on_all_ranks: bool


@dataclass(frozen=True)
class Result:
    """Everything that was measured."""

    tp: int
    dtype: str
    device: str
    timings: Sequence[Timing]
    unavailable: Mapping[str, str]
    gives_up: Mapping[str, str]
    """What the backends that are not exact cost in exactness."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def offers(self) -> list[str]:
        """A line for each backend that was faster somewhere than all exact ones, with what it gives up."""
        lines = []
        for name, why in self.gives_up.items():
            ratios = {
                t.message_bytes: self._best_exact(t) / t.median_us for t in self.timings if t.backend == name
            }
            if faster := [size for size, ratio in ratios.items() if ratio > 1]:
                sizes = ", ".join(f"{size:,}" for size in faster)
                lines.append(
                    f"{name} is up to {max(ratios.values()):.1f} x as fast (at {sizes} bytes), but {why}"
                )
        return lines

    def _best_exact(self, other: Timing) -> float:
        exact = [
            t.median_us
            for t in self.timings
            if t.message_bytes == other.message_bytes and t.backend not in self.gives_up
        ]
        return min(exact, default=0.0)


@dataclass(frozen=True)
class _Samples:
    """What one rank saw of one backend at one size."""

    entered_ns: Sequence[int]
    left_ns: Sequence[int]
    error: float
    checksum: int


def parts_of(rank: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """What a rank brings to the check of the sums: normal deviates, from the rank's own seed."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rank)).to(dtype)


def check(wire: Collectives, rows: int, width: int, dtype: torch.dtype) -> tuple[float, int]:
    """(greatest error against float64 relative to the sum of magnitudes, a checksum of the bits)."""
    parts = torch.stack([parts_of(rank, rows, width, dtype).double() for rank in range(wire.size)])
    got = wire.all_reduce(parts_of(wire.rank, rows, width, dtype))
    error = ((got.double() - parts.sum(0)).abs() / parts.abs().sum(0).clamp_min(1e-30)).max().item()
    bits = got.contiguous().view(torch.int32 if dtype == torch.float32 else torch.int16).long()
    weights = torch.arange(1, bits.numel() + 1) % 65521
    return error, int((bits.flatten() * weights).sum())


def time_rounds(wire: Collectives, work: Callable[[], object], rounds: int) -> tuple[list[int], list[int]]:
    """When this rank entered and left each round, in nanoseconds of the machine's monotonic clock."""
    entered, left = [], []
    for _ in range(rounds):
        wire.barrier()
        entered.append(time.perf_counter_ns())
        work()
        left.append(time.perf_counter_ns())
    return entered, left


def _measure(
    wire: Collectives, meeting: Meeting, rows: int, width: int, dtype: torch.dtype, rounds: int
) -> _Samples:
    error, checksum = check(wire, rows, width, dtype)
    x = torch.zeros(rows, width, dtype=dtype)
    entered, left = time_rounds(wire, lambda: wire.all_reduce(x), _LEAST_ROUNDS)  # also the warm-up
    each_s = statistics.median(b - a for a, b in zip(entered, left, strict=True)) / 1e9
    wanted = max(_LEAST_ROUNDS, min(rounds, int(_SLOWEST_S / max(each_s, 1e-7))))
    entered, left = time_rounds(wire, lambda: wire.all_reduce(x), meeting.exchange("rounds", wanted)[0])
    return _Samples(entered, left, error, checksum)


def _rank(
    rank: int,
    size: int,
    at: str,
    names: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    dtype: str,
    rounds: int,
) -> tuple[dict[str, str], dict[str, list[_Samples]]]:
    meeting = Meeting.join(rank, size, at)
    reasons, found = why_not(meeting), {}
    with torch.inference_mode():
        for name in names:
            if name in reasons:
                continue
            wire = connect(meeting, name)
            found[name] = [_measure(wire, meeting, *shape, getattr(torch, dtype), rounds) for shape in shapes]
            wire.close()
    return reasons, found


def measure_all_reduce(
    tp: int,
    backends: Sequence[str] = (),
    shapes: Sequence[tuple[int, int]] = (),
    dtype: str = "float32",
    rounds: int = 1000,
) -> Result:
    """Starts tp ranks on this machine and times each backend at each shape (rows, width) of `dtype`.

    Without `backends` all that can run; one that was named and cannot raises SlipstreamError. Takes up to a second for
    each backend and size.
    """
    for name in backends:
        if name not in BACKENDS:
            raise SlipstreamError(f"there is no backend {name!r}; there are {', '.join(BACKENDS)}")
    names = list(backends) or list(BACKENDS)
    with launch(_rank, tp, (names, shapes, dtype, rounds)) as ranks:
        answers = ranks.results()
    reasons = answers[0][0]
    for name in backends:
        if name in reasons:
            raise SlipstreamError(f"the backend {name} cannot run here: {reasons[name]}")
    timings = [
        _timing(name, shape, dtype, [found[name][index] for _, found in answers])
        for name in answers[0][1]
        for index, shape in enumerate(shapes)
    ]
    inexact = {
        name: BACKENDS[name].gives_up
        for name in answers[0][1]
        if BACKENDS[name].is_lossy or (BACKENDS[name].gives_up and tp > 2)
    }
    return Result(tp, dtype, "cpu", timings, reasons, inexact)


def _timing(name: str, shape: tuple[int, int], dtype: str, ranks: Sequence[_Samples]) -> Timing:
    rows, width = shape
    message_bytes = rows * width * getattr(torch, dtype).itemsize
    by_round = list(zip(*([*zip(each.entered_ns, each.left_ns, strict=True)] for each in ranks), strict=True))
    us = sorted(max(left - entered for entered, left in each) / 1e3 for each in by_round)
    wire_us = statistics.median(min(left - entered for entered, left in each) / 1e3 for each in by_round)
    entries = [[entered for entered, _ in each] for each in by_round]
    skew_us = statistics.median((max(each) - min(each)) / 1e3 for each in entries)
    median_us = statistics.median(us)
    gb_s = message_bytes / median_us / 1e3
    return Timing(
        name,
        message_bytes,
        rows,
        len(us),
        median_us,
        quantile(us, 0.9),
        quantile(us, 0.99),
        wire_us,
        skew_us,
        gb_s,
        gb_s * 2 * (len(ranks) - 1) / len(ranks),
        max(each.error for each in ranks),
        len({each.checksum for each in ranks}) == 1,
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The least of the ordered values that `share` of them do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


def shapes_of(sizes: Sequence[int], rows: Sequence[int], width: int, dtype: str) -> list[tuple[int, int]]:
    """(rows, width) for message sizes in bytes, or for row counts of one width; sizes without either."""
    item = getattr(torch, dtype).itemsize
    if rows:
        return [(count, width) for count in rows]
    return [(1, max(1, size // item)) for size in sizes or SIZES]


def fused_us(wire: Collectives, rows: int, width: int, rounds: int, is_fused: bool) -> list[float]:
    """Times of this rank: all-reduce, residual add and RMSNorm in float32; fused, or the last two by torch."""
    x, residual, weight = torch.zeros(rows, width), torch.zeros(rows, width), torch.ones(width)

    def one_by_one() -> Tensor:
        residual.add_(wire.all_reduce(x))
        return functional.rms_norm(residual, (width,), weight, 1e-5)

    def fused() -> Tensor:
        return wire.all_reduce_add_rms_norm_(x, residual, weight, 1e-5)

    entered, left = time_rounds(wire, fused if is_fused else one_by_one, rounds)
    return [(b - a) / 1e3 for a, b in zip(entered, left, strict=True)]


def plot(result: Result, path: Path) -> None:
    """Median and 99th percentile by message size, both axes logarithmic; the file's ending decides the format."""
    from matplotlib.figure import Figure

    if path.suffix not in (".svg", ".png", ".pdf"):
        raise SlipstreamError(f"{path}: a plot is a .svg, .png or .pdf file")
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for name in dict.fromkeys(each.backend for each in result.timings):
        points = [each for each in result.timings if each.backend == name]
        sizes = [each.message_bytes for each in points]
        line = axes.plot(sizes, [each.median_us for each in points], marker="o", label=name)[0]
        high = [each.p99_us for each in points]
        axes.fill_between(
            sizes, [each.median_us for each in points], high, color=line.get_color(), alpha=0.15
        )
    axes.set(xscale="log", yscale="log", xlabel="bytes of the message", ylabel="microseconds")
    axes.set_title(f"All-reduce, {result.tp} ranks, {result.dtype}: median, up to the 99th percentile")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise SlipstreamError(f"{path} cannot be written: {error.strerror}") from error
