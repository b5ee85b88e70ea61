"""docs/benchmarks.md from the measured sections of docs/benchmarks.json."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

KINDS = ("chat", "code", "summarise", "edit")
DRAFTERS = {"ngram": "n-gram", "eagle3": "EAGLE-3"}
Rates = dict[str, dict[str, list[float]]]
"""By run and kind of prompt: tokens a second, one a prompt."""


def write_page(found: dict[str, Any], path: Path) -> None:
    """Writes the page; sections that were not measured yet are left out, and said to be."""
    lines = [
        "# Benchmarks",
        "",
        "Made by `make bench` and `make bench-peers`; do not edit. Greedy, 128 new tokens, end-of-text ignored,",
        "2 threads, SmolLM2-135M-Instruct with the weights of one GGUF file for every engine. Tokens a second are",
        "those of decoding: what came after the first arrival, over the time that it took. What is compared ran side",
        "by side, prompt by prompt in turn; ratios are the geometric mean of the ratios by prompt. All figures:",
        "[benchmarks.json](benchmarks.json).",
        "",
    ]
    for title, make in (("Claims", _claims), *((title, make) for title, make in _SECTIONS)):
        body = list(make(found))
        if body:
            lines += [f"## {title}", "", *body, ""]
    path.write_text("\n".join(lines).rstrip() + "\n")


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    cells = [[str(cell) for cell in row] for row in rows]
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in cells)]


def _ratio(rates: Rates, ours: str, theirs: str, kinds: Sequence[str] = KINDS) -> float:
    pairs = [pair for kind in kinds for pair in zip(rates[ours][kind], rates[theirs][kind], strict=True)]
    return geometric_mean(a / b for a, b in pairs)


def _claims(found: dict[str, Any]) -> Iterator[str]:
    rows = [
        (work, against, f"{least} x", f"**{got:.2f} x**", "yes" if got >= least else "**no**")
        for work, against, least, got in _at_least(found)
    ]
    if "verify" in found:
        got = _eight_rows(found["verify"], "bfloat16, weights bfloat16")
        rows.append(
            (
                "verify step of 8 rows, bfloat16",
                "decode step of 1 row",
                "at most 1.25 x the time",
                f"**{got:.2f} x**",
                "yes" if got <= 1.25 else "**no**",
            )
        )
    missing = [
        name for name in ("verify", "speculation", "transformers", "models", "peers") if name not in found
    ]
    yield from _table(("work", "against", "wanted, at least", "measured", "holds"), rows)
    if missing:
        yield ""
        yield f"Not measured yet: {', '.join(missing)}."


def _at_least(found: dict[str, Any]) -> Iterator[tuple[str, str, float, float]]:
    guessable = ("summarise", "edit")
    if "transformers" in found:
        for dtype, rates in found["transformers"]["rates"].items():
            got = _ratio(rates, "slipstream", "transformers")
            yield f"plain decoding, {dtype}", "transformers `generate`", 2.2, got
        for dtype, rates in found["transformers"]["rates"].items():
            got = _ratio(rates, "slipstream ngram", "transformers lookup", guessable)
            yield (
                f"n-gram speculation, summarise and edit, {dtype}",
                "transformers prompt lookup (10)",
                2.0,
                got,
            )
    rates = found.get("peers", {}).get("rates", {})
    if "vllm bfloat16 plain" in rates:
        got = _ratio(rates, "slipstream bfloat16 plain", "vllm bfloat16 plain")
        yield "plain decoding, bfloat16", "vLLM's CPU build", 1.15, got
        got = _ratio(rates, "slipstream bfloat16 ngram", "vllm bfloat16 ngram", guessable)
        yield "n-gram speculation, summarise and edit, bfloat16", "vLLM's CPU build, n-gram", 1.15, got
    if "llama_cpp Q4_1 plain" in rates:
        got = _ratio(rates, "slipstream int4 plain", "llama_cpp Q4_1 plain")
        yield "plain decoding, the file's own 4-bit blocks", "llama.cpp, Q4_1, the same file", 1.0, got
    if "models" in found:
        for family, f in found["models"]["families"].items():
            first, speed = f["first_token_ms"], f["tokens_per_s"]
            got = speed["slipstream"] / speed["transformers"]
            yield f"decode, random 100 M {family}, bfloat16", "transformers `generate`", 2.0, got
            got = first["transformers"] / first["slipstream"]
            yield (
                f"prefill of 512 tokens, random 100 M {family}, bfloat16",
                "transformers `generate`",
                1.2,
                got,
            )
        loading = found["models"]["loading"]
        got = loading["load_gb_s"] / loading["read_gb_s"]
        yield "loading 1 GB of safetensors, packed", "reading the file into memory", 0.5, got
    if "wire" in found:
        sizes, section = found["wire"]["sizes"].values(), found["wire"]
        for at, what in enumerate(("median", "90th percentile")):
            got = min(each["gloo"][at] / each["shm"][at] for each in sizes)
            yield f"all-reduce over shared memory, 2 ranks, 2 to 72 KiB, {what}; worst size", "Gloo", 25, got
        got = section["apart_us"][0] / section["fused_us"][0]
        yield "fused all-reduce, add and RMSNorm, 8 rows of 576", "Gloo, then torch", 20, got
        got = section["saving_ms"] / section["expected_saving_ms"]
        yield "what shared memory saves of a verify step of 8 rows", "the saving to be expected", 0.9, got
    if "speculation" in found:
        for name, kinds in found["speculation"]["formats"].items():
            for draft, shown in DRAFTERS.items():
                worst = min(kinds, key=lambda kind: kinds[kind][draft]["ratio"])
                work = f"{shown} with the controller, {name}; worst kind: {worst}"
                yield work, "its own plain decoding", 0.98, kinds[worst][draft]["ratio"]
        chat = found["speculation"]["formats"]["bfloat16, weights bfloat16"]["chat"]["eagle3"]
        yield "EAGLE-3 with the controller, chat, bfloat16", "its own plain decoding", 1.5, chat["ratio"]


def _models(found: dict[str, Any]) -> Iterator[str]:
    if (section := found.get("models")) is None:
        return
    yield (
        f"Random models of about 100 million weights, bfloat16, a prompt of {section['prompt']} tokens and "
        f"{section['tokens']} new ones, medians. {_where(section)}"
    )
    yield ""
    rows = []
    for family, f in section["families"].items():
        first, rates = f["first_token_ms"], f["tokens_per_s"]
        rows.append(
            (
                f"{family}, {f['parameters'] / 1e6:.0f} M",
                f"{first['slipstream']:.0f}",
                f"{first['transformers']:.0f}",
                f"{first['transformers'] / first['slipstream']:.2f} x",
                f"{rates['slipstream']:.0f}",
                f"{rates['transformers']:.0f}",
                f"{rates['slipstream'] / rates['transformers']:.2f} x",
            )
        )
    head = ("first token, ms", "transformers", "faster", "decode, tokens/s", "transformers", "faster")
    yield from _table(("model", *head), rows)
    loading = section["loading"]
    yield ""
    yield (
        f"Loading {loading['bytes'] / 1e9:.2f} GB of safetensors from the page cache, packing included: "
        f"{loading['load_gb_s']:.1f} GB/s; reading the same file into memory alone: {loading['read_gb_s']:.1f} GB/s."
    )


def _eight_rows(section: dict[str, Any], name: str) -> float:
    ms = section["formats"][name]["ms"]
    return float(ms["8"] / ms["1"])


def _where(section: dict[str, Any]) -> str:
    p = section["provenance"]
    return (
        f"{p['cpu']}, {p['cores']} cores, {p['threads']} threads, {p['system']}, Python {p['python']}, torch "
        f"{p['torch']}; {p['date'][:10]}, `{p['command'][0]}`."
    )


def _transformers(found: dict[str, Any]) -> Iterator[str]:
    if (section := found.get("transformers")) is None:
        return
    yield from (f"Against transformers {section['version']}, in one process. {_where(section)}", "")
    for dtype, rates in section["rates"].items():
        rows = [(name, *(f"{mean(by_kind[kind]):.1f}" for kind in KINDS)) for name, by_kind in rates.items()]
        yield from _table((f"{dtype}, tokens a second", *KINDS), rows)
        changed, count = section["other_text"][dtype], sum(len(rates["slipstream"][kind]) for kind in KINDS)
        yield ""
        yield (
            f"Other text with speculation than without: slipstream {changed['slipstream']}, transformers "
            f"{changed['transformers']} of {count} prompts."
        )
        yield ""


def _speculation(found: dict[str, Any]) -> Iterator[str]:
    if (section := found.get("speculation")) is None:
        return
    often = {1: "once", 2: "twice"}.get(section["rounds"], f"{section['rounds']} times")
    yield f"All {section['prompts']} shipped prompts, each way {often}, in turn. {_where(section)}"
    if shares := section.get("draft_share"):
        told = " and ".join(f"{shares[draft]:.0%} with {shown}" for draft, shown in DRAFTERS.items())
        yield f"Drafting takes, of a cycle's time over the chat prompts in bfloat16, {told}."
    yield ""
    rows = [
        (
            name,
            kind,
            f"{v['plain']:.1f}",
            *(
                f"{v[draft][figure]:.{digits}f}"
                for draft in DRAFTERS
                for figure, digits in (("tokens_per_s", 1), ("ratio", 2), ("tokens_per_cycle", 2))
            ),
        )
        for name, kinds in section["formats"].items()
        for kind, v in kinds.items()
    ]
    per_draft = [
        cell for shown in DRAFTERS.values() for cell in (f"{shown}, tokens/s", "ratio", "tokens a cycle")
    ]
    yield from _table(("format", "kind", "plain, tokens/s", *per_draft), rows)


def _verify(found: dict[str, Any]) -> Iterator[str]:
    if (section := found.get("verify")) is None:
        return
    yield (
        "A whole cycle at 256 tokens of context, milliseconds by rows, median of 25. The floor is one read of the "
        f"weights at the {section['read_gb_s']:.1f} GB/s that both threads read together. {_where(section)}"
    )
    yield ""
    rows = [
        (
            name,
            f"{v['floor_ms']:.2f}",
            *(f"{ms:.2f}" for ms in v["ms"].values()),
            f"{v['ms']['8'] / v['ms']['1']:.2f}",
        )
        for name, v in section["formats"].items()
    ]
    counts = next(iter(section["formats"].values()))["ms"]
    yield from _table(("format", "floor", *(f"{count} rows" for count in counts), "8 rows / 1 row"), rows)


def _peers(found: dict[str, Any]) -> Iterator[str]:
    if (section := found.get("peers")) is None:
        return
    versions = ", ".join(sorted(set(section["versions"].values())))
    yield from (f"{versions}, each in a process of its own. {_where(section)}", "")
    rows = [
        (name, *(f"{mean(by_kind[kind]):.1f}" for kind in KINDS))
        for name, by_kind in section["rates"].items()
    ]
    yield from _table(("tokens a second", *KINDS), rows)


def _spans(found: dict[str, Any]) -> Iterator[str]:
    if (section := found.get("spans")) is None:
        return
    yield (
        f"{section['spans_per_cycle']:.0f} named spans a cycle of {section['cycle_us']:.0f} us (plain, bfloat16): off "
        f"they cost {section['off_share']:.2%} of it, on they make it {section['on_ratio']:.3f} times as long. "
        f"{_where(section)}"
    )


def _wire(found: dict[str, Any]) -> Iterator[str]:
    if (section := found.get("wire")) is None:
        return
    yield f"Two ranks on two cores; float32, microseconds of the slower rank. {_where(section)}"
    yield ""
    yield from _table(
        ("bytes", "Gloo, median", "90th percentile", "shared memory, median", "90th percentile"),
        [
            (size, *(f"{us:.1f}" for us in (*each["gloo"], *each["shm"])))
            for size, each in section["sizes"].items()
        ],
    )
    yield ""
    yield (
        f"All-reduce, residual add and RMSNorm of 8 rows of 576: {section['apart_us'][0]:.0f} us with Gloo and torch,"
        f" {section['fused_us'][0]:.1f} us in one pass over shared memory. A cycle of SmolLM2 with 8 rows, bfloat16:"
        f" {section['step_ms']['gloo']:.1f} ms with Gloo, {section['step_ms']['shm']:.1f} ms with shared memory;"
        f" {section['expected_saving_ms']:.1f} ms less were to be expected from the all-reduces alone."
    )


_SECTIONS = (
    ("Against transformers", _transformers),
    ("Against vLLM and llama.cpp", _peers),
    ("Speculation against plain decoding", _speculation),
    ("The verify step by rows", _verify),
    ("Other families", _models),
    ("The all-reduce between two ranks", _wire),
    ("Spans", _spans),
)
