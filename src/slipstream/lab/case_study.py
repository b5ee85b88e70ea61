"""docs/case-study.md: the reference case end to end, in our figures. Made by `slipstream plan --case-study`."""

from __future__ import annotations

from slipstream.lab import cases
from slipstream.lab.break_even import Costs, acceptance_needed, chain, speed_up, verify_us_that_pays
from slipstream.lab.case import Case
from slipstream.lab.plan import Plan, breakdown, make_plan, table
from slipstream.lab.predict import VALUE_BYTES
from slipstream.machine.machine import Machine

HEALTHY = "aiconfigurator"
"""The machine's NCCL curve of a box whose transport is in order."""


def case_study() -> str:
    """The page, as Markdown."""
    case = cases.reference_case()
    plan = make_plan(case)
    return "\n".join(
        [
            "# Case study: Kimi-K2.5 on eight GPUs over PCIe\n",
            "Made by `slipstream plan --case-study`; do not edit. Nothing here was measured on such a box by "
            "slipstream: "
            "the story's own figures and public measurements go in, predictions come out. Ranges of engine "
            "versions are "
            "in the plan, `slipstream plan --machine 8x-rtx-pro-6000-pcie5 --shape kimi-k2.5 --tp 8 --eager-verify "
            "--draft-ms 3.4 --acceptance 0.38 --context 4096`.\n",
            _story(),
            _break_even(),
            _told_apart(case),
            _transports(case),
            _healthy(case),
            _order(plan),
            _lesson(plan),
        ]
    )


def _story() -> str:
    return (
        "## What was seen\n\n"
        f"Plain decoding took {cases.PLAIN_MS} ms a token, in a CUDA graph. A verify step took about "
        f"{cases.VERIFY_MS:.0f} "
        f"ms, launched kernel by kernel: about {cases.NCCL_MS:.0f} ms of NCCL in {cases.ALL_REDUCES} "
        "all-reduces, about 5 "
        "ms of compute. EAGLE-3 trained from scratch made 60 tokens a second, n-grams 41, plain decoding 82. A "
        "fine-tuned head accepted 38 % where about 75 % are needed. How many rows the verify step had is not on "
        "record; "
        f"with chains of {cases.DRAFTED} it is {cases.DRAFTED + 1}, and that is what is used below.\n"
    )


def _break_even() -> str:
    plain_us, verify_us = cases.PLAIN_MS * 1e3, cases.VERIFY_MS * 1e3
    shape = chain(cases.DRAFTED)
    lines = []
    for name, draft_us in (("a free draft", 0.0), (f"{cases.DRAFT_MS} ms of drafting", cases.DRAFT_MS * 1e3)):
        costs = Costs(plain_us, verify_us, cases.DRAFTED + 1, draft_us, cases.DRAFTED)
        cycle_us = costs.cycle_us(shape.drafted, shape.depth)
        needed = acceptance_needed(cycle_us / plain_us, cases.DRAFTED)
        ratio = speed_up(costs, shape, cases.ACCEPTANCE)
        lines.append(
            (
                name,
                f"{cycle_us / plain_us:.2f}",
                "none" if needed is None else f"{needed:.2f}",
                f"{ratio / plain_us * 1e6:.0f}",
                f"{verify_us_that_pays(costs, shape, cases.ACCEPTANCE) / 1e3:.1f}",
            )
        )
    head = (
        "with",
        "tokens a cycle needed",
        "acceptance needed",
        "tokens/s at 0.38",
        "verify step at which 0.38 pays, ms",
    )
    drafted_cycle_s = (verify_us + cases.DRAFT_MS * 1e3) / 1e6
    return (
        f"## Break-even\n\nA chain of {cases.DRAFTED}:\n\n{table(head, lines)}\n"
        f"60 tokens a second are {60 * drafted_cycle_s:.2f} tokens a cycle; 41 with n-grams, whose draft is free, "
        f"{41 * verify_us / 1e6:.2f}.\n"
    )


def _told_apart(case: Case) -> str:
    plain, fast = case.plain_cost.total_us / 1e3, case.fast_cost.phase_us("verify") / 1e3
    return (
        "## Where the time goes, predicted\n\n"
        f"{breakdown(case.plain_cost, case.fast_cost)}\n"
        f"Predicted against seen: {plain:.1f} ms for a plain token against {cases.PLAIN_MS} "
        f"({100 * (plain / cases.PLAIN_MS - 1):+.0f} %), {fast:.1f} ms for the verify step of {case.fast.rows} rows "
        f"against {cases.VERIFY_MS:.0f} ({100 * (fast / cases.VERIFY_MS - 1):+.0f} %).\n\n"
        "One curve cannot explain both: 122 all-reduces of 205 us are more than a whole plain token. The plain "
        "token runs "
        "in a graph and leaves about 60 us for each, which is what NCCL took on another box of this kind. On that "
        "reading most of the eager step's 205 us are not bytes on a wire: they are ranks waiting for the one "
        "whose launches come last. The "
        "launches themselves hide behind that wait: "
        f"{_launches_ms(case):.1f} ms of them a pass, against {fast:.1f} ms in which the GPUs have something to "
        "do or to "
        "wait for. Expert layers are the other half of the story: "
        f"{case.fast.rows} rows reach up to {case.shape.distinct_experts(case.fast.rows):.0f} of "
        f"{case.shape.experts.count if case.shape.experts else 0} experts a layer, one row 8.\n"
    )


def _launches_ms(case: Case) -> float:
    ops = sum(
        part.count or 0 for part in case.fast_cost.parts if part.phase == "verify" and part.kind == "compute"
    )
    return ops * case.machine.launch_us(captured=False).value / 1e3


def _transports(case: Case) -> str:
    """How far each known transport alone would go, by rows."""
    l40s = Machine.load("8x-l40s-pcie4")
    known = [
        ("b12x, 8 RTX PRO 6000, eager", case.machine, "b12x"),
        ("aiconfigurator, 8 RTX PRO 6000", case.machine, HEALTHY),
        ("aiconfigurator, 8 L40S on PCIe 4", l40s, HEALTHY),
        ("SGLang's source, 8 SM120, eager", case.machine, "sglang"),
    ]
    rows = []
    for name, machine, setting in known:
        curve = machine.all_reduce_curves("nccl", case.fast.tp, setting)[0]
        size = case.shape.hidden_size * VALUE_BYTES[case.fast.dtype]
        waits = [curve.us(size * count) * cases.ALL_REDUCES / 1e3 for count in (1, 4, 6)]
        rows.append((name, *(f"{ms:.1f}" for ms in waits), f"{cases.NCCL_MS - waits[1]:+.1f}"))
    head = ("transport", "1 row, ms", "4 rows, ms", "6 rows, ms", "left of 25 ms at 4 rows")
    return (
        f"### What else would fit\n\n{cases.ALL_REDUCES} all-reduces on each transport that was measured in public:\n\n"
        f"{table(head, rows)}\n"
        "A plain token leaves at most about 7.5 ms for one row, which rules the last out and fits the others; for the "
        "verify step the L40S's curve alone comes near 25 ms at 6 rows, and leaves a third of it at 4. A box "
        "with a bad "
        "transport and one with late launches look alike in such a figure. What tells them apart costs five "
        "minutes: the "
        "all-reduce alone, eager and in a graph, at 14 and 56 KiB (slipstream allreduce, or nccl-tests with and "
        "without "
        "-G 1), and a trace of all ranks (slipstream trace), which gives the shortest rank's time and the wait apart. "
        "If the eager figure stays at 205 us when all ranks start together, it is the wire: the transport and the PCIe "
        "all-reduce then save in the verify step what is credited to the graph here.\n"
    )


def _healthy(case: Case) -> str:
    healthy = case.both(setting=HEALTHY, captured=True, draft_captured=True)
    return (
        "## A healthy PCIe 5 transport, everything in graphs\n\n"
        f"{breakdown(healthy.plain_cost, healthy.fast_cost)}\n"
        f"{healthy.plain_speed:.0f} tokens a second plain, {healthy.fast_speed:.0f} speculative at 0.38; break-even at "
        f"{healthy.tokens_needed:.2f} tokens a cycle"
        + _chance(healthy)
        + ". The same repair speeds the baseline, so it helps speculation less than the verify step alone would "
        "suggest.\n"
    )


def _chance(case: Case) -> str:
    needed = case.acceptance_needed
    return ", which no acceptance gives" if needed is None else f", an acceptance of {needed:.2f}"


def _order(plan: Plan) -> str:
    rows = [
        (
            f"{number}. {one.item.title}",
            one.feasible.answer,
            one.item.effort,
            f"{one.after.plain_speed:.0f}",
            f"{one.after.fast_speed:.0f}",
        )
        for number, one in enumerate(plan.helpful, 1)
        if one.after is not None
    ]
    impossible = "\n".join(f"- **{one.item.title}**: {one.feasible.because}." for one in plan.impossible)
    return (
        "## What would help, by impact and effort\n\n"
        f"Each alone; today {plan.case.plain_speed:.0f} and {plan.case.fast_speed:.0f} tokens a second.\n\n"
        f"{table(('what', 'can it work', 'effort', 'plain, tokens/s', 'speculative, tokens/s'), rows)}\n"
        f"What cannot work, or is not for this case:\n\n{impossible}\n"
    )


def _lesson(plan: Plan) -> str:
    rows = []
    for name, end in plan.ends:
        needed = end.case.acceptance_needed
        rows.append(
            (
                name,
                ", ".join(end.applied),
                f"{end.case.plain_speed:.0f}",
                f"{end.case.fast_speed:.0f}",
                "none" if needed is None else f"{needed:.2f}",
            )
        )
    head = ("with", "applied, in this order", "plain, tokens/s", "speculative, tokens/s", "acceptance needed")
    return (
        f"## Where it ends\n\n{table(head, rows)}\n"
        "A cheap all-reduce makes plain decoding the first winner, and the rows of the verify step, each with "
        "experts of "
        "its own, the next cost. From there on a better drafter is what speculation needs.\n"
    )
