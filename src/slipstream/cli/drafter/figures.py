"""The tables of `slipstream drafter eval`: each row a convention, by its plain name and who reports it so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

Found = dict[str, Any]
Table = tuple[str, list[str], list[list[str]]]
Row = tuple[str, Callable[[Found], str]]


def _number(name: str) -> Callable[[Found], str]:
    return lambda found: f"{found[name]:.2f}"


def _share(name: str) -> Callable[[Found], str]:
    return lambda found: f"{found[name]:.1%}"


def _places(name: str) -> Callable[[Found], str]:
    return lambda found: " ".join(f"{100 * share:.0f}" for share in found[name])


def _losses(found: Found) -> str:
    return " ".join(f"{loss:.2f}" for loss in found["mean_loss"])


_ANSWERED: list[Row] = [
    ("tokens a cycle, bonus counted (papers' τ)", _number("tokens_a_cycle")),
    (
        "... what a text's end cuts off counted too (vLLM mean acceptance length)",
        lambda found: f"{1 + found['accepted_a_cycle']:.2f}",
    ),
    ("... mean over answers instead of over cycles", _number("mean_of_answers")),
    ("tokens a cycle, bonus left out (as SpecForge counts)", _number("accepted_a_cycle")),
    ("right by position, %, all before it right", _places("conditional")),
    ("right up to each position, % (vLLM per-position acceptance)", _places("cumulative")),
    ("accepted of all drafted tokens (vLLM draft acceptance rate)", _share("accepted_of_drafted")),
    ("tokens of the answers that can be drafted at all", _share("coverage")),
    ("cycles", lambda found: f"{found['cycles']:,}"),
]
_FORCED: list[Row] = [
    ("tokens a cycle, bonus counted (papers' τ, here of a chain)", _number("tokens_a_cycle")),
    ("tokens a cycle, bonus left out", _number("accepted_a_cycle")),
    ("... from each position by itself (SpecForge simulated_acc_len)", _number("simulated_acc_len")),
    ("right by position, %, all before it right (what an engine sees)", _places("conditional")),
    ("right up to each position, % (vLLM per-position acceptance)", _places("cumulative")),
    ("right by position, %, whatever came before (SpecForge, EAGLE acc)", _places("unconditional")),
    ("... out-of-vocabulary left out (TorchSpec)", _places("unconditional_draftable")),
    ("... all before it right, out-of-vocabulary left out", _places("conditional_draftable")),
    (
        "... all before it right, out-of-vocabulary hidden (speculators cond_acc)",
        _places("conditional_lenient"),
    ),
    ("sum(min(p, q)), %, over all positions (sampling at temperature 1)", _places("mean_overlap")),
    ("cross-entropy over the draft vocabulary, nats, out-of-vocabulary left out", _losses),
    ("the target's choices that can be drafted at all", _share("coverage")),
]


def tables(found: Found) -> Iterator[Table]:
    """Titles, heads and rows: over everything, and where answers loop, without those."""
    cases = [("all", f"All {found['count']} ")]
    if found["looping"]:
        cases.append(("without_loops", f"Without the {len(found['looping'])} that repeat themselves: "))
    for case, title in cases:
        if found["test"] == "data":
            columns, rows, what = [("", found[case])], _FORCED, "samples, teacher-forced"
        else:
            columns = [(shape["name"], shape[case]) for shape in found["shapes"]]
            rows, what = _ANSWERED, "answers in the real cycle"
        if all(figures for _, figures in columns):
            yield (
                f"{title}{what}; out-of-vocabulary is a miss unless said otherwise",
                ["", *(name for name, _ in columns)],
                [[name, *(show(figures) for _, figures in columns)] for name, show in rows],
            )
    if found["test"] == "prompts":
        yield _kinds(found["shapes"])


def _kinds(shapes: Sequence[Found]) -> Table:
    rows = [
        [
            kind,
            str(figures["answers"]),
            *(f"{shape['by_kind'][kind]['tokens_a_cycle']:.2f}" for shape in shapes),
        ]
        for kind, figures in shapes[0]["by_kind"].items()
    ]
    return (
        "Tokens a cycle by kind, bonus counted",
        ["kind", "answers", *(shape["name"] for shape in shapes)],
        rows,
    )


def notes(found: Found) -> list[str]:
    """What must be known about the figures."""
    looping, count = found["looping"], found["count"]
    is_data = found["test"] == "data"
    what = "sample" if is_data else "answer"
    lines = [
        f"The {shape['name']} grows {shape['levels']} levels: more hardly ever pay at its size."
        for shape in found.get("shapes", ())
        if shape["levels"] < shape["depth"]
    ]
    if found.get("too_long"):
        lines.append(f"{found['too_long']} samples were too long and left out; see --max-length.")
    if not looping:
        lines.append(f"None of {count} {what}s repeats itself.")
    else:
        listed = ", ".join(map(str, looping[:20])) + (" ..." if len(looping) > 20 else "")
        lines.append(
            f"{len(looping)} of {count} {what}s repeat themselves, which is easy to guess ({what} {listed})."
        )
        lines += _without(found)
    if not is_data and not found["different"]:
        lines.append(f"Same text as plain decoding, token for token: {count} of {count} {what}s.")
    return lines


def _without(found: Found) -> list[str]:
    if len(found["looping"]) == found["count"]:
        return ["Nothing is left without them: these figures say nothing about the drafter."]
    pairs = (
        [("a chain", found["all"], found["without_loops"])]
        if found["test"] == "data"
        else [(shape["name"], shape["all"], shape["without_loops"]) for shape in found["shapes"]]
    )
    told = [
        f"{name} {without['tokens_a_cycle']:.2f} instead of {everything['tokens_a_cycle']:.2f}"
        for name, everything, without in pairs
    ]
    return [f"Tokens a cycle without them: {', '.join(told)}."]
