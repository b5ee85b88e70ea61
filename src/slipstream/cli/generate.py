"""`slipstream generate`: one prompt, its answer streamed to the terminal."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.options import ALL_REDUCE_HELP, DRAFT_HELP, TP_HELP, Dtype, Weights, draft_or_none
from slipstream.errors import RequestError

if TYPE_CHECKING:
    from slipstream.engine.request import Stats


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from the standard input.")],
    model: Annotated[
        str, typer.Option(help="A name, a folder, a .gguf file or a Hugging Face id.")
    ] = "smollm2-135m",
    draft: Annotated[str, typer.Option(help=DRAFT_HELP)] = "ngram",
    dtype: Annotated[Dtype, typer.Option(help="Number format of the computation.")] = Dtype.AUTO,
    weights: Annotated[Weights, typer.Option(help="Number format of the weights.")] = Weights.AUTO,
    max_new_tokens: Annotated[int, typer.Option(help="The longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw among the likeliest tokens of this share.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw among this many likeliest tokens; 0 is all.")] = 0,
    seed: Annotated[int, typer.Option(help="The same seed draws the same text.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends the answer; repeatable.")] = None,
    speculate: Annotated[bool, typer.Option(help="Guess ahead; the text is the same either way.")] = True,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without chat template.")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print speed and acceptance to the standard error.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text.")
    ] = False,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="The longest prompt and answer together; default: 2048 tokens.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads (of each rank); default: all cores.")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help=TP_HELP)] = 1,
    all_reduce: Annotated[str, typer.Option(help=ALL_REDUCE_HELP)] = "auto",
) -> None:
    """Answer one prompt, streamed to the terminal."""
    from slipstream.engine.request import SamplingParams

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # a terminal that cannot show a letter must not end the text
    text = _read_stdin() if prompt == "-" else prompt
    if not text.strip():
        raise RequestError("the prompt is empty")
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=tuple(stop or ()),
    )
    import slipstream

    engine = slipstream.Engine(
        model,
        draft=draft_or_none(draft),
        dtype=dtype,
        weights=weights,
        max_length=max_length,
        threads=threads,
        tp=tp,
        all_reduce=all_reduce,
    )
    if as_json:
        completion = engine.generate(text, params, speculate=speculate, raw=raw)
        print(json.dumps(asdict(completion), ensure_ascii=False))
        return
    cost = None
    for chunk in engine.stream(text, params, speculate=speculate, raw=raw):
        print(chunk.text, end="", flush=True)
        cost = chunk.stats or cost
    print()
    if stats and cost:
        print(_describe(cost), file=sys.stderr)


def _read_stdin() -> str:
    if sys.stdin is None:
        raise RequestError("the prompt was to come from the standard input, which is closed")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"the standard input is not UTF-8 text (byte {error.start})") from None


def _describe(stats: Stats) -> str:
    """One line: sizes, times, and how many guesses of the first places were right."""
    line = (
        f"{stats.prompt_tokens} prompt tokens in {stats.prefill_s * 1e3:.0f} ms; {stats.new_tokens} new tokens in "
        f"{stats.decode_s:.2f} s, {stats.tokens_per_s:.1f} a second; {stats.tokens_per_cycle:.2f} tokens a cycle"
    )
    shares = [
        f"{100 * accepted / tried:.0f} %"
        for tried, accepted in zip(stats.tried[:8], stats.accepted, strict=False)
        if tried
    ]
    return f"{line}; right by place: {', '.join(shares)}" if shares else line
