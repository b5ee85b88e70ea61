"""One sentence for a person who never read about speculative decoding: does it pay here, and if not, why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.lab.diagnosis import Diagnosis
from slipstream.lab.summary import Comparison, Summary

Case = Literal["mismatch", "nothing", "plain only", "pays", "pays for some", "even", "too dear", "too poor"]

EXPLAINED = (
    "Speculative decoding guesses the next few words cheaply and lets the model check all of them at once; right "
    "guesses save time, wrong ones are thrown away, and the text stays the same."
)
"""Stands under the verdict wherever there is room for a second sentence."""

NOTICEABLE = 0.03
"""A speed-up or slow-down under 3 % is called even: nobody would notice it, and machines drift as much."""
ENOUGH = 2
"""One prompt has no spread that could say anything about the next one."""
GUESSABLE = 1.3
"""Tokens a cycle above which the guesses count as good: a verify step as cheap as a plain one would then pay well."""


@dataclass(frozen=True)
class Verdict:
    """The case, for programs, and the sentence, for people."""

    case: Case
    sentence: str

    @property
    def good(self) -> bool | None:
        """True where speculation pays, False where it hurts or is wrong, None where it makes no difference."""
        if self.case in ("pays", "pays for some"):
            return True
        return False if self.case in ("mismatch", "too dear", "too poor") else None


def verdict(diagnosis: Diagnosis, summary: Summary) -> Verdict:
    """The verdict on what was measured, an interrupted run included."""
    found = _judge(diagnosis, summary)
    if not diagnosis.partial:
        return found
    done = f"Interrupted after {len(diagnosis.results)} of {diagnosis.prompts_asked} prompts"
    return Verdict(
        found.case,
        f"{done}: nothing was measured yet." if found.case == "nothing" else f"{done}. {found.sentence}",
    )


def _judge(diagnosis: Diagnosis, summary: Summary) -> Verdict:
    wrong, asked = len(diagnosis.mismatches), len(diagnosis.results)
    if wrong:
        return Verdict(
            "mismatch",
            f"Do not trust these speeds: with speculation the model wrote a different text for {wrong} of {asked} "
            "prompts, which must never happen and is a defect of slipstream.",
        )
    if not diagnosis.speculative and summary.plain:
        return Verdict(
            "plain only",
            f"Without speculation the model writes {summary.plain.middle:.0f} tokens a second here; run with "
            "--draft ngram to see what guessing ahead would change.",
        )
    if summary.overall is None:
        return Verdict("nothing", "Nothing was measured: no prompt gave a text that could be timed.")
    return _compare(summary, summary.overall)


def _compare(summary: Summary, overall: Comparison) -> Verdict:
    faster = [kind for kind, one in summary.by_kind.items() if _pays(one)]
    slower = [kind for kind, one in summary.by_kind.items() if _hurts(one)]
    same = [kind for kind in summary.by_kind if kind not in faster and kind not in slower]
    if faster and (same or slower):
        gains = _join(
            [f"{kind} prompts {summary.by_kind[kind].speedup:.2f} times as fast" for kind in faster]
        )
        rest = [f"{_join(same)} prompts show no clear gain"] if same else []
        rest += [f"{_join(slower)} prompts even get slower"] if slower else []
        return Verdict(
            "pays for some",
            f"Speculative decoding pays for some kinds of work here: it writes exactly the same text for {gains}, "
            f"while {_join(rest)}.",
        )
    if _pays(overall):
        return Verdict(
            "pays",
            f"Speculative decoding pays here: it writes exactly the same text {overall.speedup:.2f} times as fast.",
        )
    if not _hurts(overall):
        return Verdict("even", _even(summary, overall))
    case, why = _why_not(summary, overall)
    return Verdict(
        case,
        f"Speculative decoding does not pay here: it writes the same text at only {overall.speedup:.2f} times the "
        f"speed, because {why}.",
    )


def _even(summary: Summary, overall: Comparison) -> str:
    if overall.prompts < ENOUGH:
        return (
            f"One prompt cannot tell whether speculative decoding pays here: it wrote exactly the same text "
            f"{overall.speedup:.2f} times as fast; measure more."
        )
    if abs(overall.speedup - 1) > NOTICEABLE:
        return (
            f"These {overall.prompts} prompts cannot tell whether speculative decoding pays here: it wrote exactly the "
            f"same text {overall.speedup:.2f} times as fast, but by chance alone that could be anything from "
            f"{overall.low:.2f} to {overall.high:.2f}; measure more prompts."
        )
    return (
        "Speculative decoding makes no noticeable difference here: it writes exactly the same text at "
        f"{overall.speedup:.2f} times the speed, because {_why_not(summary, overall)[1]}."
    )


def _why_not(summary: Summary, overall: Comparison) -> tuple[Literal["too dear", "too poor"], str]:
    """Poor guesses cannot pay at any price; good ones that do not pay are checked too dearly."""
    tokens, needed = overall.tokens_per_cycle, summary.cycle_ratio or 1.0
    if tokens < GUESSABLE:
        return "too poor", f"too few guesses are right: {_yield(tokens)}"
    return "too dear", (
        f"checking the guesses costs too much: a step takes {needed:.2f} times as long as a plain one, while "
        f"{_yield(tokens)}"
    )


def _yield(tokens: float) -> str:
    return f"each step writes {tokens:.2f} words or parts of words instead of 1"


def _pays(one: Comparison) -> bool:
    """Noticeably faster, and not by luck: the whole interval lies above 1, and of more than a few prompts."""
    return one.prompts >= ENOUGH and one.speedup > 1 + NOTICEABLE and one.low > 1


def _hurts(one: Comparison) -> bool:
    return one.prompts >= ENOUGH and one.speedup < 1 - NOTICEABLE and one.high < 1


def _join(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
