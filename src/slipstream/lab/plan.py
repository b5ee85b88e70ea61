"""The plan: where a cycle's time goes, what would save it, in which order, and what cannot work; as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.lab.case import Case
from slipstream.lab.cycle_cost import CycleCost
from slipstream.lab.optimisations import NOTICEABLE, EndState, Ranked, end_state, rank
from slipstream.lab.optimisations.base import EFFORTS

QUICK = ("flag", "setting")
SOON = (*QUICK, "patch")
_ENGINES = {"slipstream": "slipstream", "sglang": "SGLang", "vllm": "vLLM"}


@dataclass(frozen=True)
class Plan:
    """A case and what follows from it."""

    case: Case
    ranking: tuple[Ranked, ...]
    ends: tuple[tuple[str, EndState], ...]

    @property
    def helpful(self) -> list[Ranked]:
        """What is predicted to gain something."""
        return [one for one in self.ranking if one.after is not None and one.gain > NOTICEABLE]

    @property
    def open(self) -> list[Ranked]:
        """What may work and has no predicted gain."""
        return [one for one in self.ranking if one.after is not None and one.gain <= NOTICEABLE]

    @property
    def impossible(self) -> list[Ranked]:
        """What cannot work, or is in use already."""
        return [one for one in self.ranking if one.after is None]


def make_plan(case: Case) -> Plan:
    """Judges everything."""
    ranking = tuple(rank(case))
    kinds = (
        ("flags and settings only", QUICK),
        ("patches too", SOON),
        ("projects too", tuple(EFFORTS)),
    )
    return Plan(case, ranking, tuple((name, end_state(case, ranking, efforts)) for name, efforts in kinds))


def to_markdown(plan: Plan) -> str:
    """The whole plan."""
    parts = [
        f"# Plan: a fast verify step for {plan.case.model} on {plan.case.name}\n",
        _state(plan.case),
        _ranking(plan),
        _items(plan.helpful),
        _open(plan.open),
        _impossible(plan.impossible),
        _ends(plan),
        _rests_on(plan.case),
    ]
    return "\n".join(parts)


def breakdown(plain: CycleCost, fast: CycleCost) -> str:
    """The two cycles side by side, each collective told apart into wire and skew; a Markdown table."""
    rows: dict[str, list[str]] = {}
    for column, cost in enumerate((plain, fast)):
        for name, us in split(cost).items():
            rows.setdefault(name, ["", ""])[column] = f"{us / 1e3:.2f}"
    order = {name: index for index, name in enumerate([*split(fast), *split(plain)])}
    lines = [(name, *rows[name]) for name in sorted(rows, key=lambda name: order[name])]
    lines.append(("**together**", *(f"**{cost.total_us / 1e3:.2f}**" for cost in (plain, fast))))
    rows_of = [f"{cost.rows:g} row{'s' * (cost.rows != 1)}" if cost.rows else "" for cost in (plain, fast)]
    head = ("milliseconds", f"plain token, {rows_of[0]}", f"speculative cycle, {rows_of[1]}")
    return table(head, lines)


def split(cost: CycleCost) -> dict[str, float]:
    """Microseconds by part, wire and skew of collectives apart."""
    result: dict[str, float] = {}
    for part in cost.parts:
        name = part.phase if part.name == part.phase else f"{part.phase}: {part.name.replace('_', '-')}"
        traffic = part.traffic
        if (
            part.kind == "collective"
            and traffic
            and traffic.wire_us is not None
            and traffic.skew_us is not None
        ):
            count = f" ({part.count:g} x {(traffic.bytes or 0) / 1024:.4g} KiB)" if part.count else ""
            pieces = {
                f"{name}, wire{count}": traffic.wire_us,
                f"{name}, waiting for slow ranks": traffic.skew_us,
            }
        else:
            pieces = {name: part.us}
        for key, us in pieces.items():
            if us > 0:
                result[key] = result.get(key, 0.0) + us
    return result


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are set right."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _state(case: Case) -> str:
    needed = case.acceptance_needed
    chance = "no acceptance is enough" if needed is None else f"an acceptance of {needed:.2f} a position"
    known = "measured" if case.acceptance_is_known else "assumed"
    pays = "pays" if case.fast_speed > case.plain_speed else "does not pay"
    setup = f"{case.fast.tp} rank{'s' * (case.fast.tp > 1)}, {case.fast.context:,} tokens of context, {_draft(case)}"
    return "\n".join(
        [
            "## Where things stand\n",
            f"{case.model} on {case.name}: {setup}.\n",
            breakdown(case.plain_cost, case.fast_cost),
            f"A cycle of {case.fast_cost.total_us / 1e3:.1f} ms against {case.plain_cost.total_us / 1e3:.1f} ms "
            "a plain "
            f"token: break-even at {case.tokens_needed:.2f} tokens a cycle, for which {chance} is needed. At "
            f"{case.acceptance:.2f} ({known}) a cycle yields {case.tokens:.2f} tokens: {case.fast_speed:.0f} tokens a "
            f"second with speculation, {case.plain_speed:.0f} without. Speculation {pays}.\n",
        ]
    )


def _draft(case: Case) -> str:
    return f"{case.fast.draft} drafting a {case.draft_shape.name}" if case.fast.drafted else "no drafting"


def _ranking(plan: Plan) -> str:
    rows = [
        (
            f"{number}. {one.item.title}",
            one.feasible.answer,
            one.item.effort,
            f"{one.after.plain_speed:.0f}",
            f"{one.after.fast_speed:.0f}",
            f"{one.after.fast_cost.total_us / 1e3:.1f}",
            "none is enough" if one.after.acceptance_needed is None else f"{one.after.acceptance_needed:.2f}",
        )
        for number, one in enumerate(plan.helpful, 1)
        if one.after is not None
    ]
    head = (
        "what",
        "can it work",
        "effort",
        "plain, tokens/s",
        "speculative, tokens/s",
        "cycle, ms",
        "acceptance needed",
    )
    now = plan.case
    efforts = "; ".join(f"{name}: {means}" for name, (_, means) in EFFORTS.items())
    return (
        "## What would help, by impact and effort\n\n"
        f"Each alone, against {now.plain_speed:.0f} tokens a second plain and {now.fast_speed:.0f} speculative "
        "today. A "
        "cheaper all-reduce speeds plain decoding as well, so the acceptance needed is worked out anew each time. The "
        "order is by the gain of both speeds together (geometric mean, logarithm) over the effort.\n\n"
        f"{table(head, rows) if rows else 'Nothing is predicted to help.'}\nEffort: {efforts}.\n"
    )


def _items(ranking: Sequence[Ranked]) -> str:
    return "## How to do it\n\n" + "\n".join(_item(number, one) for number, one in enumerate(ranking, 1))


def _item(number: int, one: Ranked) -> str:
    item, after = one.item, one.after
    assert after is not None
    lines = [f"### {number}. {item.title} (`{item.name}`)\n", f"{item.gain}\n"]
    lines.append(
        f"- **Predicted:** a plain token of {after.plain_cost.total_us / 1e3:.1f} ms, a cycle of "
        f"{after.fast_cost.total_us / 1e3:.1f} ms: {after.plain_speed:.0f} and {after.fast_speed:.0f} tokens a second."
    )
    lines.append(f"- **Can it work:** {one.feasible.answer}: {one.feasible.because}.")
    if item.needs_first and one.feasible.answer == "untested":
        lines.append(f"- **Find out first:** {item.needs_first}.")
    lines += [f"- **In {_ENGINES[engine]}:** {how}." for engine, how in item.how.items()]
    lines += [f"- **Risk:** {risk}" for risk in item.risks]
    lines.append(f"- **Measure:** {item.measure}")
    if item.sources:
        lines.append(f"- **Known from:** {'; '.join(item.sources)}.")
    return "\n".join(lines) + "\n"


def _open(ranking: Sequence[Ranked]) -> str:
    if not ranking:
        return ""
    rows = [f"- **{one.item.title}** ({one.item.effort}): {one.feasible.because}." for one in ranking]
    return "## What may help, without a prediction\n\n" + "\n".join(rows) + "\n"


def _impossible(ranking: Sequence[Ranked]) -> str:
    if not ranking:
        return ""
    rows = [f"- **{one.item.title}**: {one.feasible.because}." for one in ranking]
    return "## What cannot work here, and why\n\n" + "\n".join(rows) + "\n"


def _ends(plan: Plan) -> str:
    rows = []
    for name, end in plan.ends:
        case = end.case
        needed = case.acceptance_needed
        rows.append(
            (
                name,
                ", ".join(end.applied) or "nothing",
                f"{case.plain_cost.total_us / 1e3:.1f}",
                f"{case.fast_cost.total_us / 1e3:.1f}",
                f"{case.plain_speed:.0f}",
                f"{case.fast_speed:.0f}",
                "none is enough" if needed is None else f"{needed:.2f}",
            )
        )
    head = (
        "with",
        "applied, in this order",
        "plain token, ms",
        "cycle, ms",
        "plain, tokens/s",
        "speculative, tokens/s",
    )
    return (
        "## The expected end state\n\n"
        + table((*head, "acceptance needed"), rows)
        + "\nApply one at a time, in this order; after each measure both kinds of decoding and the acceptance "
        "on the same "
        "prompts, keep it only if it is surely faster, and write it down (slipstream try and slipstream ledger "
        "do that). "
        "A fall of the acceptance means a broken all-reduce until the contrary is shown.\n"
    )


def _rests_on(case: Case) -> str:
    said = dict.fromkeys([*case.plain_cost.evidence, *case.fast_cost.evidence, *case.machine.notes])
    return "## What this rests on\n\n" + "\n".join(f"- {line}" for line in said) + "\n"
