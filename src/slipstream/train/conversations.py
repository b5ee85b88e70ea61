"""Conversations without a data set: an instruct model writes the user's turn too, and then answers it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.engine.state import State
from slipstream.target.family import Target
from slipstream.target.rows import Rows


@dataclass(frozen=True)
class Template:
    """The tokens of a chat template around the turns."""

    opening: list[int]
    """Up to where the user's text begins."""
    between: list[int]
    """From the end of the user's text to where the answer begins."""
    end: int
    """The token that ends a turn."""


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
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Conversations:
    """Makes `count` conversations at once, a token each in every step.

    user_tokens, answer_tokens: the longest turns; a turn is ended there. answer_temperature: float32 [count], 0 is
    greedy. Answers that were cut have no end-of-turn token.
    """
    opening, between = len(template.opening), torch.tensor(template.between, device=device)
    width = opening + user_tokens + len(template.between) + answer_tokens
    state = State.allocate(target.kv_layout(), count, width, 1, target.dtype, torch.device(device))
    slots = torch.arange(count, device=device)
    draw = torch.Generator(device=device).manual_seed(seed)
    state.text.tokens[:count, :opening] = torch.tensor(template.opening, device=device)
    state.text.length[:count] = opening
    _prefill(target, state, slots, opening)
    # Phases of a conversation: 0 the user writes, 1 .. n the template's tokens come, n + 1 the answer, n + 2 all done.
    answering = len(template.between) + 1
    phase = torch.zeros(count, dtype=torch.int64, device=device)
    begin, end = torch.zeros_like(phase), torch.full_like(phase, width)
    steps = width - opening
    for step in range(steps):
        at = opening + step
        temperature = torch.where(phase == 0, user_temperature, answer_temperature.to(device))
        rows = _root_rows(state, slots, at)
        hidden, _ = target.forward(rows, state.kv)
        tokens = _draw(target.logits(hidden[:, 0]), temperature, draw)
        is_last = (phase == 0) & (torch.tensor(step, device=device) >= user_tokens - 1)
        tokens = torch.where(is_last, template.end, tokens)
        in_template = (phase >= 1) & (phase < answering)
        tokens = torch.where(in_template, between[(phase - 1).clamp(0, len(between) - 1)], tokens)
        tokens = torch.where(phase > answering, template.end, tokens)
        state.text.tokens[:count, at] = tokens
        state.text.length[:count] = at + 1
        has_ended = tokens == template.end
        begin = torch.where(in_template & (phase == answering - 1), at + 1, begin)
        end = torch.where((phase == answering) & has_ended, at + 1, end)
        moves = in_template | (has_ended & ((phase == 0) | (phase == answering)))
        phase = phase + moves
        if step % 32 == 0:
            progress(step, steps)
            if bool((phase > answering).all()):
                break
    begin = torch.where(begin == 0, end, begin)  # nothing was answered
    return Conversations(state.text.tokens[:count, :width], begin, end)


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
