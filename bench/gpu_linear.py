"""Times and checks the Triton matrix products on one GPU, and says which configuration is best for each shape.

    python -m bench.gpu_linear [--out results.json] [--seconds 85] [--only check dense] [--smoke]

First correctness: every row against float64, and its bits for 1 to 64 rows. Then, for each shape of Llama-3.1-8B and 8
rows, each cut of K and each way to tile; with the best cut, the ways to tile 1, 32 and 64 rows. A measurement is one
CUDA graph of launches that take turns among copies of the weight larger than the L2 cache, replayed; the
median counts. The floor is the weight's bytes at `--rate`. Results are saved after each shape; a configuration that
fails is reported and passed over. With --smoke, tiny shapes through Triton's interpreter: no GPU, no times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if "--smoke" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from slipstream.kernels.triton import linear as T

SHAPES = {
    "o": (4096, 4096),
    "qkv": (6144, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "lm_head": (128256, 4096),
}
SPLITS = {"o": (2, 4, 8), "qkv": (1, 2, 4), "gate_up": (1, 2), "down": (2, 4, 8), "lm_head": (1,)}
ROWS = (1, 8, 32, 64)
FEW = (
    T.Tiles(64, 8, 4, True),
    T.Tiles(64, 8, 4),
    T.Tiles(128, 5, 4, True),
    T.Tiles(128, 5, 4),
    T.Tiles(64, 8, 4, True, 8),
    T.Tiles(128, 5, 4, True, 4),
    T.Tiles(128, 5, 8, True),
    T.Tiles(64, 16, 4, True),
)
MANY = (
    T.Tiles(64, 6, 4, True),
    T.Tiles(128, 4, 4, True),
    T.Tiles(128, 4, 4),
    T.Tiles(128, 4, 4, True, 4),
    T.Tiles(128, 4, 8, True),
    T.Tiles(256, 3, 8, True),
)
SMOKE_SHAPES = {"o": (192, 256), "odd": (72, 200)}


@dataclass
class Run:
    """What all measurements share."""

    device: str
    rate: float
    """Bytes a second of the floor."""
    deadline: float
    smoke: bool
    out: Path
    results: dict[str, Any] = field(default_factory=dict)

    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def save(self) -> None:
        self.out.write_text(json.dumps(self.results, indent=1))


def plan_with(split_k: int, tiles: T.Tiles, block_k: int = 64) -> T.Plan:
    """A plan that takes these tiles for any number of rows."""
    return T.Plan(split_k, block_k, tiles, tiles, tiles, tiles)


def microseconds(launch: Callable[[int], object], copies: int, launches: int, repeats: int = 7) -> float:
    """Median time of one launch, in a graph of `launches` of them that take the copies 0, 1, ... in turn."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        launch(0)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for i in range(launches):
            launch(i % copies)
    times = []
    for _ in range(repeats + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / launches)
    return statistics.median(times[1:])


def in_turn(nbytes: int) -> tuple[int, int]:
    """Copies of a weight that together exceed the L2 cache three times, and launches of one graph."""
    copies = max(2, -(-(160 << 20) // nbytes))
    return copies, max(copies, 4)


def relative_error(y: Tensor, exact: Tensor) -> float:
    """The largest error over the root mean square of the exact values."""
    return ((y.double() - exact).abs().max() / exact.square().mean().sqrt()).item()


def same_bits(of: Callable[[Tensor], Tensor], x: Tensor, counts: tuple[int, ...]) -> bool:
    """Whether each row of x has one result, whatever the number of rows and wherever it stands."""
    whole = of(x)
    for count in counts:
        for first in (0, max(0, len(x) - count)):
            if not torch.equal(of(x[first : first + count]), whole[first : first + count]):
                return False
    return torch.equal(of(x.flip(0)), whole.flip(0))


def check(run: Run) -> None:
    """Every shape with its default plan and with each way to tile: error against float64, and equal bits."""
    counts = (1, 3, 8, 17) if run.smoke else (1, 2, 4, 8, 16, 32, 64)
    shapes = SMOKE_SHAPES if run.smoke else {**SHAPES, "odd": (1000, 1000)}
    found = run.results["check"] = {}
    print(
        "check: max error / rms of float64 (bf16 output; fp32 output), bits over row counts, bits over tilings"
    )
    for name, (n, k) in shapes.items():
        torch.manual_seed(0)
        weight = (torch.randn(n, k, device=run.device) * k**-0.5).bfloat16()
        x = torch.randn(20 if run.smoke else 200, k, device=run.device).bfloat16()
        bias = torch.randn(n, device=run.device)
        T.prepare(n, k, x.device)
        exact = x.double() @ weight.double().T + bias.double()
        errors = [
            relative_error(T.linear(x, weight, bias, dtype), exact)
            for dtype in (torch.bfloat16, torch.float32)
        ]
        rows = same_bits(lambda x, w=weight: T.linear(x, w, None, torch.float32), x, counts)
        plan = T.plan_for(n, k)
        whole = T.linear(x, weight, None, torch.float32, plan)
        different = []
        for tiles in [] if name == "lm_head" else FEW + MANY:
            try:
                other = plan_with(plan.split_k, tiles, plan.block_k)
                different += [
                    f"{tiles} with {count} rows"
                    for count in ((5,) if run.smoke else (8, 64))
                    if not torch.equal(T.linear(x[:count], weight, None, torch.float32, other), whole[:count])
                ]
            except Exception as error:
                report(f"check {name} {tiles}", error)
        found[name] = {"errors": errors, "same_bits": rows, "other_bits_with": different}
        print(f"  {name:8} {n:6} x {k:5}  {errors[0]:.1e} {errors[1]:.1e}  {rows}  {different or True}")
    run.save()


def report(what: str, error: Exception) -> None:
    lines = str(error).strip().splitlines() or [""]
    print(f"  failed: {what}: {type(error).__name__}: {lines[0][:160]}", flush=True)


def compile_all(run: Run, n: int, k: int, plans: list[tuple[int, T.Plan]], dtype: torch.dtype) -> None:
    """Compiles what is not yet compiled, several at once where this Triton can."""
    try:
        from triton.runtime._async_compile import AsyncCompileMode
    except ImportError:
        return
    weight = torch.zeros(n, k, dtype=torch.bfloat16, device=run.device)
    try:
        with ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as pool, AsyncCompileMode(pool):
            for rows, plan in plans:
                T.prepare(n, k, weight.device, plan)
                x = torch.zeros(rows, k, dtype=torch.bfloat16, device=run.device)
                y = torch.empty(rows, n, dtype=dtype, device=run.device)
                T.launch(x, weight, None, y, plan, compile_only=True)
    except Exception as error:  # found again, one by one, when each is measured
        report("compiling", error)


def dense(run: Run) -> None:
    """The bfloat16 products beside cuBLAS."""
    table = run.results["dense"] = {}
    for name, (n, k) in SHAPES.items():
        if run.late():
            print(f"  {name}: no time left")
            continue
        dtype = torch.float32 if name == "lm_head" else torch.bfloat16
        copies, launches = in_turn(n * k * 2)
        weights = [(torch.randn(n, k, device=run.device) * k**-0.5).bfloat16() for _ in range(copies)]
        floor = n * k * 2 / run.rate * 1e6
        print(f"{name} {n} x {k}: floor {floor:.1f} us (share of the floor in brackets)")
        entry = table[name] = {"floor_us": floor, "rows": {}}
        start = time.monotonic()
        first = [(8, plan_with(split, tiles)) for split in SPLITS[name] for tiles in FEW]
        compile_all(run, n, k, first, dtype)
        entry["compile_s"] = time.monotonic() - start
        best_split = 0
        for rows in (8, 1, 32, 64):
            x = torch.randn(rows, k, device=run.device).bfloat16()
            splits = [best_split] if best_split else SPLITS[name]
            plans = [plan_with(split, tiles) for split in splits for tiles in (FEW if rows <= 16 else MANY)]
            if rows > 16:
                compile_all(run, n, k, [(rows, plan) for plan in plans], dtype)
            cublas = microseconds(
                lambda i, x=x, w=weights, dtype=dtype: torch.mm(x, w[i].T, out_dtype=dtype), copies, launches
            )
            times = measure(run, x, weights, plans, dtype, launches)
            ranked = sorted(times, key=lambda pair: pair[0])
            if ranked and not best_split:
                best_split = ranked[0][1].split_k
            entry["rows"][rows] = {
                "cublas_us": cublas,
                "ours": [{"us": us, "split_k": p.split_k, **asdict(p.few)} for us, p in ranked],
            }
            best = "; ".join(f"{us:.1f} ({floor / us:.0%}) {brief(p)}" for us, p in ranked[:4])
            print(f"  {rows:3} rows  cuBLAS {cublas:.1f} ({floor / cublas:.0%})  ours {best}", flush=True)
            run.save()


def brief(plan: T.Plan) -> str:
    tiles = plan.few
    marks = ("t" if tiles.by_tiles else "p") + (f"a{tiles.ahead}" if tiles.ahead else "")
    return f"s{plan.split_k} n{tiles.block_n} st{tiles.stages} w{tiles.warps} {marks}"


def measure(
    run: Run, x: Tensor, weights: list[Tensor], plans: list[T.Plan], dtype: torch.dtype, launches: int
) -> list[tuple[float, T.Plan]]:
    times = []
    for plan in plans:
        if run.late():
            break
        try:
            T.prepare(*weights[0].shape, x.device, plan)
            us = microseconds(
                lambda i, plan=plan: T.linear(x, weights[i], None, dtype, plan), len(weights), launches
            )
            times.append((us, plan))
        except Exception as error:
            report(f"{len(x)} rows, {brief(plan)}", error)
    return times


SECTIONS = {"check": check, "dense": dense}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = Path(os.environ.get("OUT", "."))
    parser.add_argument("--out", type=Path, default=folder / "gpu_linear.json")
    parser.add_argument("--seconds", type=float, default=85, help="no configuration is begun after this")
    parser.add_argument("--rate", type=float, default=4.14e12, help="bytes a second of the floor")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--smoke", action="store_true", help="tiny shapes through the interpreter")
    args = parser.parse_args()
    device = "cpu" if args.smoke else "cuda"
    run = Run(device, args.rate, time.monotonic() + args.seconds, args.smoke, args.out)
    run.results["versions"] = {"torch": torch.__version__, "triton": T.triton.__version__}
    if not args.smoke:
        run.results["device"] = torch.cuda.get_device_name()
    for name in args.only:
        if args.smoke and name != "check":
            continue
        SECTIONS[name](run)
    run.save()
    print(f"saved to {args.out}")


if __name__ == "__main__":
    main()
