"""transformers' `generate` as a run that hands on its tokens as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.peer_workers.protocol import Emit

Run = Callable[[Emit], object]


class Arrivals:
    """A streamer of transformers that passes each group of tokens on; `generate` shows it the prompt first."""

    def __init__(self, emit: Emit) -> None:
        self.emit, self.seen_prompt = emit, False

    def put(self, tokens: torch.Tensor) -> None:
        if self.seen_prompt:
            self.emit(tokens.flatten().tolist())
        self.seen_prompt = True

    def end(self) -> None:
        pass


def theirs(model: Any, ids: Sequence[int], count: int, **options: int) -> Run:
    """Greedy generation of `count` tokens."""
    prompt = torch.tensor([ids])
    fixed = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": count, "do_sample": False}

    def run(emit: Emit) -> None:
        model.generate(prompt, **fixed, **options, streamer=Arrivals(emit))

    return run
