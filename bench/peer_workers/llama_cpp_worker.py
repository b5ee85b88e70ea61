"""llama.cpp through llama-cpp-python: llama_cpp_worker.py FILE.gguf [prompt lookup's num_pred_tokens]"""

from __future__ import annotations

import sys

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from protocol import THREADS, Emit, Generate, serve


def load() -> tuple[str, Generate]:
    file, *lookup = sys.argv[1:]
    llama = llama_cpp.Llama(
        file,
        n_ctx=4096,
        n_threads=THREADS,
        n_threads_batch=THREADS,
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=int(lookup[0])) if lookup else None,
        verbose=False,
    )

    def generate(prompt: list[int], max_new_tokens: int, emit: Emit) -> None:
        llama.reset()
        tokens = llama.generate(prompt, temp=0.0, repeat_penalty=1.0)
        for _ in range(max_new_tokens):
            emit([next(tokens)])

    return f"llama-cpp-python {llama_cpp.__version__}", generate


serve(load)
