"""`slipstream allreduce`: what the sum over ranks costs here, by backend and message size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.options import Dtype
from slipstream.errors import RequestError

if TYPE_CHECKING:
    from slipstream.lab.allreduce import Result


def allreduce(
    tp: Annotated[int, typer.Option(min=2, max=8, help="Ranks; each wants a core of its own.")] = 2,
    backend: Annotated[
        list[str] | None, typer.Option(help="Only this one; may be repeated. Default: all that can run here.")
    ] = None,
    sizes: Annotated[
        str, typer.Option(help="Message sizes in bytes, as 2048,64K,1M. Default: 2 KiB to 1 MiB.")
    ] = "",
    rows: Annotated[str, typer.Option(help="Instead of sizes: rows of --width values, as 1,8,32.")] = "",
    width: Annotated[int, typer.Option(min=1, help="Values of a row; SmolLM2-135M has 576.")] = 576,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the values; auto: float32.")] = Dtype.AUTO,
    rounds: Annotated[
        int, typer.Option(min=20, help="Rounds at each size; slow ones stop after a second.")
    ] = 1000,
    out: Annotated[Path | None, typer.Option(help="A .svg, .png or .pdf file for the plot.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON and nothing else.")] = False,
) -> None:
    """Measure the all-reduce of every backend that can run on this machine."""
    if sizes and rows:
        raise RequestError("--sizes and --rows exclude each other")
    if out is not None and out.exists():
        raise RequestError(f"{out} exists; nothing is overwritten: name another file")
    from slipstream.cli.console import say
    from slipstream.lab import allreduce as lab

    name = "float32" if dtype == Dtype.AUTO else str(dtype)
    shapes = lab.shapes_of(_numbers("--sizes", sizes), _numbers("--rows", rows), width, name)
    say(f"measuring {len(shapes)} sizes on {tp} ranks, up to a second each for every backend")
    result = lab.measure_all_reduce(tp, backend or [], shapes, name, rounds)
    if out is not None:
        lab.plot(result, out)
        say(f"wrote {out}")
    if as_json:
        from slipstream.lab.provenance import provenance

        print(json.dumps({"provenance": provenance(), **result.as_json()}))
    else:
        _print(result)
    if wrong := [each for each in result.timings if not each.same_on_all_ranks]:
        raise RequestError(f"{wrong[0].backend} gave different sums on different ranks")


def _numbers(option: str, text: str) -> list[int]:
    """2048,64K,1M as numbers."""
    found = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        number, factor = (word[:-1], {"K": 1 << 10, "M": 1 << 20}.get(word[-1].upper(), 0))
        number, factor = (number, factor) if factor else (word, 1)
        if not number.isdecimal() or not 0 < int(number) * factor <= 1 << 30:
            raise RequestError(f"{option} takes numbers such as 8,64K,1M (at most 1024M), not {word!r}")
        found.append(int(number) * factor)
    return found


def _print(result: Result) -> None:
    from slipstream.cli.console import print_numbers, stdout

    for name in dict.fromkeys(each.backend for each in result.timings):
        lines = [
            (
                f"{each.message_bytes:,}",
                f"{each.median_us:.1f}",
                f"{each.p90_us:.1f}",
                f"{each.p99_us:.1f}",
                f"{each.wire_us:.1f}",
                f"{each.skew_us:.1f}",
                f"{each.algorithm_gb_s:.2f}",
                f"{each.bus_gb_s:.2f}",
                f"{each.error:.1e}",
            )
            for each in result.timings
            if each.backend == name
        ]
        head = ("bytes", "median", "p90", "p99", "wire", "skew", "GB/s", "bus GB/s", "error")
        print_numbers(
            f"{name}, {result.tp} ranks, {result.dtype}; microseconds of the slowest rank", head, lines
        )
    console = stdout()
    console.print(
        "wire: the least time of any rank; skew: first to last entry; error: against float64.", markup=False
    )
    for name, why in result.unavailable.items():
        console.print(f"{name} cannot run here: {why}", markup=False)
    for line in result.offers():
        console.print(line, markup=False)
