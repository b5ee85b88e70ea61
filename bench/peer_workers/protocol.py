"""What every worker shares: one JSON object a line on stdin, one answer a line on stdout, until stdin ends.

    -> {"prompt": [token ids], "max_new_tokens": 128}      greedy, end-of-text ignored
    <- {"tokens": [ids], "first_tokens": 1, "decode_s": 1.2, "total_s": 1.3}        or {"error": "one line"}

Before any request, a loaded worker says {"engine": name and version}. `decode_s` runs from the arrival of the first
tokens (`first_tokens` of them: speculation may bring several at once) to that of the last.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))

Emit = Callable[[list[int]], None]
"""Takes the new tokens in the groups in which the engine hands them out, as soon as it does."""

Generate = Callable[[list[int], int, Emit], None]
"""(prompt, max_new_tokens, emit)"""


def measure(generate: Generate, prompt: list[int], max_new_tokens: int) -> dict[str, Any]:
    """Runs one generation and notes when the first and the last tokens arrived."""
    tokens: list[int] = []
    arrivals: list[tuple[float, int]] = []

    def emit(group: list[int]) -> None:
        if group:
            tokens.extend(group)
            arrivals.append((time.perf_counter(), len(group)))

    start = time.perf_counter()
    generate(prompt, max_new_tokens, emit)
    (first, first_tokens), (last, _) = arrivals[0], arrivals[-1]
    return {
        "tokens": tokens,
        "first_tokens": first_tokens,
        "decode_s": last - first,
        "total_s": last - start,
    }


def serve(load: Callable[[], tuple[str, Generate]]) -> None:
    """Loads the engine, then answers. Ends, with everything that the engine started, when the caller is gone."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever an engine prints must not mix with the answers
    try:
        name, generate = load()
        print(json.dumps({"engine": name}), file=answers)
        for line in sys.stdin:
            request = json.loads(line)
            print(json.dumps(measure(generate, request["prompt"], request["max_new_tokens"])), file=answers)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}".splitlines()[0]}), file=answers)
        raise
    finally:
        sys.stderr.flush()
        if os.getpgrp() == os.getpid():  # a group that the caller made for us: our children and nobody else
            os.killpg(0, signal.SIGKILL)
