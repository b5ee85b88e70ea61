"""transformers' own `generate`: transformers_worker.py FOLDER DTYPE [prompt_lookup_num_tokens]"""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
from protocol import THREADS, Emit, Generate, serve


class Arrivals:
    """A streamer that passes each group of tokens on; `generate` shows it the prompt first."""

    def __init__(self, emit: Emit) -> None:
        self.emit, self.seen_prompt = emit, False

    def put(self, tokens: torch.Tensor) -> None:
        if self.seen_prompt:
            self.emit(tokens.flatten().tolist())
        self.seen_prompt = True

    def end(self) -> None:
        pass


def load() -> tuple[str, Generate]:
    folder, dtype, *lookup = sys.argv[1:]
    torch.set_num_threads(THREADS)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None  # every generation runs its full length
    options: dict[str, Any] = {"prompt_lookup_num_tokens": int(lookup[0])} if lookup else {}

    def generate(prompt: list[int], max_new_tokens: int, emit: Emit) -> None:
        ids = torch.tensor([prompt])
        request = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": max_new_tokens,
            "do_sample": False,
        }
        model.generate(ids, **request, **options, streamer=Arrivals(emit))

    return f"transformers {transformers.__version__}", generate


serve(load)
