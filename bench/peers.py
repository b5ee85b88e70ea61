"""Other engines on the same weights, prompts, dtype and thread count, each in a process of its own, measured in turn.

`bash bench/peers_setup.sh` makes their environment once, `make bench-peers` measures them beside slipstream.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from bench.export_hf import export, gguf_file

ROOT = Path(__file__).resolve().parent.parent
WORKERS = Path(__file__).resolve().parent / "peer_workers"
THEIRS = ROOT / ".venv-peers"


@dataclass(frozen=True)
class Peer:
    """One engine in one configuration: how to start its worker."""

    engine: str
    dtype: str
    method: str
    venv: Path
    options: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.engine} {self.dtype} {self.method}"

    def unavailable(self) -> str | None:
        """Why it cannot be measured here, or None."""
        if not (self.venv / "bin" / "python").exists():
            return f"{self.venv.name} is missing: run bash bench/peers_setup.sh"
        return None

    def command(self) -> list[str]:
        weights = (str(gguf_file()),) if self.engine == "llama_cpp" else (str(export(self.dtype)), self.dtype)
        worker = WORKERS / f"{self.engine}_worker.py"
        return [str(self.venv / "bin" / "python"), str(worker), *weights, *self.options]


NGRAM = json.dumps(
    {"method": "ngram", "num_speculative_tokens": 10, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
)
VLLM_ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",  # "auto" keeps one of two cores for the scheduler
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # As vLLM's manual asks; gomp costs its speculation dearly.
    "LD_PRELOAD": str(THEIRS / "lib" / "libiomp5.so"),
}
PEERS = (
    *(Peer("vllm", dtype, "plain", THEIRS, env=VLLM_ENV) for dtype in ("float32", "bfloat16")),
    *(Peer("vllm", dtype, "ngram", THEIRS, (NGRAM,), VLLM_ENV) for dtype in ("float32", "bfloat16")),
    Peer("llama_cpp", "Q4_1", "plain", THEIRS),
    Peer("llama_cpp", "Q4_1", "lookup", THEIRS, ("10",)),
)


class PeerError(Exception):
    """A worker could not load, or could not answer: one line."""


@dataclass(frozen=True)
class Measured:
    """One generation, as the worker timed it."""

    tokens: tuple[int, ...]
    first_tokens: int
    decode_s: float
    total_s: float

    @property
    def tokens_per_s(self) -> float:
        """Of decoding alone: what came after the first arrival, over the time that it took."""
        return (len(self.tokens) - self.first_tokens) / self.decode_s


class Worker:
    """A peer's process, loaded; `with Worker(peer) as worker:` leaves no process behind."""

    def __init__(self, peer: Peer, threads: int = 2) -> None:
        self.peer = peer
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in __exit__
        self._process = subprocess.Popen(
            peer.command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads), **peer.env},
            start_new_session=True,  # a process group of its own, ended as a whole
        )
        try:
            self.version = str(self._read()["engine"])
        except BaseException:
            self.close()
            raise

    def measure(self, prompt: Sequence[int], max_new_tokens: int) -> Measured:
        """Generates exactly `max_new_tokens`, greedy, end-of-text ignored."""
        assert self._process.stdin is not None
        print(
            json.dumps({"prompt": list(prompt), "max_new_tokens": max_new_tokens}),
            file=self._process.stdin,
            flush=True,
        )
        answer = self._read()
        measured = Measured(tuple(answer.pop("tokens")), **answer)
        if len(measured.tokens) != max_new_tokens:
            raise PeerError(f"{self.peer.name} made {len(measured.tokens)} tokens, not {max_new_tokens}")
        return measured

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _read(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "its process ended"}
        if "error" in answer:
            self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 3000))
            print(self._log.read().decode(errors="replace"), file=sys.stderr)
            raise PeerError(f"{self.peer.name}: {answer['error']}")
        return answer

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def tokenize(prompts: Sequence[dict[str, str]]) -> list[list[int]]:
    """Each prompt as one user turn of the model's chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(export("float32"))
    turns = [[{"role": "user", "content": prompt["prompt"]}] for prompt in prompts]
    return [tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"] for turn in turns]
