"""Training data without a data set: whole conversations by the target, batch after batch, as lines of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from slipstream.errors import DataError
from slipstream.target.load import LoadedModel
from slipstream.train.chat import Spoken
from slipstream.train.conversations import (
    Conversations,
    Template,
    draw_openings,
    make_conversations,
    read_openings,
    template_of,
)
from slipstream.train.samples import LOOPING, loops
from slipstream.train.writing import SEEDS, Batch, Tally, Wishes, line_of

USER_TEMPERATURE = 0.9
TEMPLATE_ROOM = 1024
"""The longest system prompt and what else a chat template puts around the turns, in tokens."""


def invent(
    model: LoadedModel,
    wishes: Wishes,
    batch: int,
    device: str,
    *,
    begin: int = 0,
    count: int | None = None,
    progress: Callable[[float], None] = lambda done: None,
) -> Iterator[Batch]:
    """Conversations that the model writes both sides of, `batch` at once; without a count, without an end.

    begin: the first conversation; those before it are as if they had been made. progress: is told how many are made,
    parts included. The model must be loaded for both turns and TEMPLATE_ROOM. Raises DataError for a model that cannot
    do it.
    """
    template = template_of(model.tokenizer)
    around = len(template.opening) + len(template.between)
    longest, limit = around + wishes.user_tokens + wishes.max_new_tokens, model.shape.max_positions
    if around > TEMPLATE_ROOM or longest > limit:
        raise DataError(
            f"{around} tokens of the chat template, {wishes.user_tokens} of the user and {wishes.max_new_tokens} of the"
            f" answer do not fit; the model goes up to {limit} tokens, its template may take {TEMPLATE_ROOM}"
        )
    openings = [model.tokenizer.encode(each) for each in read_openings()]
    openings = [each for each in openings if 0 < len(each) <= wishes.user_tokens // 2] or [[]]
    while count is None or begin < count:
        number = begin // batch
        first, seed = number * batch, (wishes.seed * SEEDS + number) % 2**63
        draw = torch.Generator().manual_seed(seed)
        is_greedy = torch.rand(batch, generator=draw) < wishes.greedy_share
        made = make_conversations(
            model.target,
            template,
            batch,
            user_tokens=wishes.user_tokens,
            answer_tokens=wishes.max_new_tokens,
            user_temperature=USER_TEMPERATURE,
            answer_temperature=torch.where(is_greedy, 0.0, wishes.temperature),
            seed=seed,
            device=device,
            openings=draw_openings(openings, batch, wishes.free_share, draw),
            progress=lambda done, total, first=first: progress(first + batch * done / total),  # type: ignore[misc]
        )
        end = first + batch if count is None else min(first + batch, count)
        yield _invented_lines(model, template, wishes, made, range(begin, end), first)
        progress(end)
        begin = end


def _invented_lines(
    model: LoadedModel, template: Template, wishes: Wishes, made: Conversations, indices: range, first: int
) -> Batch:
    tokenizer, tally = model.tokenizer, Tally()
    tokens, begins, ends = made.tokens.tolist(), made.begin.tolist(), made.end.tolist()
    lines = []
    for index in indices:
        begin, end = begins[index - first], ends[index - first]
        row = tokens[index - first][:end]
        user = tokenizer.decode(row[len(template.opening) : begin - len(template.between) - 1])
        is_whole = row[-1] in (template.end, *template.stops)
        answer = tokenizer.decode(row[begin : end - is_whole])
        if not user.strip() or not answer.strip():
            tally.empty += 1
        elif not wishes.keep_loops and loops(row[begin:]) > LOOPING:
            tally.loops += 1
        else:
            messages = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
            spoken = Spoken(row, [(begin, end)])
            lines.append(line_of(str(index), index, messages, spoken, "stop" if is_whole else "length"))
            tally.answer_tokens += end - begin
            tally.cut += not is_whole
    tally.conversations, tally.lines = len(indices), len(lines)
    return lines, tally
