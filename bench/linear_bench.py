"""Times one pass through all of SmolLM2-135M's linears, by weight format and row count; the floors come first.

    python -m bench.linear_bench [--formats bfloat16 q4_1] [--rows 1 8 32] [--repeats 9] [--threads 2] [--torch]

Repetitions are interleaved (each visits every format and row count once), so that a disturbance hits all alike; the
table shows the minimum and the median.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.kernels import linear as L

LAYERS = 30
LAYER_SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
LM_HEAD = (49152, 576)
MACS = LAYERS * sum(n * k for n, k in LAYER_SHAPES.values()) + LM_HEAD[0] * LM_HEAD[1]


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def read_bandwidth() -> float:
    """Bytes a second that all threads read together: the best of thirty sums over huge pages that no cache holds."""
    memory = mmap.mmap(-1, 512 << 20)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    big = torch.frombuffer(memory, dtype=torch.float32).fill_(1)
    return big.nbytes / min(seconds(big.sum) for _ in range(30))


def matmul_rate() -> float:
    """Flops a second of torch's own bfloat16 product, large enough to be at its best."""
    a, b = torch.randn(1024, 1024).bfloat16(), torch.randn(1024, 1024).bfloat16()
    return 2 * 1024**3 / min(seconds(lambda: a @ b) for _ in range(20))


def make_weights(format: L.Format) -> list[L.PackedWeight]:
    """Every layer its own memory: the whole pass must not fit a cache that the real model's does not."""
    shapes = [shape for _ in range(LAYERS) for shape in LAYER_SHAPES.values()] + [LM_HEAD]
    drawn = {shape: torch.randn(shape) * shape[1] ** -0.5 for shape in set(shapes)}
    return [L.pack(drawn[shape], format) for shape in shapes]


def one_pass(weights: list[L.PackedWeight], inputs: dict[int, Tensor]) -> None:
    for weight in weights:
        L.linear(inputs[weight.in_features], weight)


def torch_pass(weights: list[Tensor], inputs: dict[int, Tensor]) -> None:
    for weight in weights:
        torch.nn.functional.linear(inputs[weight.shape[1]], weight)


def call_overhead() -> float:
    """Seconds from Python and back for a product that is almost nothing."""
    weight, x = L.pack(torch.randn(32, 32), "bfloat16"), torch.randn(1, 32).bfloat16()

    def calls() -> None:
        for _ in range(1000):
            L.linear(x, weight)

    return min(seconds(calls) for _ in range(10)) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", default=list(L.FORMATS), choices=L.FORMATS)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 512])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--torch", action="store_true", help="time torch's bfloat16 F.linear too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    bandwidth, rate = read_bandwidth(), matmul_rate()
    print(f"{args.threads} threads, {MACS / 1e6:.1f} M weights")
    print(
        f"ceilings: reads {bandwidth / 1e9:.1f} GB/s, torch's 1024^3 bfloat16 product {rate / 1e9:.0f} Gflop/s"
    )
    print(f"call from Python and back: {call_overhead() * 1e6:.2f} us")

    runs: dict[tuple[str, int], Callable[[], object]] = {}
    floors: dict[str, float] = {}
    inputs = {m: {k: torch.randn(m, k).bfloat16() for k in (576, 1536)} for m in args.rows}
    for format in args.formats:
        weights = make_weights(format)
        floors[format] = sum(w.nbytes for w in weights) / bandwidth
        for m in args.rows:
            runs[format, m] = lambda weights=weights, m=m: one_pass(weights, inputs[m])  # type: ignore[misc]
    if args.torch:
        shapes = [shape for _ in range(LAYERS) for shape in LAYER_SHAPES.values()] + [LM_HEAD]
        plain = [torch.randn(shape).bfloat16() for shape in shapes]
        floors["torch"] = sum(w.nbytes for w in plain) / bandwidth
        for m in args.rows:
            runs["torch", m] = lambda m=m: torch_pass(plain, inputs[m])  # type: ignore[misc]

    times: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    for repeat in range(args.repeats + 1):
        for key, run in runs.items():
            if key[1] > 64 and repeat > max(3, args.repeats // 4):
                continue
            took = seconds(run)
            if repeat:  # the first warms up
                times[key].append(took)

    result = []
    print(f"{'format':9} {'rows':>4} {'floor ms':>9} {'min ms':>8} {'median':>8} {'GB/s':>6} {'Gflop/s':>8}")
    for (name, m), took in times.items():
        best, floor = min(took), floors[name]
        flops = 2 * MACS * m / best / 1e9
        print(
            f"{name:9} {m:4} {floor * 1e3:9.2f} {best * 1e3:8.2f} {statistics.median(took) * 1e3:8.2f}"
            f" {floor * bandwidth / best / 1e9:6.1f} {flops:8.0f}"
        )
        result.append({"format": name, "rows": m, "floor_ms": floor * 1e3, "min_ms": best * 1e3})
    print(json.dumps({"threads": args.threads, "read_gb_s": bandwidth / 1e9, "results": result}))


if __name__ == "__main__":
    main()
