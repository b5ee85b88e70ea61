"""`slipstream shape`: what a model is in numbers, without a download."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.errors import RequestError

if TYPE_CHECKING:
    from slipstream.target.config import ModelConfig


def shape(
    model: Annotated[
        str | None, typer.Argument(help="A name, a folder or a config.json; without one, the names.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of the pass (1 is plain decoding).")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens that each row sees.")] = 4096,
    tp: Annotated[int, typer.Option(min=1, help="Ranks that share the model (tensor parallelism).")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Print a model's size, and the work and communication of a pass."""
    from slipstream.target.named import find_config, names

    if model is None:
        every = [(name, find_config(name)) for name in names()]
        found = [{"name": name, **_facts(name, config, rows, context, tp)} for name, config in every]
        print(json.dumps(found)) if as_json else _print_names(found)
        return
    facts = _facts(model, find_config(model), rows, context, tp)
    if as_json:
        print(json.dumps(facts))
    else:
        _print(facts)


def _facts(name: str, config: ModelConfig, rows: int, context: int, tp: int) -> dict[str, Any]:
    """Every figure, in plain values. Bytes are as the checkpoint stores the weights; KV and activations in 16 bits."""
    it, stored = config.shape, config.weight_bytes()
    _check_tp(config, tp)
    flops, read = it.flops(rows, context), it.weight_bytes(rows, stored)
    kv_read = it.kv_bytes_per_token(2) * context
    layers = [each for each in it.collectives(rows, tp, 2) if each.layer is not None]
    others = [each for each in it.collectives(rows, tp, 2) if each.layer is None]
    return {
        "model": name,
        "family": it.family,
        "parameters": it.parameters,
        "active_parameters": it.active_parameters,
        "layers": it.layers,
        "hidden_size": it.hidden_size,
        "heads": it.heads,
        "kv_heads": None if it.latent else it.kv_heads,
        "vocab_size": it.vocab_size,
        "max_positions": it.max_positions,
        "experts": it.experts.count if it.experts else 0,
        "experts_per_token": it.experts.routing.per_token if it.experts else 0,
        "weights_held_bytes": round(it.held_bytes(stored)),
        "kv_bytes_per_token": it.kv_bytes_per_token(2),
        "pass": {
            "rows": rows,
            "context": context,
            "tp": tp,
            "flops": flops,
            "weight_bytes": round(read),
            "distinct_experts": it.distinct_experts(rows),
            "kv_bytes": kv_read,
            "flops_per_byte": flops / (read + kv_read),
            "layer_all_reduces": {"count": len(layers), "bytes_each": layers[0].bytes if layers else 0},
            "other_collectives": [
                {"kind": each.kind, "place": each.place, "bytes": each.bytes} for each in others
            ],
        },
        "notes": list(config.notes),
    }


def _check_tp(config: ModelConfig, tp: int) -> None:
    it = config.shape
    sizes = {"heads": it.heads, "the MLP's width": it.intermediate_size}
    if it.experts:
        sizes["an expert's width"] = it.experts.intermediate_size
    for what, size in sizes.items():
        if size % tp:
            raise RequestError(f"--tp {tp} does not divide {what}, {size}")


def _print_names(found: list[dict[str, Any]]) -> None:
    from slipstream.cli.console import print_numbers

    rows = [
        (
            each["name"],
            _short(each["parameters"]),
            _short(each["active_parameters"]),
            str(each["layers"]),
            str(each["hidden_size"]),
            _size(each["weights_held_bytes"]),
            _size(each["kv_bytes_per_token"]),
        )
        for each in found
    ]
    head = ("name", "parameters", "active", "layers", "hidden", "weights", "KV a token")
    print_numbers("Shapes that are known by name", head, rows)


def _print(facts: dict[str, Any]) -> None:
    from slipstream.cli.console import print_numbers, stdout

    run = facts["pass"]
    heads = f"{facts['heads']} heads, " + (
        f"{facts['kv_heads']} of K and V" if facts["kv_heads"] else "one latent"
    )
    about = [
        ("family", facts["family"]),
        ("parameters", _short(facts["parameters"])),
        ("of them active for a token", _short(facts["active_parameters"])),
        ("layers", f"{facts['layers']} x {facts['hidden_size']} wide, {heads}"),
        ("vocabulary", f"{facts['vocab_size']:,}"),
        ("longest context", f"{facts['max_positions']:,} tokens"),
        ("weights as stored", _size(facts["weights_held_bytes"])),
        ("KV cache", f"{_size(facts['kv_bytes_per_token'])} a token, 16 bits"),
    ]
    if facts["experts"]:
        about.insert(4, ("experts", f"{facts['experts']} a layer, {facts['experts_per_token']} chosen"))
    if facts["kv_heads"] is None:
        about[-1] = ("KV cache", about[-1][1] + ", a latent for all heads")
    print_numbers(facts["model"], ("", ""), about)
    shares = f" ({_size(run['weight_bytes'] / run['tp'])} a rank)" if run["tp"] > 1 else ""
    work = [
        ("floating-point operations", _short(run["flops"])),
        ("weights read", _size(run["weight_bytes"]) + shares),
        ("KV read", _size(run["kv_bytes"])),
        ("operations a byte", f"{run['flops_per_byte']:.1f}"),
    ]
    if facts["experts"]:
        work.insert(
            2, ("experts reached, expected", f"{run['distinct_experts']:.1f} of {facts['experts']} a layer")
        )
    if run["tp"] > 1:
        each = run["layer_all_reduces"]
        work.append(("all-reduces in the layers", f"{each['count']} of {_size(each['bytes_each'])}"))
        work += [
            (f"{other['kind'].replace('_', '-')} of the {_PLACES[other['place']]}", _size(other["bytes"]))
            for other in run["other_collectives"]
        ]
    title = f"A pass of {run['rows']} row{'s' * (run['rows'] > 1)} at {run['context']:,} tokens of context"
    print_numbers(title + (f", {run['tp']} ranks" if run["tp"] > 1 else ""), ("", ""), work)
    for note in facts["notes"]:
        stdout().print(f"note: {note}", markup=False)


_PLACES = {"embed": "embedding", "logits": "logits"}


def _short(number: float) -> str:
    """A count with its unit: 8.03 billion."""
    for unit, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:,.0f}"


def _size(count: float) -> str:
    """Bytes with their unit, decimal."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:.0f} bytes"
