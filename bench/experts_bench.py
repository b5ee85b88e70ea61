"""Times a layer's experts and its per-head products of latent attention, by row count, beside their floors.

    python -m bench.experts_bench [--format bfloat16] [--rows 1 8 512] [--repeats 9] [--threads 2]

A floor is the weights that are reached, read once, or the arithmetic at torch's best bfloat16 rate (for the other
formats that rate is a yardstick, not a bound): the longer of the two. A
neighbour on the machine changes both from second to second, so they are measured again in every repetition, beside
everything else: `min` is compared with the best ceilings seen, `median ratio` is of times and ceilings of one
repetition. A pass visits layers with weights of their own, more than a cache holds. `products` is what the experts'
matrix products take when each expert's are called by themselves (the calls' own time in Python taken off): what
`experts` takes beyond is sorting, SwiGLU and the weighted sum.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bench.linear_bench import call_overhead, seconds
from slipstream.kernels import linear as L
from slipstream.kernels.experts import Routing, experts, route

EXPERTS, HIDDEN, WIDTH, ROUTING = 64, 512, 256, Routing(8)
HEADS, HEAD_DIM, RANK = 16, 128, 512
EXPERT_LAYERS, HEAD_LAYERS = 6, 48


@dataclass
class Case:
    """One operation at one row count; bytes, flops and times are of one layer."""

    name: str
    rows: int
    nbytes: float
    flops: float
    run: Callable[[], object]
    layers: int
    overhead: float = 0.0
    """Of the calls from Python in one layer, to be taken off."""
    times: list[float] = field(default_factory=list)

    def measure(self) -> None:
        self.times.append(seconds(self.run) / self.layers - self.overhead)

    def floor(self, bandwidth: float, rate: float) -> float:
        return max(self.nbytes / bandwidth, self.flops / rate)


class Ceilings:
    """What the machine gives at this moment, repetition by repetition."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 256 << 20)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._block = torch.frombuffer(self._memory, dtype=torch.float32).fill_(1)
        self._weight, self._x = L.pack(torch.randn(65536, 1024), "bfloat16"), torch.randn(1, 1024).bfloat16()
        self._square = torch.randn(1024, 1024).bfloat16()
        self.bandwidths: list[float] = []
        self.rates: list[float] = []

    def measure(self) -> None:
        """The better of two ways to read: torch's sum, and one row through one large weight."""
        sums = [self._block.nbytes / seconds(self._block.sum) for _ in range(3)]
        rows = [self._weight.nbytes / seconds(lambda: L.linear(self._x, self._weight)) for _ in range(3)]
        products = [2 * 1024**3 / seconds(lambda: self._square @ self._square) for _ in range(5)]
        self.bandwidths.append(max(*sums, *rows))
        self.rates.append(max(products))


@dataclass(frozen=True)
class Visit:
    """Some rows' way through one layer's experts."""

    gate_up: L.PackedWeight
    down: L.PackedWeight
    x: Tensor
    chosen: Tensor
    weights: Tensor

    def whole(self) -> None:
        experts(self.x, self.chosen, self.weights, self.gate_up, self.down)

    def products(self) -> Callable[[], None]:
        counts = self.chosen.flatten().bincount(minlength=EXPERTS).tolist()
        pairs = [
            (L.group_of(self.gate_up, e), L.group_of(self.down, e), *inputs(n))
            for e, n in enumerate(counts)
            if n
        ]

        def run() -> None:
            for up, down, x, hidden in pairs:
                L.linear(x, up)
                L.linear(hidden, down, torch.float32)

        return run


def inputs(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, HIDDEN).bfloat16(), torch.randn(rows, WIDTH).bfloat16()


def visits(rows: int, layers: list[tuple[L.PackedWeight, L.PackedWeight]]) -> list[Visit]:
    """Every layer once; with few rows several times, to other experts each time, so that all weights are read."""
    found = []
    per_layer = max(1, EXPERTS // (rows * ROUTING.per_token))
    orders = [torch.randperm(EXPERTS) for _ in layers]
    for turn in range(per_layer):
        for (gate_up, down), order in zip(layers, orders, strict=True):
            logits = torch.randn(rows, EXPERTS)
            if per_layer > 1:
                own = order[turn * rows * ROUTING.per_token :][: rows * ROUTING.per_token]
                logits[torch.arange(rows).repeat_interleave(ROUTING.per_token), own] += 100
            found.append(Visit(gate_up, down, inputs(rows)[0], *route(logits, None, ROUTING)))
    return found


def expert_cases(rows: int, layers: list[tuple[L.PackedWeight, L.PackedWeight]], call: float) -> list[Case]:
    every = visits(rows, layers)
    reached = statistics.mean(len(visit.chosen.unique()) for visit in every)
    nbytes = reached * sum(weight.nbytes for weight in layers[0]) / EXPERTS
    flops = 2.0 * rows * ROUTING.per_token * 3 * HIDDEN * WIDTH
    alone = [visit.products() for visit in every]
    logits = torch.randn(len(every), rows, EXPERTS)
    return [
        Case("experts", rows, nbytes, flops, lambda: [visit.whole() for visit in every], len(every)),
        Case(
            "products", rows, nbytes, flops, lambda: [run() for run in alone], len(every), 2 * reached * call
        ),
        Case("route", rows, 0, 0, lambda: [route(one, None, ROUTING) for one in logits], len(every)),
    ]


def head_case(rows: int, weights: list[L.PackedWeight]) -> Case:
    """x and y are slices of wider rows, as latent attention has them."""
    k, n = weights[0].in_features, weights[0].out_features
    x = torch.randn(rows, HEADS, k + 64).bfloat16()[..., :k]
    out = torch.empty(rows, HEADS, n + 64).bfloat16()[..., :n]
    flops = 2.0 * rows * HEADS * k * n
    name = f"heads {k}->{n}"
    return Case(
        name,
        rows,
        weights[0].nbytes,
        flops,
        lambda: [L.linear_heads(x, weight, out) for weight in weights],
        len(weights),
    )


def make_cases(format: L.Format, row_counts: list[int]) -> list[Case]:
    def many(count: int, n: int, k: int) -> L.PackedWeight:
        return L.pack_many(count, lambda _: torch.randn(n, k) * k**-0.5, format)

    layers = [(many(EXPERTS, 2 * WIDTH, HIDDEN), many(EXPERTS, HIDDEN, WIDTH)) for _ in range(EXPERT_LAYERS)]
    ways = [[many(HEADS, n, k) for _ in range(HEAD_LAYERS)] for n, k in ((RANK, HEAD_DIM), (HEAD_DIM, RANK))]
    call = call_overhead()
    cases = []
    for rows in row_counts:
        cases += [*expert_cases(rows, layers, call), *(head_case(rows, way) for way in ways)]
    return cases


def report(cases: list[Case], ceilings: Ceilings) -> list[dict[str, object]]:
    best = max(ceilings.bandwidths), max(ceilings.rates)
    print(f"{'a layer of':15} {'rows':>4} {'floor us':>9} {'min us':>8} {'ratio':>6} {'median ratio':>12}")
    result: list[dict[str, object]] = []
    for case in cases:
        shortest, floor = min(case.times), case.floor(*best)
        row: dict[str, object] = {"name": case.name, "rows": case.rows, "min_us": shortest * 1e6}
        line = f"{case.name:15} {case.rows:4}"
        if floor > 0:
            moments = zip(case.times, ceilings.bandwidths, ceilings.rates, strict=True)
            ratio = statistics.median(took / case.floor(bandwidth, rate) for took, bandwidth, rate in moments)
            row |= {"floor_us": floor * 1e6, "median_ratio": ratio}
            print(f"{line} {floor * 1e6:9.1f} {shortest * 1e6:8.1f} {shortest / floor:6.2f} {ratio:12.2f}")
        else:
            print(f"{line} {'':9} {shortest * 1e6:8.1f}")
        result.append(row)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--format", default="bfloat16", choices=L.FORMATS)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 512])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    ceilings, cases = Ceilings(), make_cases(args.format, args.rows)
    for repeat in range(args.repeats + 1):
        ceilings.measure()
        for case in cases:
            case.measure()
        if not repeat:  # the first warms up
            for times in (ceilings.bandwidths, ceilings.rates, *(case.times for case in cases)):
                times.clear()
    reads = sorted(bandwidth / 1e9 for bandwidth in ceilings.bandwidths)
    print(
        f"{args.threads} threads, {args.format}: {EXPERTS} experts of {ROUTING.per_token}, {HIDDEN} x {WIDTH}"
    )
    print(
        f"ceilings: reads {reads[0]:.1f} to {reads[-1]:.1f} GB/s, products {max(ceilings.rates) / 1e9:.0f} Gflop/s"
    )
    print(json.dumps({"threads": args.threads, "read_gb_s": reads[-1], "results": report(cases, ceilings)}))


if __name__ == "__main__":
    main()
