"""Measures every figure of docs/benchmarks.md, what is compared side by side and in turn, and writes the page.

    python -m bench.run [--only verify spans] [--peers]

The figures are kept in docs/benchmarks.json, section by section with their machine and date, as soon as a section is
done; the page is made from them. `--peers` measures vLLM's CPU build and llama.cpp (bench/peers_setup.sh) alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import slipstream
from bench.export_hf import export
from bench.linear_bench import read_bandwidth
from bench.models import measure_models
from bench.page import write_page
from bench.peer_workers.protocol import Emit, measure
from bench.peers import PEERS, PeerError, Worker, tokenize
from bench.theirs import Run, theirs
from bench.wire import measure_wire
from slipstream import spans
from slipstream.engine.request import SamplingParams
from slipstream.lab.prompts import KINDS, Prompt, load_prompts
from slipstream.lab.provenance import provenance

THREADS = 2
TOKENS = 128
DTYPES = ("float32", "bfloat16")
FORMATS = (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("bfloat16", "int4"))
"""(dtype, weights) of what slipstream offers on a CPU."""
DRAFTERS = ("ngram", "eagle3")
ROWS = (1, 2, 4, 8, 16, 32)
RESULTS = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.json"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def engine(dtype: str, weights: str = "auto", draft: str = "ngram") -> slipstream.Engine:
    return slipstream.Engine(dtype=dtype, weights=weights, draft=draft, max_batch=1)


def few_of_each_kind(count: int) -> list[Prompt]:
    prompts = load_prompts()
    return [p for kind in KINDS for p in [p for p in prompts if p.kind == kind][:count]]


def ours(model: slipstream.Engine, prompt: str, *, speculate: bool) -> Run:
    """A run of slipstream that hands on its tokens as they come."""
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)

    def run(emit: Emit) -> None:
        for chunk in model.stream(prompt, params, speculate=speculate):
            emit(chunk.token_ids)

    return run


def rate_of(run: Run) -> tuple[float, list[int]]:
    """Tokens a second after the first arrival, and the tokens."""
    answer = measure(lambda prompt, tokens, emit: run(emit), [], TOKENS)
    tokens: list[int] = answer["tokens"]
    return (len(tokens) - answer["first_tokens"]) / answer["decode_s"], tokens


def measure_transformers() -> dict[str, Any]:
    """Plain, and with prompt lookup, in one process and in turn, by dtype, engine and kind of prompt."""
    import transformers

    prompts = few_of_each_kind(3)
    token_ids = tokenize([{"prompt": p.prompt} for p in prompts])
    result: dict[str, Any] = {"version": transformers.__version__, "rates": {}, "other_text": {}}
    for dtype in DTYPES:
        model = engine(dtype)
        other = transformers.AutoModelForCausalLM.from_pretrained(export(dtype), dtype=getattr(torch, dtype))
        other.eval()
        other.generation_config.eos_token_id = None
        rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        changed = {"slipstream": 0, "transformers": 0}
        rate_of(theirs(other, token_ids[0], TOKENS))  # warm-up
        rate_of(ours(model, prompts[0].prompt, speculate=True))
        for prompt, ids in zip(prompts, token_ids, strict=True):
            assert ids == model.tokens_of(prompt.prompt)
            runs = {
                "transformers": theirs(other, ids, TOKENS),
                "slipstream": ours(model, prompt.prompt, speculate=False),
                "transformers lookup": theirs(other, ids, TOKENS, prompt_lookup_num_tokens=10),
                "slipstream ngram": ours(model, prompt.prompt, speculate=True),
            }
            texts = {}
            for name, run in runs.items():
                rate, texts[name] = rate_of(run)
                rates[name][prompt.kind].append(rate)
            changed["slipstream"] += texts["slipstream"] != texts["slipstream ngram"]
            changed["transformers"] += texts["transformers"] != texts["transformers lookup"]
            say(
                f"  {dtype} {prompt.kind}: "
                + ", ".join(f"{n} {r[prompt.kind][-1]:.1f}" for n, r in rates.items())
            )
        result["rates"][dtype] = rates
        result["other_text"][dtype] = changed
    return result


def measure_speculation(rounds: int = 2) -> dict[str, Any]:
    """Speculative against plain by format, drafter and kind: decode seconds of all shipped prompts, in turn."""
    prompts = load_prompts()
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    result: dict[str, Any] = {"prompts": len(prompts), "rounds": rounds, "formats": {}}
    for dtype, weights in FORMATS:
        models = {draft: engine(dtype, weights, draft) for draft in DRAFTERS}
        seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        tokens: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for model in models.values():
            model.generate(prompts[0].prompt, params)  # warm-up; measures the costs
        for round_ in range(rounds):
            for number, prompt in enumerate(prompts):
                ways = ["plain", *DRAFTERS] if (number + round_) % 2 else [*DRAFTERS[::-1], "plain"]
                done = {
                    way: models.get(way, models[DRAFTERS[0]]).generate(
                        prompt.prompt, params, speculate=way != "plain"
                    )
                    for way in ways
                }
                for way, answer in done.items():
                    assert answer.token_ids == done["plain"].token_ids, f"{way} changed a text"
                    seconds[prompt.kind][way].append(answer.stats.decode_s)
                    tokens[prompt.kind][way].append(answer.stats.tokens_per_cycle)
        result["formats"][f"{dtype}, weights {weights}"] = by_kind = {
            kind: {
                "plain": TOKENS * len(s["plain"]) / sum(s["plain"]),
                **{
                    draft: {
                        "tokens_per_s": TOKENS * len(s[draft]) / sum(s[draft]),
                        "ratio": sum(s["plain"]) / sum(s[draft]),
                        "tokens_per_cycle": statistics.mean(tokens[kind][draft]),
                    }
                    for draft in DRAFTERS
                },
            }
            for kind, s in seconds.items()
        }
        for draft in DRAFTERS:
            shown = ", ".join(f"{kind} {v[draft]['ratio']:.2f}" for kind, v in by_kind.items())
            say(f"  {dtype} {weights} {draft}: {shown}")
        if (dtype, weights) == ("bfloat16", "bfloat16"):
            result["draft_share"] = {draft: draft_share(models[draft], prompts) for draft in DRAFTERS}
    return result


def draft_share(model: slipstream.Engine, prompts: Sequence[Prompt]) -> float:
    """The share of a cycle's time that drafting takes, over the chat prompts."""
    params = SamplingParams(max_new_tokens=64, ignore_eos=True)
    with spans.recording() as recorder:
        for prompt in prompts:
            if prompt.kind == "chat":
                model.generate(prompt.prompt, params)
    by_span, total = recorder.self_us(), recorder.total_us()
    return sum(us for name, us in by_span.items() if name.split(".")[0] == "draft") / total


def measure_verify() -> dict[str, Any]:
    """A verify step by rows, and the time that reading the weights once takes at the machine's own rate."""
    bandwidth = read_bandwidth()
    result: dict[str, Any] = {"read_gb_s": bandwidth / 1e9, "formats": {}}
    for dtype, weights in FORMATS:
        model = engine(dtype, weights)
        result["formats"][f"{dtype}, weights {weights}"] = {
            "floor_ms": model.model.target.weight_bytes / bandwidth * 1e3,
            "ms": {str(rows): us / 1e3 for rows, us in model.step_costs(ROWS, rounds=25).items()},
        }
    return result


def measure_spans() -> dict[str, Any]:
    """What spans cost: off (a call of `span` times their number), and on (cycles with and without, in turn)."""
    model = engine("bfloat16")
    prompt = few_of_each_kind(1)[1].prompt
    params = SamplingParams(max_new_tokens=64, ignore_eos=True)
    model.generate(prompt, params, speculate=False)
    ratios, events, cycle_us = [], 0, 0.0
    for round_ in range(12):
        took = {}
        for record in (False, True) if round_ % 2 else (True, False):
            with spans.recording() if record else ExitStack() as recorder:
                stats = model.generate(prompt, params, speculate=False).stats
            took[record] = stats.decode_s
            if record:
                events = len(recorder.events) / 2 / stats.cycles
            else:
                cycle_us = stats.decode_s / stats.cycles * 1e6
        ratios.append(took[True] / took[False])
    start = time.perf_counter()
    for _ in range(100_000):
        with spans.span("x"):
            pass
    call_us = (time.perf_counter() - start) * 10
    return {
        "spans_per_cycle": events,
        "off_share": call_us * events / cycle_us,
        "on_ratio": statistics.median(ratios),
        "cycle_us": cycle_us,
    }


def measure_peers() -> dict[str, Any]:
    """Other engines in processes of their own, and slipstream, prompt by prompt in turn."""
    prompts = few_of_each_kind(3)
    token_ids = tokenize([{"prompt": p.prompt} for p in prompts])
    models = {f"slipstream {weights}": engine(dtype, weights) for dtype, weights in FORMATS}
    rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    versions = {}
    with ExitStack() as stack:
        workers = []
        for peer in PEERS:
            if reason := peer.unavailable():
                raise SystemExit(f"{peer.name}: {reason}")
            try:
                worker = stack.enter_context(Worker(peer, THREADS))
                worker.measure(token_ids[0], 32)  # warm-up
            except PeerError as error:
                say(str(error))
                continue
            versions[peer.name] = worker.version
            workers.append(worker)
            say(f"  {peer.name}: loaded, {worker.version}")
        for model in models.values():
            rate_of(ours(model, prompts[0].prompt, speculate=True))
        for prompt, ids in zip(prompts, token_ids, strict=True):
            for worker in workers:
                rates[worker.peer.name][prompt.kind].append(worker.measure(ids, TOKENS).tokens_per_s)
            for name, model in models.items():
                for speculate in (False, True):
                    rate, _ = rate_of(ours(model, prompt.prompt, speculate=speculate))
                    rates[f"{name} {'ngram' if speculate else 'plain'}"][prompt.kind].append(rate)
            say(f"  {prompt.kind}: " + ", ".join(f"{n} {r[prompt.kind][-1]:.0f}" for n, r in rates.items()))
    return {"versions": versions, "rates": rates}


SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "verify": measure_verify,
    "spans": measure_spans,
    "speculation": measure_speculation,
    "transformers": measure_transformers,
    "models": measure_models,
    "wire": measure_wire,
    "peers": measure_peers,
}


def chosen(only: Sequence[str], peers: bool) -> Iterator[str]:
    for name in SECTIONS:
        if (name == "peers") == peers and (not only or name in only):
            yield name


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], choices=list(SECTIONS), help="these sections alone")
    parser.add_argument("--peers", action="store_true", help="the other engines of .venv-peers")
    parser.add_argument("--rounds", type=int, default=2, help="how often speculation is measured")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in chosen(args.only, args.peers):
        say(f"{name}:")
        with torch.inference_mode():
            section = measure_speculation(args.rounds) if name == "speculation" else SECTIONS[name]()
        command = "make bench-peers" if args.peers else "make bench"
        found[name] = section | {"provenance": provenance([command]) | {"threads": THREADS}}
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        write_page(found, RESULTS.with_suffix(".md"))
    say(f"wrote {RESULTS.with_suffix('.md')}")


if __name__ == "__main__":
    main()
