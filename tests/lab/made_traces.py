"""Makes traces whose answers are known: steps of a tensor-parallel model, as Kineto JSON and as Nsight Systems SQLite.

Every rank runs the same steps. An all-reduce ends on all ranks at once, `wire_us` after the last of them has come, so a
rank that comes early has a longer kernel: what it waits is skew.
"""

from __future__ import annotations

import gzip
import json
import random
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ATTENTION = (
    "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4, false> >(Flash_fwd_params)"
)
GEMM = "nvjet_sm90_tst_128x8_64x12_2x1_v_bz_TNT"
NORM = "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*, __nv_bfloat16*)"
ARGMAX = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>"
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
VERIFY_TREE = "void VerifyTreeGreedy<int, long>(int*, int*, int*, long*, long*)"


@dataclass
class Event:
    """One event, in microseconds."""

    kind: str
    """kernel, memcpy, call, mark or frame."""
    name: str
    start: float
    end: float
    stream: int = 7
    correlation: int | None = None
    grid: int | None = None
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class Rank:
    """One rank's events and its two clocks: the host's and the GPU's."""

    rank: int
    world: int
    host: float = 100.0
    gpu: float = 0.0
    events: list[Event] = field(default_factory=list)
    correlation: int = 1

    def call(self, name: str, us: float, *, launches: bool = True) -> int:
        """The host calls CUDA; returns the correlation of what that launches."""
        self.correlation += 1
        self.events.append(Event("call", name, self.host, self.host + us, correlation=self.correlation))
        self.host += us
        if launches:
            self.gpu = max(self.gpu, self.host + 1)
        return self.correlation

    def kernel(self, name: str, us: float, correlation: int, *, gap: float = 1.0, grid: int | None = 4, stream: int = 7,
               **args: Any) -> None:  # fmt: skip
        """The GPU runs a kernel after all others, `gap` after the last one."""
        start = self.gpu + gap
        self.events.append(Event("kernel", name, start, start + us, stream, correlation, grid, args))
        self.gpu = start + us

    def wait(self, name: str = "cudaEventSynchronize") -> None:
        """The host waits until the GPU is done."""
        until = max(self.host + 2, self.gpu + 3)
        self.events.append(Event("call", name, self.host, until, correlation=0))
        self.host = until

    def mark(self, name: str, start: float, end: float) -> None:
        """An annotation."""
        self.events.append(Event("mark", name, start, end))


@dataclass
class Job:
    """A model on several ranks."""

    ranks: list[Rank]
    layers: int = 61
    wire_us: float = 100.0
    late_us: tuple[float, ...] = ()
    """By rank: how much longer its attention takes."""

    @classmethod
    def of(cls, ranks: int, **settings: Any) -> Job:
        """A job with so many ranks."""
        return cls([Rank(rank, ranks) for rank in range(ranks)], **settings)

    def forward(self, launch: str, *, grid: int | None, layers: int | None = None) -> None:
        """A forward on all ranks: launched kernel by kernel, or as one graph."""
        graph = "Graph" in launch
        correlations = [rank.call(launch, 50.0) if graph else 0 for rank in self.ranks]

        def run(name: str, us: list[float], **args: Any) -> None:
            for rank, each, correlation in zip(self.ranks, us, correlations, strict=True):
                number = correlation if graph else rank.call(launch, 5.0)
                rank.kernel(name, each, number, **args)

        late = self.late_us or (0.0,) * len(self.ranks)
        for _ in range(layers if layers is not None else self.layers):
            run(ATTENTION, [20.0 + each for each in late])
            self._all_reduce(run)
            run(NORM, [3.0] * len(self.ranks), grid=grid)
            run(GEMM, [40.0] * len(self.ranks))
            self._all_reduce(run)
            run(NORM, [3.0] * len(self.ranks), grid=grid)

    def _all_reduce(self, run: Any) -> None:
        if len(self.ranks) == 1:
            return
        # All ranks' clocks have one zero here; the last to come sets the end.
        end = max(rank.gpu for rank in self.ranks) + 1 + self.wire_us
        run(NCCL, [end - rank.gpu - 1 for rank in self.ranks])

    def verify_steps(
        self,
        steps: int,
        *,
        launch: str = "cudaGraphLaunch",
        mark: str | None = "step[TARGET_VERIFY bs=1]",
        grid: int | None = None,
        think_us: float = 500.0,
    ) -> None:
        """So many cycles: a verify step, an argmax, a wait, and the host thinking for `think_us`."""
        for _ in range(steps):
            begun = [rank.host for rank in self.ranks]
            self.forward(launch, grid=grid)
            for rank, start in zip(self.ranks, begun, strict=True):
                if mark:
                    rank.mark(mark, start, rank.host)
                rank.host += 1
                rank.kernel(ARGMAX, 12.0, rank.call("cudaLaunchKernel", 5.0))
                rank.wait()
            # Ranks meet again at every all-reduce; the slowest host's clock is everybody's.
            host = max(rank.host for rank in self.ranks) + think_us
            for rank in self.ranks:
                rank.host = host

    def write_kineto(self, folder: Path, *, packed: bool = True, **document: Any) -> list[Path]:
        """One file a rank."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for rank in self.ranks:
            path = folder / f"rank-{rank.rank}.json{'.gz' if packed else ''}"
            text = json.dumps(kineto(rank, **document)).encode()
            path.write_bytes(gzip.compress(text) if packed else text)
            paths.append(path)
        return paths


_CATEGORIES = {
    "kernel": "kernel",
    "memcpy": "gpu_memcpy",
    "call": "cuda_runtime",
    "mark": "user_annotation",
    "frame": "python_function",
}


def kineto(rank: Rank, **document: Any) -> dict[str, Any]:
    """A rank as the torch profiler writes it."""
    events = []
    for event in rank.events:
        args: dict[str, Any] = dict(event.args)
        if event.correlation is not None:
            args["correlation"] = event.correlation
        on_gpu = event.kind in ("kernel", "memcpy")
        if on_gpu:
            args |= {"device": rank.rank, "stream": event.stream}
        if event.grid is not None:
            args["grid"] = [event.grid, 1, 1]
        events.append(
            {
                "ph": "X",
                "cat": _CATEGORIES[event.kind],
                "name": event.name,
                "pid": rank.rank if on_gpu else 1000 + rank.rank,
                "tid": event.stream if on_gpu else 1000 + rank.rank,
                "ts": 1e12 + event.start,
                "dur": event.end - event.start,
                "args": args,
            }
        )
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "Made GPU"}],
        "distributedInfo": {"backend": "nccl", "rank": rank.rank, "world_size": rank.world},
        "traceEvents": events,
        "baseTimeNanoseconds": 0,
    } | document


def write_nsys(ranks: list[Rank], path: Path, *, graph_mode: bool = False, seed: int = 0) -> Path:
    """All ranks in one export, each a device; rows in random order. graph_mode: one row for each graph replay."""
    strings: dict[str, int] = {}

    def text(value: str) -> int:
        return strings.setdefault(value, len(strings) + 1)

    tables: dict[str, list[tuple[Any, ...]]] = {
        "KERNEL": [],
        "GRAPH_TRACE": [],
        "RUNTIME": [],
        "NVTX": [],
        "MEMCPY": [],
    }
    for rank in ranks:
        tid, pid, offset = (rank.rank + 1) << 24 | 77, (rank.rank + 1) << 24, rank.rank * 10_000_000
        graphs: dict[int, list[Event]] = {}
        launches = {
            event.correlation for event in rank.events if event.kind == "call" and "Graph" in event.name
        }
        for event in rank.events:
            start, end = round(event.start * 1000), round(event.end * 1000)
            correlation = offset + (event.correlation or 0)
            if event.kind == "kernel" and graph_mode and event.correlation in launches:
                graphs.setdefault(correlation, []).append(event)
            elif event.kind == "kernel":
                name = text(event.name)
                tables["KERNEL"].append(
                    (start, end, rank.rank, event.stream, correlation, pid, name, name, event.grid or 1)
                )
            elif event.kind == "memcpy":
                kind = 2 if "DtoH" in event.name else 1
                tables["MEMCPY"].append((start, end, rank.rank, event.stream, correlation, pid, kind, 4))
            elif event.kind == "call":
                tables["RUNTIME"].append((start, end, tid, correlation, text(f"{event.name}_v10000")))
            elif event.kind == "mark":
                tables["NVTX"].append((start, end, 59, event.name, None, tid))
        for correlation, inside in graphs.items():
            begin, end = round(inside[0].start * 1000), round(inside[-1].end * 1000)
            tables["GRAPH_TRACE"].append((begin, end, rank.rank, 7, correlation, pid, 1, 1))
    random.Random(seed).shuffle(tables["KERNEL"])
    random.Random(seed).shuffle(tables["RUNTIME"])
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        db.execute("CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT)")
        event = "start, end, deviceId, streamId, correlationId, globalPid"
        columns = {
            "CUPTI_ACTIVITY_KIND_KERNEL": f"{event}, demangledName, shortName, gridX",
            "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"{event}, graphId, graphExecId",
            "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, globalTid, correlationId, nameId",
            "CUPTI_ACTIVITY_KIND_MEMCPY": f"{event}, copyKind, bytes",
            "NVTX_EVENTS": "start, end, eventType, text, textId, globalTid",
        }
        for table, names in columns.items():
            rows = tables[table.removeprefix("CUPTI_ACTIVITY_KIND_").removesuffix("_EVENTS")]
            if not rows:
                continue  # the exporter leaves out empty tables
            db.execute(f"CREATE TABLE {table} ({names})")
            db.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * (names.count(',') + 1))})", rows)
        db.executemany(
            "INSERT INTO StringIds VALUES (?, ?)", [(number, value) for value, number in strings.items()]
        )
        db.executemany("INSERT INTO TARGET_INFO_GPU VALUES (?, 'Made GPU')", [(rank.rank,) for rank in ranks])
    db.close()
    return path
