"""Conversations without a data set: an instruct model writes the user's turn too, and then answers it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slipstream.engine.state import State
from slipstream.errors import DataError, RequestError
from slipstream.target.family import Target
from slipstream.target.rows import Rows
from slipstream.target.tokenizer import Tokenizer

_SAID_BY_USER, _SAID_BY_ASSISTANT = "zq user text qz", "zq assistant text qz"
"""What no template writes by itself."""


@dataclass(frozen=True)
class Template:
    """The tokens of a chat template around the turns."""

    opening: list[int]
    """Up to where the user's text begins."""
    between: list[int]
    """From behind the token that ends the user's turn to where the answer begins."""
    end: int
    """The token that ends an answer."""
    user_end: int | None = None
    """The token that ends the user's turn, where it is another one."""
    stops: tuple[int, ...] = ()
    """Other tokens that end a text; an answer may end in one of them too."""


def template_of(tokenizer: Tokenizer) -> Template:
    """The template of any model whose chat template shows both texts once, in order. Raises DataError for others."""
    if not tokenizer.has_chat_template:
        raise DataError("the model has no chat template, so it cannot write both sides of a conversation")
    user = {"role": "user", "content": _SAID_BY_USER}
    try:
        prompt = tokenizer.render_chat([user])
        answer = {"role": "assistant", "content": _SAID_BY_ASSISTANT}
        whole = tokenizer.render_chat([user, answer], answering=False)
    except RequestError as error:
        raise DataError(str(error)) from None
    if prompt.count(_SAID_BY_USER) != 1 or whole.count(_SAID_BY_ASSISTANT) != 1:
        raise DataError("the model's chat template does not show each text once, so it cannot be taken apart")
    before, after = prompt.split(_SAID_BY_USER)
    opening, between = tokenizer.encode(before), tokenizer.encode(after)
    if not opening or not between:
        raise DataError("the model's chat template has nothing before or behind the user's text")
    eos = tokenizer.eos_ids
    ends = [token for token in tokenizer.encode(whole.split(_SAID_BY_ASSISTANT)[1]) if token in eos]
    if not ends and not eos:
        raise DataError("nothing in the model's chat template or settings says which token ends an answer")
    end = ends[0] if ends else eos[0]
    user_end = None if between[0] == end else between[0]
    return Template(opening, between[1:], end, user_end, tuple(token for token in eos if token != end))


def read_openings() -> list[str]:
    """The words with which a user's turn may begin, as people write."""
    text = (Path(__file__).parent / "openings.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line]


def draw_openings(
    openings: Sequence[Sequence[int]], count: int, free: float, draw: torch.Generator
) -> list[list[int]]:
    """For `count` conversations, how the user's turn begins: token ids; none for a share of `free`."""
    which = torch.randint(len(openings), (count,), generator=draw).tolist()
    is_free = (torch.rand(count, generator=draw) < free).tolist()
    return [[] if each_free else list(openings[each]) for each, each_free in zip(which, is_free, strict=True)]


@dataclass(frozen=True)
class Conversations:
    """S conversations: int64 tokens [S, P], and int64 [S] where each answer begins and where it ends (exclusive)."""

    tokens: Tensor
    begin: Tensor
    end: Tensor


@torch.inference_mode()
def make_conversations(
    target: Target,
    template: Template,
    count: int,
    *,
    user_tokens: int,
    answer_tokens: int,
    user_temperature: float,
    answer_temperature: Tensor,
    seed: int,
    device: str,
    openings: Sequence[Sequence[int]] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Conversations:
    """Makes `count` conversations at once, a token each in every step.

    user_tokens, answer_tokens: the longest turns; a turn is ended there. answer_temperature: float32 [count], 0 is
    greedy. openings: for each conversation the token ids with which the user's turn begins. Answers that were cut have
    no end-of-turn token; what stands behind an answer's end is no text. Raises DataError for an opening that leaves the
    user no word.
    """
    opening, answering = len(template.opening), len(template.between) + 1
    between = torch.tensor(template.between or [template.end], device=device)
    forced = _forced(openings, count, user_tokens, device)
    width = opening + user_tokens + len(template.between) + answer_tokens
    state = State.allocate(target.kv_layout(), count, width, 1, target.dtype, torch.device(device))
    slots = torch.arange(count, device=device)
    draw = torch.Generator(device=device).manual_seed(seed)
    state.text.tokens[:count, :opening] = torch.tensor(template.opening, device=device)
    state.text.length[:count] = opening
    if opening > 1:
        _prefill(target, state, slots, opening)
    user_end = template.end if template.user_end is None else template.user_end
    ends_text = torch.zeros(target.shape.vocab_size, dtype=torch.bool, device=device)
    ends_text[[template.end, *template.stops]] = True
    ends_turn = ends_text.clone()
    ends_turn[user_end] = True
    # Phases of a conversation: 0 the user writes, 1 .. n the template's tokens come, n + 1 the answer, n + 2 all done.
    phase = torch.zeros(count, dtype=torch.int64, device=device)
    begin, end = torch.zeros_like(phase), torch.full_like(phase, width)
    answer_temperature = answer_temperature.to(device)
    steps = width - opening
    for step in range(steps):
        at = opening + step
        is_user, is_answer = phase == 0, phase == answering
        temperature = torch.where(is_user, user_temperature, answer_temperature)
        rows = _root_rows(state, slots, at)
        hidden, _ = target.forward(rows, state.kv)
        tokens = _draw(target.logits(hidden[:, 0]), temperature, draw)
        is_over = is_user & ends_turn[tokens]
        if step >= user_tokens - 1:
            is_over = is_user
        if step < forced.shape[1]:
            is_forced = forced[:, step] >= 0
            tokens = torch.where(is_forced, forced[:, step], tokens)
            is_over = is_over & ~is_forced
        tokens = torch.where(is_over, user_end, tokens)
        in_template = (phase >= 1) & (phase < answering)
        tokens = torch.where(in_template, between[(phase - 1).clamp(0, len(between) - 1)], tokens)
        tokens = torch.where(phase > answering, template.end, tokens)
        state.text.tokens[:count, at] = tokens
        state.text.length[:count] = at + 1
        is_done = is_answer & (ends_text[tokens] | (at + 1 - begin >= answer_tokens))
        end = torch.where(is_done, at + 1, end)
        phase = phase + (in_template | is_over | is_done)
        begin = torch.where((phase == answering) & ~is_answer, at + 1, begin)
        if step % 32 == 0:
            progress(step, steps)
            if bool((phase > answering).all()):
                break
    begin = torch.where(begin == 0, end, begin)  # nothing was answered
    return Conversations(state.text.tokens[:count, :width], begin, end)


def _forced(openings: Sequence[Sequence[int]] | None, count: int, user_tokens: int, device: str) -> Tensor:
    """int64 [count, longest]: the tokens that the user's turn begins with, -1 where there is none."""
    if openings is None:
        return torch.empty(count, 0, dtype=torch.int64, device=device)
    if len(openings) != count:
        raise DataError(f"{len(openings)} openings came for {count} conversations")
    longest = max((len(each) for each in openings), default=0)
    if longest > user_tokens - 2:
        raise DataError(
            f"an opening of {longest} tokens leaves no word to a user's turn of {user_tokens}; allow longer turns"
        )
    padded = [[*each, *[-1] * (longest - len(each))] for each in openings]
    return torch.tensor(padded, dtype=torch.int64, device=device).view(count, longest)


def _root_rows(state: State, slots: Tensor, length: int) -> Rows:
    """The last token of every text, all of one length."""
    index = torch.full_like(slots, length - 1)[:, None]
    return Rows(
        tokens=state.text.tokens[slots[:, None], index],
        positions=index,
        kv_rows=state.table[slots[:, None], index],
        table=state.table,
        slots=slots,
        prefix=index[:, 0],
        extent=length,
    )


def _prefill(target: Target, state: State, slots: Tensor, length: int) -> None:
    """The KV of all texts' first length - 1 tokens."""
    index = torch.arange(length - 1, device=slots.device).expand(len(slots), -1)
    at = slots[:, None]
    rows = Rows(
        tokens=state.text.tokens[at, index],
        positions=index,
        kv_rows=state.table[at, index],
        table=state.table,
        slots=slots,
        prefix=torch.zeros_like(slots),
        extent=length - 1,
    )
    target.forward(rows, state.kv)


def _draw(logits: Tensor, temperature: Tensor, draw: torch.Generator) -> Tensor:
    """int64 [S]: sampled where the temperature is above 0; by the exponential race, which is Gumbel's without a log."""
    greedy = logits.argmax(-1)
    if not bool((temperature > 0).any()):
        return greedy
    probabilities = (logits / temperature.clamp_min(1e-3)[:, None]).softmax(-1)
    noise = torch.empty_like(probabilities).exponential_(generator=draw)
    return torch.where(temperature > 0, (probabilities / noise.clamp_min(1e-20)).argmax(-1), greedy)
