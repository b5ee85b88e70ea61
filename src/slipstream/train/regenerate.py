"""New answers in given conversations, by the target itself, so that a drafter learns what it really says."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.engine.engine import Engine
from slipstream.engine.request import Completion, SamplingParams
from slipstream.errors import RequestError
from slipstream.train.chat import Spoken
from slipstream.train.dialects import Message, read_lines
from slipstream.train.samples import LOOPING, loops
from slipstream.train.writing import SEEDS, Batch, Tally, Wishes, line_of

_GROUP = 2
"""Conversations that are answered together, by requests that run at once: slots that are free early are used again."""


@dataclass
class Talk:
    """A conversation whose answers are written anew."""

    index: int
    name: str
    turns: list[list[Message]]
    """What is said before each answer."""
    said: list[Message] = field(default_factory=list)
    samples: list[tuple[Spoken, str, int]] = field(default_factory=list)
    """Each with how its last answer ended, and how much of `said` it covers."""

    def lines(self) -> list[dict[str, Any]]:
        """One, or several where the history was cut into other tokens than those that were written (see `chat`)."""
        return [
            line_of(self.name, self.index, self.said[:end], spoken, finish)
            for spoken, finish, end in self.samples
        ]


def read_talks(path: Path) -> list[Talk]:
    """The conversations of a file, without their answers.

    An answer that no user asked for is left out, and a last question is answered though the file does not. Raises
    DataError for a broken line.
    """
    talks = []
    for index, line in enumerate(read_lines(path, prompts=True)):
        turns: list[list[Message]] = []
        turn: list[Message] = []
        for message in [*line.messages, {"role": "assistant", "content": ""}]:
            if message["role"] != "assistant":
                turn.append(message)
            elif any(each["role"] == "user" for each in turn):
                turns.append(turn)
                turn = []
        talks.append(Talk(index, str(index) if line.id is None else line.id, turns))
    return talks


def regenerate(
    engine: Engine, talks: Sequence[Talk], wishes: Wishes, batch: int, *, begin: int = 0, skip: int = 0
) -> Iterator[Batch]:
    """New answers for every turn of given conversations, each after what the engine answered before.

    batch: requests that run at once. begin: the first conversation, of which the first `skip` lines are left out.
    """
    for first in range(begin, len(talks), _GROUP * batch):
        group, tally = talks[first : first + _GROUP * batch], Tally()
        going = list(group)
        while going:
            going = _next_turn(engine, going, wishes, tally)
        lines = [line for talk in group for line in talk.lines()][skip if first == begin else 0 :]
        tally.conversations, tally.lines = len(group), len(lines)
        tally.answer_tokens = sum(end - start for line in lines for start, end in line["loss"])
        yield lines, tally


def _next_turn(engine: Engine, talks: Sequence[Talk], wishes: Wishes, tally: Tally) -> list[Talk]:
    """Answers the next turn of every conversation; returns those that go on."""
    asked: list[tuple[Talk, list[int]]] = []
    for talk in talks:
        if not talk.turns:
            continue
        talk.said += talk.turns.pop(0)
        try:
            prompt = engine.tokens_of(talk.said)
        except RequestError:
            prompt = []
        if not prompt:
            tally.refused += 1
        elif len(prompt) + wishes.max_new_tokens > engine.max_length:
            tally.too_long += 1
        else:
            asked.append((talk, prompt))
    params = [_params(talk, wishes) for talk, _ in asked]
    answers = engine.generate_batch([prompt for _, prompt in asked], params) if asked else []
    return [
        talk
        for (talk, prompt), answer in zip(asked, answers, strict=True)
        if _take(talk, prompt, answer, wishes, tally)
    ]


def _params(talk: Talk, wishes: Wishes) -> SamplingParams:
    is_greedy = random.Random(f"{wishes.seed} {talk.index}").random() < wishes.greedy_share
    seed = ((wishes.seed * SEEDS + talk.index) * SEEDS + len(talk.said)) % 2**63
    return SamplingParams(wishes.max_new_tokens, 0.0 if is_greedy else wishes.temperature, seed=seed)


def _take(talk: Talk, prompt: list[int], answer: Completion, wishes: Wishes, tally: Tally) -> bool:
    """Adds an answer to its conversation; False when the conversation ends here."""
    if not wishes.keep_loops and loops(answer.token_ids) > LOOPING:
        tally.loops += 1
        return False
    if not answer.text.strip():
        tally.empty += 1
        return False
    talk.said.append({"role": "assistant", "content": answer.text})
    spoken = talk.samples.pop()[0] if talk.samples and talk.samples[-1][0].follows(prompt) else Spoken()
    spoken.add(prompt, answer.token_ids)
    talk.samples.append((spoken, answer.finish_reason, len(talk.said)))
    tally.cut += answer.finish_reason == "length"
    return answer.finish_reason == "stop"
