"""The all-reduce on this machine, two ranks: shared memory beside Gloo, alone and in SmolLM2's verify step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import slipstream
from slipstream.collectives.choice import connect
from slipstream.collectives.group import launch
from slipstream.collectives.meeting import Meeting
from slipstream.lab.allreduce import fused_us, measure_all_reduce, quantile

RANKS = 2
WIDTH = 576
ROWS = (1, 2, 4, 8, 16, 32)
"""Of 576 float32: 2.3 to 73.7 KB."""


def measure_wire() -> dict[str, Any]:
    """Medians and 90th percentiles by size; the fused operation; a verify step, and what it was expected to save."""
    timed = measure_all_reduce(RANKS, ["gloo", "shm"], [(rows, WIDTH) for rows in ROWS], rounds=400)
    sizes: dict[str, dict[str, tuple[float, float]]] = {}
    for each in timed.timings:
        sizes.setdefault(str(each.message_bytes), {})[each.backend] = (each.median_us, each.p90_us)
    with launch(_fused, RANKS, (300,)) as ranks:
        fused, apart = (sorted(times) for times in ranks.results()[0])
    steps = {name: _step_ms(name) for name in ("gloo", "shm")}
    # Each of a layer's two sums, the embedding's and the output's gather; bfloat16, 8 rows: half the bytes.
    half = sizes[str(4 * WIDTH * 4)]
    expected_ms = (2 * 30 + 2) * (half["gloo"][0] - half["shm"][0]) / 1e3
    return {
        "sizes": sizes,
        "fused_us": (statistics.median(fused), quantile(fused, 0.9)),
        "apart_us": (statistics.median(apart), quantile(apart, 0.9)),
        "step_ms": steps,
        "expected_saving_ms": expected_ms,
        "saving_ms": steps["gloo"] - steps["shm"],
    }


def _fused(rank: int, size: int, at: str, rounds: int) -> tuple[Sequence[float], Sequence[float]]:
    """Times of the fused operation over shared memory, and of its parts over Gloo, in turn."""
    meeting = Meeting.join(rank, size, at)
    shm, gloo = connect(meeting, "shm"), connect(meeting, "gloo")
    fused, apart = [], []
    for _ in range(10):
        apart += fused_us(gloo, 8, WIDTH, rounds // 10, is_fused=False)
        fused += fused_us(shm, 8, WIDTH, rounds // 10, is_fused=True)
    shm.close()
    gloo.close()
    return fused, apart


def _step_ms(backend: str) -> float:
    """A cycle of 8 rows on two ranks."""
    engine = slipstream.Engine(
        dtype="bfloat16", weights="bfloat16", draft=None, max_batch=1, tp=RANKS, all_reduce=backend
    )
    try:
        return engine.step_costs((8,), rounds=25)[8] / 1e3
    finally:
        engine.close()
