"""Fits all-reduce curves to published measurements: `python -m slipstream.machine.fit FOLDER` prints them as TOML.

What it reads: NCCL tables of aiconfigurator (`nccl_*.parquet`; message_size counts elements, latency is milliseconds;
needs pyarrow) and samples of b12x (`pcie_*_eager.csv`; bytes and microseconds). The curves of the described machines
were made by it. Errors of the fit go to the standard error.
"""

from __future__ import annotations

import csv
import itertools
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from slipstream.errors import MachineError, SlipstreamError
from slipstream.machine.curve import AllReduceCurve, Segment

Points = list[tuple[int, float]]
"""(bytes, microseconds), ascending in bytes."""

_ELEMENT_BYTES = {"half": 2, "int8": 1}
_GOOD_ENOUGH = 0.10
"""More pieces are not worth it once no point is off by more than this share."""
_POINTS = 3
"""A piece has two unknowns: with fewer points it would only repeat them."""
_RANGE = (4 * 1024, 4 * 1024 * 1024)
"""The sizes whose errors are reported: a row of a small model to hundreds of rows of a large one."""


def read_parquet(path: Path) -> dict[tuple[int, str], Points]:
    """The all-reduce rows of an aiconfigurator table by (ranks, dtype). Raises MachineError."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise MachineError(f"reading {path.name} needs pyarrow: pip install pyarrow") from None
    found: dict[tuple[int, str], Points] = defaultdict(list)
    for row in parquet.read_table(path).to_pylist():
        if row["op_name"] == "all_reduce":
            size = row["message_size"] * _ELEMENT_BYTES[row["nccl_dtype"]]
            found[row["num_gpus"], row["nccl_dtype"]].append((size, row["latency"] * 1e3))
    return {key: sorted(points) for key, points in found.items()}


def read_samples(path: Path) -> dict[str, Points]:
    """The median of the samples by implementation, from a .csv of bytes, implementation, sample_us."""
    samples: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            samples[row["implementation"]][int(row["bytes"])].append(float(row["sample_us"]))
    return {
        name: [(size, statistics.median(us)) for size, us in sorted(sizes.items())]
        for name, sizes in samples.items()
    }


def fit(points: Sequence[tuple[int, float]]) -> tuple[Segment, ...]:
    """The fewest pieces of at least three points each that come within 10 % of every point, or near the best there are.

    A piece is latency + bytes / bandwidth, both not negative, least squares of the relative error. Pieces need not
    meet: where another protocol takes over, the measured time steps, even down.
    """
    if len(points) < _POINTS:
        raise MachineError(f"a curve needs at least {_POINTS} sizes, here are {len(points)}")
    splits = [_split(points, count) for count in range(1, len(points) // _POINTS + 1)]
    allowed = max(_GOOD_ENOUGH, 1.2 * min(worst for _, worst in splits))
    pieces = next(pieces for pieces, worst in splits if worst <= allowed)
    return _named([_line(piece)[0] for piece in pieces])


def errors(curve: AllReduceCurve | Sequence[Segment], points: Iterable[tuple[int, float]]) -> list[float]:
    """|predicted / measured - 1| of the points between 4 KiB and 4 MiB."""
    if not isinstance(curve, AllReduceCurve):
        curve = AllReduceCurve("fit", 2, False, "fit", 2**40, tuple(curve))
    return [abs(curve.us(size) / us - 1) for size, us in points if _RANGE[0] <= size <= _RANGE[1]]


def _split(points: Sequence[tuple[int, float]], count: int) -> tuple[list[list[tuple[int, float]]], float]:
    """The points in `count` runs of at least three with the least worst relative error (dynamic programming)."""
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for _ in range(count):
        longer: dict[int, tuple[float, list[int]]] = {}
        for end in range(_POINTS, len(points) + 1):
            tried = [
                (max(worst, _line(points[start:end])[1]), [*cuts, end])
                for start, (worst, cuts) in best.items()
                if start <= end - _POINTS
            ]
            if tried:
                longer[end] = min(tried)
        best = longer
    worst, cuts = best[len(points)]
    return [list(points[a:b]) for a, b in itertools.pairwise(cuts)], worst


def _line(points: Sequence[tuple[int, float]]) -> tuple[Segment, float]:
    """The best latency and bandwidth of a run of points, rounded as they are written, and the worst relative error."""
    size, us = np.array(points, dtype=np.float64).T
    both = np.stack([1 / us, size / us], axis=1)
    latency, per_byte = np.linalg.lstsq(both, np.ones(len(us)), rcond=None)[0]
    if latency < 0:
        latency, per_byte = 0.0, np.dot(size / us, np.ones(len(us))) / np.dot(size / us, size / us)
    elif per_byte < 0:
        latency, per_byte = np.dot(1 / us, np.ones(len(us))) / np.dot(1 / us, 1 / us), 0.0
    rate = float(f"{1e6 / per_byte:.4g}") if per_byte > 0 else None
    segment = Segment("LL", int(size[0]), round(float(latency), 2), rate)
    return segment, max(abs(segment.us(int(s)) / t - 1) for s, t in zip(size, us, strict=True))


def _named(segments: list[Segment]) -> tuple[Segment, ...]:
    """NCCL's protocols, inferred: the tables do not say them.

    LL moves a flag with every 4 bytes, so where the bandwidth of a later piece is clearly higher, Simple has taken
    over (LL128 is off without NVLink). Where it never is, the protocols cannot be told apart.
    """
    named: list[Segment] = []
    for segment in segments:
        before = named[-1] if named else None
        rises = before and before.bytes_per_s and (segment.bytes_per_s or 0) > 1.3 * before.bytes_per_s
        later = before is not None and (before.protocol == "Simple" or bool(rises))
        named.append(replace(segment, protocol="Simple" if later else "LL"))
    told = {segment.protocol for segment in named}
    return tuple(named) if len(told) > 1 else tuple(replace(each, protocol="unknown") for each in named)


@dataclass(frozen=True)
class _Fitted:
    name: str
    curve: AllReduceCurve
    own: Points
    other: Points


def fitted(folder: Path) -> list[_Fitted]:
    """Every curve that the folder's tables give, with the points it was fitted to and an independent run's, if any."""
    found = []
    for path in sorted(folder.glob("nccl_*.parquet")):
        tables = read_parquet(path)
        for ranks in sorted({ranks for ranks, _ in tables}):
            points = tables[ranks, "half"]
            curve = AllReduceCurve(
                "nccl", ranks, False, "aiconfigurator", points[-1][0], fit(points), "aiconfigurator"
            )
            found.append(_Fitted(path.stem, curve, points, tables.get((ranks, "int8"), [])))
    for path in sorted(folder.glob("pcie_*_8gpu_eager.csv")):
        for name, points in read_samples(path).items():
            backend = {"dma": "copy-engine"}.get(name, name)
            curve = AllReduceCurve(backend, 8, False, "b12x", points[-1][0], fit(points), "b12x")
            found.append(_Fitted(path.stem, curve, points, []))
    if not found:
        raise MachineError(f"{folder} holds no nccl_*.parquet and no pcie_*_8gpu_eager.csv")
    return found


def to_toml(curve: AllReduceCurve) -> str:
    """The curve as a described machine has it."""
    head = (
        f'[[ceilings.all_reduce]]\nbackend = "{curve.backend}"\nranks = {curve.ranks}\n'
        f'captured = {str(curve.captured).lower()}\nsetting = "{curve.setting}"\nsource = "{curve.source}"\n'
        f"to_bytes = {curve.to_bytes}\nsegments = [\n"
    )
    for segment in curve.segments:
        rate = f', bytes_per_s = "{segment.bytes_per_s / 1e9:.4g} GB/s"' if segment.bytes_per_s else ""
        head += (
            f'  {{ protocol = "{segment.protocol}", from_bytes = {segment.from_bytes}, '
            f"latency_us = {segment.latency_us}{rate} }},\n"
        )
    return head + "]\n"


def main(arguments: Sequence[str]) -> None:
    """Prints the curves of a folder of measurements. Raises MachineError."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        raise MachineError(
            "usage: python -m slipstream.machine.fit FOLDER (with nccl_*.parquet or pcie_*_eager.csv)"
        )
    every: list[float] = []
    for one in fitted(Path(arguments[0])):
        print(f"# {one.name}\n{to_toml(one.curve)}")
        own = errors(one.curve, one.own)
        every += own
        line = f"{one.name}, {one.curve.backend} x{one.curve.ranks}: {_spread(own)}"
        if one.other:
            other = errors(one.curve, one.other)
            line += f"; against the int8 run: {_spread(other)}"
        print(line, file=sys.stderr)
    print(f"all, 4 KiB to 4 MiB: {_spread(every)}", file=sys.stderr)


def _spread(shares: Sequence[float]) -> str:
    return f"median {statistics.median(shares):.1%}, worst {max(shares):.1%}"


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SlipstreamError as error:
        sys.exit(f"error: {error}")
