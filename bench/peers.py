"""Other engines on the same weights, prompts, dtype and thread count, each in a process of its own, measured in turn.

bash bench/peers_setup.sh                      once: makes .venv-peers (vLLM's CPU build, llama.cpp)
.venv/bin/python bench/peers.py                measures every peer on the prompts below
.venv/bin/python bench/peers.py --only bfloat16 --prompts FILE.jsonl --json peers.json

`make bench` imports `PEERS` and `Worker` to set these figures beside slipstream's in one run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from types import TracebackType

from export_hf import export, gguf_file

ROOT = Path(__file__).resolve().parent.parent
WORKERS = Path(__file__).resolve().parent / "peer_workers"
OURS, THEIRS = ROOT / ".venv", ROOT / ".venv-peers"

NOTES = (
    "The red kite is a bird of prey with a forked tail. It was once common in every town, where it fed on "
    "scraps. By 1900 only a few pairs were left, all of them in Wales. Since 1989 young birds have been brought "
    "from Spain and Sweden, and today more than four thousand pairs breed in Britain."
)
PROMPTS = (
    {"kind": "chat", "prompt": "Why is the sky blue, and why is it red in the evening?"},
    {"kind": "edit", "prompt": f"Repeat the following text word for word, twice:\n\n{NOTES}"},
    {"kind": "code", "prompt": "Write a Python class for a stack with push, pop, peek and a length."},
)


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
    *(Peer("transformers", dtype, "plain", OURS) for dtype in ("float32", "bfloat16")),
    *(Peer("transformers", dtype, "lookup", OURS, ("10",)) for dtype in ("float32", "bfloat16")),
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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="peers whose name holds one of these words")
    parser.add_argument("--prompts", type=Path, help='a .jsonl of {"kind": .., "prompt": ..}')
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where to write every measurement")
    arguments = parser.parse_args()

    prompts: Sequence[dict[str, str]] = PROMPTS
    if arguments.prompts:
        prompts = [json.loads(line) for line in arguments.prompts.read_text().split("\n") if line.strip()]
    token_ids = tokenize(prompts)
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    rows = []
    with ExitStack() as stack:
        workers = []
        for peer in PEERS:
            if arguments.only and not any(word in peer.name for word in arguments.only):
                continue
            if reason := peer.unavailable():
                print(f"{peer.name}: {reason}", file=sys.stderr)
                continue
            try:
                worker = stack.enter_context(Worker(peer))
                worker.measure(token_ids[0], 32)  # warm-up
            except PeerError as error:
                print(error, file=sys.stderr)
                continue
            workers.append(worker)
            print(f"{peer.name}: loaded, {worker.version}", file=sys.stderr)
        for number in range(arguments.rounds):
            for prompt, ids in zip(prompts, token_ids, strict=True):
                for worker in workers:
                    measured = worker.measure(ids, arguments.max_new_tokens)
                    rates[worker.peer.name, prompt["kind"]].append(measured.tokens_per_s)
                    rows.append({"peer": worker.peer.name, "round": number, **prompt, **asdict(measured)})
    if arguments.json:
        arguments.json.write_text("\n".join(json.dumps(row) for row in rows) + "\n")

    kinds = list(dict.fromkeys(prompt["kind"] for prompt in prompts))
    print(f"tokens a second, median (best), {arguments.max_new_tokens} tokens")
    print(f"{'':28}" + "".join(f"{kind:>18}" for kind in kinds))
    for worker in workers:
        cells = [rates[worker.peer.name, kind] for kind in kinds]
        print(f"{worker.peer.name:28}" + "".join(f"{median(cell):9.1f} ({max(cell):6.1f})" for cell in cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
