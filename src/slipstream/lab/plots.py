"""The report's plots as inline SVG. Colours are CSS variables of the page, so that light and dark both look right."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

from slipstream.lab.cycle_cost import CycleCost
from slipstream.lab.diagnosis import Diagnosis
from slipstream.lab.summary import Comparison, Summary

PART_COLOURS = {
    "draft": "draft",
    "verify.embed": "embed",
    "verify.attention": "attention",
    "verify.mlp": "mlp",
    "verify.moe": "moe",
    "verify.all_reduce": "all-reduce",
    "verify.norm": "norm",
    "verify.lm_head": "lm-head",
    "verify.rest": "rest",
    "accept": "accept",
    "commit": "commit",
    "host": "host",
}
"""The CSS variable (`--part-...`) of each part of a cycle."""

_NAMES = [
    "ink",
    "muted",
    "grid",
    "plain",
    "fast",
    "ideal",
    *(f"part-{name}" for name in PART_COLOURS.values()),
]
# matplotlib wants real colours: each variable gets an almost-black that nothing else uses, swapped in the SVG's text.
_STAND_IN = {name: f"#0000{index:02x}" for index, name in enumerate(_NAMES, start=1)}


def plots(diagnosis: Diagnosis, summary: Summary) -> dict[str, str]:
    """The SVG of each plot that the measurements suffice for, by name."""
    result: dict[str, str] = {}
    if summary.by_kind:
        result["speed"] = _svg("speed", lambda axes: _speed(axes, summary.by_kind))
    if summary.acceptance:
        result["acceptance"] = _svg("acceptance", lambda axes: _acceptance(axes, summary))
    costs = {"plain": diagnosis.plain_cycle, "speculative": diagnosis.speculative_cycle}
    known = {name: cost for name, cost in costs.items() if cost}
    if known:
        height = 0.7 + 0.65 * len(known)
        result["cycle"] = _svg("cycle", lambda axes: _cycle(axes, known), width=9.6, height=height)
    if len(summary.verify_ratio) > 1:
        result["verify"] = _svg("verify", lambda axes: _verify(axes, summary))
    return result


def _svg(name: str, draw: Callable[[Any], None], width: float = 5.2, height: float = 3.1) -> str:
    """One plot as an `<svg>` element that scales with the page."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {
        "svg.fonttype": "none",  # real text: it takes the page's font, and can be searched and read out
        "svg.hashsalt": name,  # ids that differ between plots of one page, and not between two runs
        "font.size": 9.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.axisbelow": True,
        "axes.edgecolor": _STAND_IN["grid"],
        "axes.labelcolor": _STAND_IN["muted"],
        "text.color": _STAND_IN["ink"],
        "xtick.color": _STAND_IN["muted"],
        "ytick.color": _STAND_IN["muted"],
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "grid.color": _STAND_IN["grid"],
        "legend.frameon": False,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure.add_subplot())
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(out.getvalue())


def _inline(svg: str) -> str:
    """Only the element, without links, fixed size and stand-in colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'<svg[^>]*?viewBox="([^"]*)"[^>]*>', r'<svg role="img" viewBox="\1">', svg, count=1)
    for name, colour in _STAND_IN.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg


def _speed(axes: Any, by_kind: dict[str, Comparison]) -> None:
    """Median tokens a second by kind, whiskers from quartile to quartile, the speed-up above."""
    width = 0.36
    for shift, label, colour in ((-width / 2, "plain", "plain"), (width / 2, "speculative", "fast")):
        spreads = [getattr(one, label) for one in by_kind.values()]
        places = [index + shift for index in range(len(spreads))]
        below = [spread.middle - spread.low for spread in spreads]
        above = [spread.high - spread.middle for spread in spreads]
        axes.bar(places, [s.middle for s in spreads], width * 0.94, color=_STAND_IN[colour], label=label)
        style = {"fmt": "none", "ecolor": _STAND_IN["ink"], "elinewidth": 1, "capsize": 2.5, "alpha": 0.65}
        axes.errorbar(places, [s.middle for s in spreads], yerr=[below, above], **style)
    top = max(max(one.plain.high, one.speculative.high) for one in by_kind.values())
    for index, one in enumerate(by_kind.values()):
        height = max(one.plain.high, one.speculative.high) + 0.03 * top
        axes.text(index, height, f"{one.speedup:.2f}×", ha="center", va="bottom", weight="bold")
    axes.set_xticks(range(len(by_kind)), list(by_kind))
    axes.set_ylim(0, top * 1.16)
    axes.set_ylabel("tokens a second")
    axes.grid(axis="y", linewidth=0.7)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0)


def _acceptance(axes: Any, summary: Summary) -> None:
    """Acceptance by position of the draft: of this guess, and of all guesses up to it."""
    positions = [one.position for one in summary.acceptance]
    cumulative = [100 * one.cumulative for one in summary.acceptance]
    conditional = [100 * one.conditional for one in summary.acceptance]
    axes.bar(positions, cumulative, 0.62, color=_STAND_IN["fast"], label="all guesses so far right")
    line = {"color": _STAND_IN["ink"], "linewidth": 1.4, "marker": "o", "markersize": 4}
    axes.plot(positions, conditional, label="this one right, if all before were", **line)
    axes.set_ylim(0, 105)
    axes.set_xticks(positions if len(positions) <= 16 else positions[::4])
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted, %")
    axes.grid(axis="y", linewidth=0.7)
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0, fontsize=8.5, columnspacing=1
    )


def _cycle(axes: Any, costs: dict[str, CycleCost]) -> None:
    """One stacked bar a cycle; the page's table is its legend."""
    longest = max(cost.total_us for cost in costs.values())
    for row, cost in enumerate(costs.values()):
        left = 0.0
        for part, us in cost.by_part().items():
            colour = _STAND_IN[f"part-{PART_COLOURS.get(part, 'host')}"]
            axes.barh(row, us / 1e3, left=left / 1e3, height=0.62, color=colour)
            left += us
        axes.text((left + 0.01 * longest) / 1e3, row, f"{left / 1e3:.1f} ms", va="center", weight="bold")
    axes.set_yticks(range(len(costs)), list(costs))
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.1 / 1e3)
    axes.set_xlabel("milliseconds a cycle")
    axes.grid(axis="x", linewidth=0.7)


def _verify(axes: Any, summary: Summary) -> None:
    """What a verify step costs by its rows, with the ideal and the tokens a cycle that were really won."""
    rows = list(summary.verify_ratio)
    ratios = list(summary.verify_ratio.values())
    line = {"color": _STAND_IN["fast"], "linewidth": 2, "marker": "o", "markersize": 5}
    axes.plot(rows, ratios, label="measured", **line)
    axes.axhline(1, color=_STAND_IN["ideal"], linewidth=1.4, linestyle="--", label="ideal")
    if summary.overall:
        tokens = summary.overall.tokens_per_cycle
        style = {"color": _STAND_IN["plain"], "linewidth": 1.4, "linestyle": ":"}
        axes.axhline(tokens, label=f"won: {tokens:.2f} tokens a cycle", **style)
    for row, ratio in zip(rows, ratios, strict=True):
        above = {"textcoords": "offset points", "xytext": (0, 7), "ha": "center", "fontsize": 8.5}
        axes.annotate(f"{ratio:.2f}", (row, ratio), **above)
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows, [str(row) for row in rows])
    axes.minorticks_off()
    axes.set_ylim(0, max(*ratios, summary.overall.tokens_per_cycle if summary.overall else 1) * 1.2)
    axes.set_xlabel("rows of the verify step (1 + guesses checked)")
    axes.set_ylabel("cost, one row = 1")
    axes.grid(axis="y", linewidth=0.7)
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0, fontsize=8.5, columnspacing=1
    )
