"""What a cycle costs on one GPU: checks the kernels and the captured cycle, then times whole cycles of a named shape.

    python -m bench.gpu [--shape llama-3.1-8b] [--layers N] [--context 1024] [--out results.json]

Weights are random, as only their sizes matter here. A figure is the median of replays that follow each other, by events
on the device. Results are written after each part.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.collectives.interface import Solo
from slipstream.draft.arbitrary import ArbitraryDrafter
from slipstream.draft.eagle3.checkpoint import Checkpoint
from slipstream.draft.eagle3.drafter import Eagle3Drafter
from slipstream.draft.eagle3.shape import Eagle3Shape
from slipstream.draft.eagle3.shape import weight_names as head_names
from slipstream.draft.ngram import NGramDrafter
from slipstream.draft.tree import Tree
from slipstream.engine.graph import Graphed
from slipstream.engine.request import SamplingParams
from slipstream.engine.runner import Eager
from slipstream.engine.state import State
from slipstream.kernels.attention import attention, attention_reference
from slipstream.kernels.triton import linear
from slipstream.target.decoder import Decoder
from slipstream.target.named import find_config
from slipstream.target.shard import Shard
from slipstream.target.weights import weight_names

MAX_ROWS = 64


def check_attention() -> dict[str, Any]:
    """Against the reference in float32, and a row's bits alone, in a chain, in a tree and at another extent."""
    found: dict[str, Any] = {}
    for heads, kv_heads, dim in ((32, 8, 128), (9, 3, 64), (16, 1, 576)):
        torch.manual_seed(dim)
        for context in (3, 130, 1000, 5000):
            rows, slots = 7, 3
            width = context + 64
            table = torch.randperm(slots * width, device="cuda").view(slots, width)
            k = torch.randn(slots * width, kv_heads, dim, device="cuda").bfloat16()
            v = k if kv_heads == 1 else torch.randn_like(k)
            q = torch.randn(1, rows, heads, dim, device="cuda").bfloat16()
            slot, prefix = torch.tensor([1], device="cuda"), torch.tensor([context], device="cuda")
            parents = torch.tensor([[0, 0, 1, 2, 2, 4]], device="cuda")
            tree = Tree(parents, torch.ones_like(parents, dtype=torch.bool), parents, 5)
            depth, ancestors = tree.paths
            scale = dim**-0.5
            for name, d, a in (("chain", None, None), ("tree", depth, ancestors)):
                out = attention(q, k, v, table, slot, prefix, d, a, scale, width)
                wanted = attention_reference(q, k, v, table, slot, prefix, d, a, scale)[..., : out.shape[-1]]
                error = ((out.float() - wanted.float()).norm() / wanted.float().norm()).item()
                found[f"{heads}x{dim} {context} {name}"] = error
                for t in range(rows):
                    # The same row as the only one of a text that ends with its own path.
                    path = [0, t] if a is None else a[0, t, : int(d[0, t]) + 1].tolist()
                    path = list(range(t + 1)) if a is None else path
                    own = table.clone()
                    own[1, context : context + len(path)] = table[1, [context + n for n in path]]
                    alone = attention(
                        q[:, t : t + 1].contiguous(), k, v, own, slot, prefix + len(path) - 1, None, None, scale,
                        context + len(path),
                    )  # fmt: skip
                    if not torch.equal(alone[0, 0], out[0, t]):
                        found[f"{heads}x{dim} {context} {name} row {t} bits"] = "differ"
    return found


def decoder(shape_name: str, layers: int | None, context: int, batch: int) -> tuple[Decoder, State]:
    shape = find_config(shape_name).shape
    if layers:
        shape = replace(shape, layers=layers)
    sizes = weight_names(shape)

    def random(name: str, part: Any = None) -> Tensor:
        size = sizes[name]
        made = torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(0, 1 / math.sqrt(size[-1]))
        return made.fill_(1.0) if len(size) == 1 else made

    length = context + 512
    target = Decoder(
        Shard.of(shape), random, Solo(), torch.bfloat16, "bfloat16", "cuda", length + 2 * MAX_ROWS
    )
    state = State.allocate(target.kv_layout(), batch, length, MAX_ROWS, torch.bfloat16, torch.device("cuda"))
    return target, state


@torch.inference_mode()
def time_cycles(
    runner: Any, drafter: Any, slots: list[int], size: int, context: int, count: int = 40
) -> dict[str, float]:
    """Microseconds of a cycle: on the device from one replay to the next, and by the clock."""
    state = runner.state
    marks = []

    def go() -> Any:
        state.text.length[slots] = context
        return runner.start(drafter, slots, size, context + size, True)

    for _ in range(5):
        go().read()
    torch.cuda.synchronize()
    begin, pending = time.perf_counter(), []
    for _ in range(count):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append(event)
        pending.append(go())
        if len(pending) > 1:
            pending.pop(0).read()
    pending.pop(0).read()
    wall = (time.perf_counter() - begin) / count
    torch.cuda.synchronize()
    each = [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(marks)]
    return {"device_us": statistics.median(each), "wall_us": wall * 1e6}


@torch.inference_mode()
def by_kernel(runner: Any, drafter: Any, size: int, context: int) -> list[tuple[str, float, int]]:
    """Microseconds and launches by kernel name in one cycle."""
    from torch.profiler import ProfilerActivity, profile

    state = runner.state
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for _ in range(5):
            state.text.length[0] = context
            runner.start(drafter, [0], size, context + size, True).read()
        torch.cuda.synchronize()
    kernels = [e for e in seen.key_averages() if e.self_device_time_total > 0]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    return [(e.key[:90], e.self_device_time_total / 5, e.count // 5) for e in kernels[:24]]


def eagle3(target: Decoder, state: State, top_k: int, draft_vocabulary: int = 32000) -> Eagle3Drafter:
    """A drafter of one layer of the target's own size, with random weights."""
    whole = target.shape
    shape = Eagle3Shape(
        decoder=replace(whole, layers=1),
        target_hidden_size=whole.hidden_size,
        draft_vocab_size=draft_vocabulary,
    )
    tensors: dict[str, Tensor] = {"d2t": torch.arange(draft_vocabulary) * 4 - torch.arange(draft_vocabulary)}
    for name, size in head_names(shape).items():
        if name != "d2t":
            made = torch.empty(size, dtype=torch.bfloat16).normal_(0, 1 / math.sqrt(size[-1]))
            tensors[name] = made.fill_(1.0) if len(size) == 1 else made
    drafter = Eagle3Drafter(Checkpoint.of(shape, tensors), 15, top_k=top_k, weights="bfloat16")
    drafter.attach(target, state.padding_slot + 1, state.table.shape[1])
    return drafter


@torch.inference_mode()
def texts(target: Decoder, state: State) -> dict[str, Any]:
    """Speculative against plain, captured against eager, greedy and sampled, on random weights."""
    found: dict[str, Any] = {}
    prompt = [5, 6, 7, 8] * 8 + [5, 6]
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, seed=3, top_k=20 if temperature else 0)
        outputs = {}
        for name, make, drafter, size in (
            ("plain eager", Eager, None, 0),
            ("plain graph", Graphed, None, 0),
            ("ngram 7 graph", Graphed, NGramDrafter(), 7),
            ("eagle3 chain 4 eager", Eager, eagle3(target, state, 1, 9000), 4),
            ("eagle3 chain 4 graph", Graphed, eagle3(target, state, 1, 9000), 4),
            ("eagle3 tree 15 graph", Graphed, eagle3(target, state, 4, 9000), 15),
            ("arbitrary 3 eager", Eager, ArbitraryDrafter(target.shape.vocab_size, 15), 3),
        ):
            runner = make(target, state)
            runner.begin(drafter, 0, prompt, params)
            tokens: list[int] = []
            while len(tokens) < 48:
                tokens += runner.start(drafter, [0], size, 100 + size, not temperature).read()[0].tokens
            outputs[name] = tokens[:48]
        first = outputs["plain eager"]
        for name, tokens in outputs.items():
            same = next((i for i, (a, b) in enumerate(zip(first, tokens, strict=True)) if a != b), 48)
            found[f"t={temperature} {name}: same tokens of 48"] = same
    return found


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--shape", default="llama-3.1-8b")
    asked.add_argument("--layers", type=int)
    asked.add_argument("--context", type=int, default=1024)
    asked.add_argument("--ahead", type=int, default=0, help="blocks of a weight asked for before the wait")
    asked.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "gpu.json")
    given = asked.parse_args()
    if given.ahead:
        plan_for = linear.plan_for

        def ahead(n: int, k: int) -> linear.Plan:
            plan = plan_for(n, k)
            few, some = (replace(tiles, ahead=given.ahead) for tiles in (plan.few, plan.some))
            return replace(plan, few=few, some=some)

        linear.plan_for = functools.cache(ahead)
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}

    def part(name: str, run: Any) -> None:
        begin = time.perf_counter()
        try:
            results[name] = run()
        except Exception as error:
            results[name] = f"failed: {error!r}"[:600]
            traceback.print_exc(limit=-6)
        print(f"== {name} ({time.perf_counter() - begin:.1f} s)", flush=True)
        print(json.dumps(results[name], indent=0)[:2500], flush=True)
        given.out.write_text(json.dumps(results, indent=1))

    part("attention", check_attention)
    small, small_state = decoder("smollm2-135m", 8, 512, 4)
    part("texts", lambda: texts(small, small_state))
    target, state = decoder(given.shape, given.layers, given.context, 32)
    drafter = ArbitraryDrafter(target.shape.vocab_size, MAX_ROWS - 1)
    ngram = NGramDrafter()
    ngram.attach(target, state.padding_slot + 1, 0)
    weights = target.weight_bytes
    results["floor_us"] = weights / 4.14e12 * 1e6
    print("weights", weights, "floor_us", results["floor_us"], flush=True)
    for slot in range(32):
        state.put(slot, [(7919 * i) % 5000 for i in range(given.context)], 0.0, 0, 1.0, 0)
    graphs = Graphed(target, state)
    for size in (0, 3, 7, 31, 63):
        part(
            f"rows {size + 1}",
            lambda size=size: time_cycles(graphs, drafter if size else None, [0], size, given.context),
        )
    part("n-gram rows 8", lambda: time_cycles(graphs, ngram, [0], 7, given.context))
    chain, tree = eagle3(target, state, 1), eagle3(target, state, 4)
    part("eagle3 chain of 4", lambda: time_cycles(graphs, chain, [0], 4, given.context))
    part("eagle3 tree of 15", lambda: time_cycles(graphs, tree, [0], 15, given.context))
    part("eager rows 1", lambda: time_cycles(Eager(target, state), None, [0], 0, given.context, 10))
    part("batch 32 rows 4", lambda: time_cycles(graphs, drafter, list(range(32)), 3, given.context))
    part("kernels rows 1", lambda: by_kernel(graphs, None, 0, given.context))
    part("kernels eagle3 chain of 4", lambda: by_kernel(graphs, chain, 4, given.context))
    part("kernels n-gram rows 8", lambda: by_kernel(graphs, ngram, 7, given.context))


if __name__ == "__main__":
    main()
