"""The Python API: load a model once, then generate, with speculation that never changes a text."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Literal

import torch

from slipstream.draft.drafter import Drafter
from slipstream.draft.eagle3.drafter import SMOLLM2_HEAD, Eagle3Drafter
from slipstream.draft.ngram import NGramDrafter
from slipstream.engine.controller import SIZES, Controller, CostModel
from slipstream.engine.output import Output
from slipstream.engine.rank import MAX_ROWS, Settings
from slipstream.engine.ranks import Group
from slipstream.engine.request import Chunk, Completion, SamplingParams
from slipstream.engine.scheduler import Running, Scheduler
from slipstream.errors import RequestError, SlipstreamError
from slipstream.target.load import LoadedModel

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]
"""A user's message, a conversation as a list of {"role": ..., "content": ...}, or token ids as they are."""
DRAFTERS = ("ngram", "eagle3")
_THREADS_PER_CPU = 4
"""More threads than that are a mistake: they would wait for each other."""


class Engine:
    """A model, its drafter and the state of the requests that run on them. Not for use by several threads at once.

    engine = Engine("smollm2-135m")
    print(engine.generate("Why is the sky blue?").text)
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        draft: str | Drafter | None = "ngram",
        dtype: str = "auto",
        weights: str = "auto",
        max_length: int | None = None,
        max_batch: int = 8,
        threads: int | None = None,
        device: str = "cpu",
        tp: int = 1,
        all_reduce: str = "auto",
        graph: bool = True,
    ) -> None:
        """Loads a model.

        model: a name (`smollm2-135m`), a directory, a .gguf file, or a Hugging Face id. draft: what proposes tokens
        (`ngram`, `eagle3` for SmolLM2, the folder of an EAGLE-3 drafter, a Drafter of your own, or None for plain
        decoding). dtype: of activations and
        KV (auto, float32, bfloat16). weights: the format of the linear layers (auto: as dtype; float32, bfloat16,
        int8, int4).
        max_length: the longest prompt + output in tokens (default: 2048, or what the model can). max_batch: requests
        that run at once. threads: CPU threads of this whole process (default: what torch has). tp: over how many
        ranks the model is split; this process is the first of them and starts the others (under torchrun it is the
        one that torchrun says), each with `threads` threads (default: an equal share of the cores). all_reduce: how
        they exchange (`slipstream.collectives.choice.BACKENDS`; auto: the fastest that keeps every bit). graph:
        on a GPU, cycles are captured as CUDA graphs. Raises SlipstreamError with what to do about it.
        """
        if threads is not None:
            if threads < 1:
                raise SlipstreamError(f"threads is {threads}; it must be at least 1")
            if threads > _THREADS_PER_CPU * (os.cpu_count() or 1):
                raise SlipstreamError(f"threads is {threads}; this machine has {os.cpu_count()} CPUs")
            torch.set_num_threads(threads)
        if tp < 1:
            raise SlipstreamError(f"tp is {tp}; it must be at least 1")
        if (max_length is not None and max_length < 2) or max_batch < 1:
            raise SlipstreamError("max_length must be at least 2 and max_batch at least 1")
        self.drafter = _drafter(draft)  # before the model: what is wrong with it is known sooner
        settings = Settings(model, dtype, weights, max_length, max_batch, device, tp, all_reduce, graph)
        self._group = Group.of(settings, threads)
        self._closing = weakref.finalize(self, self._group.close)  # at the end of this process at the latest
        rank = self._rank = self._group.rank
        self.model: LoadedModel = rank.model
        self.max_length, self._state = rank.max_length, rank.state
        self._scheduler = Scheduler(self._group.runner, None)
        self.use(self.drafter)

    def use(self, drafter: Drafter | None) -> None:
        """Drafts with this one from now on. Raises SlipstreamError while a request waits or runs."""
        if self._scheduler.waiting or self._scheduler.running:
            raise SlipstreamError("the drafter cannot be changed while a request is running")
        with self._group.watching():
            self._group.use(drafter)
        self.drafter = drafter
        self._controller: Controller | None = None  # what it measured was another drafter's
        self._scheduler.controller = None

    def close(self) -> None:
        """Ends the other ranks, where there are any; they also end with the engine or with this process."""
        self._closing()

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        speculate: bool = True,
        draft_tokens: int | None = None,
    ) -> Completion:
        """One completion. See `generate_batch` for the arguments."""
        return self.generate_batch([prompt], params, raw=raw, speculate=speculate, draft_tokens=draft_tokens)[
            0
        ]

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        raw: bool = False,
        speculate: bool = True,
        draft_tokens: int | None = None,
    ) -> list[Completion]:
        """Completions of several prompts, run together as far as max_batch allows; in the order of the prompts.

        params: for all, or one for each (default: greedy, 256 tokens). raw: take the text as it is, without the chat
        template. speculate: False decodes plainly; the text is the same. draft_tokens: draft that many each
        cycle instead of what the controller finds best. Raises RequestError for what cannot be served.
        """
        every = self._params(params, len(prompts))
        requests = [
            self._request(prompt, each, raw, speculate, draft_tokens)
            for prompt, each in zip(prompts, every, strict=True)
        ]
        texts: dict[int, list[str]] = {id(request): [] for request in requests}
        for request, chunk in self._run(requests):
            texts[id(request)].append(chunk.text)
        return [self._completion(request, "".join(texts[id(request)])) for request in requests]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        speculate: bool = True,
        draft_tokens: int | None = None,
    ) -> Iterator[Chunk]:
        """The same completion in pieces, as its cycles bring them; the last piece has the reason and the stats.

        Several streams may be open at once: they run as a batch, each as far as the most eager reader asks.
        """
        request = self._request(prompt, params or SamplingParams(), raw, speculate, draft_tokens)
        return (chunk for _, chunk in self._run([request]))

    def tokens_of(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """The prompt's token ids as the model will see them."""
        tokenizer = self.model.tokenizer
        if not isinstance(prompt, str):
            ids = [int(each) for each in prompt if isinstance(each, Integral)]
            if len(ids) == len(prompt):
                return ids
            messages = [dict(each) for each in prompt if isinstance(each, Mapping)]
            if len(messages) < len(prompt):
                raise RequestError("a prompt is a text, a list of messages, or a list of token ids")
            return tokenizer.encode_chat(messages)
        if not _is_text(prompt):
            raise RequestError("the prompt is not valid Unicode text")
        if raw or not prompt:
            return tokenizer.encode(prompt)
        return tokenizer.encode_chat([{"role": "user", "content": prompt}])

    @torch.inference_mode()
    def step_costs(
        self, rows: Sequence[int] = (1, 2, 4, 8, 16, 32), *, context: int = 256, rounds: int = 7
    ) -> dict[int, float]:
        """Microseconds of one whole verify cycle by its number of rows, one request: the median of `rounds`, in turn.

        context: the tokens before the tree. Nothing may be running.
        """
        context = min(context, self.max_length)
        measured: dict[int, list[float]] = {count: [] for count in rows}
        if any(not 1 <= count <= MAX_ROWS for count in rows):
            raise SlipstreamError(f"rows must be between 1 and {MAX_ROWS}")
        vocabulary = self.model.shape.vocab_size
        drafter = self._rank.arbitrary
        with self._group.watching():
            self._begin(drafter, [(7919 * index) % vocabulary for index in range(context)])
            for round_ in range(rounds + 1):
                for count in rows:
                    self._rewind(context)
                    elapsed_us = self._time_cycle(drafter, count - 1)
                    if round_:
                        measured[count].append(elapsed_us)
        return {count: median(times) for count, times in measured.items()}

    def describe(self) -> dict[str, object]:
        """What runs here: the model, its formats and the limits."""
        return {
            "model": self.model.name,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "weights": self.model.weights,
            "draft": self.drafter.name if self.drafter else None,
            "parameters": self.model.shape.parameters,
            "layers": self.model.shape.layers,
            "max_length": self.max_length,
            "max_batch": self._state.padding_slot,
            "threads": torch.get_num_threads(),
            "cpus": os.cpu_count(),
            "tp": self._group.collectives.size,
            "all_reduce": self._group.collectives.name,
            "notes": [*self.model.notes, *self._group.notes],
        }

    def _run(self, requests: list[Running]) -> Iterator[tuple[Running, Chunk]]:
        chosen_for = [r for r in requests if r.drafter is not None and r.size is None]
        if chosen_for:
            self._calibrate(chosen_for[0].prompt)
        self._scheduler.waiting.extend(requests)
        try:
            unfinished = list(requests)
            while unfinished:
                ready = [request for request in unfinished if request.chunks]
                if not ready:
                    with self._group.watching():
                        self._scheduler.step()  # moves the requests of other open streams on too
                for request in ready:
                    chunk = request.chunks.popleft()
                    if chunk.finish_reason is not None:
                        unfinished.remove(request)
                    yield request, chunk
            if not self._scheduler.running and not self._scheduler.waiting:
                with self._group.watching():
                    self._group.rest()
        finally:  # an interrupted or abandoned stream must not leave its request in a slot
            for request in requests:
                self._scheduler.cancel(request)

    def _request(
        self, prompt: Prompt, params: SamplingParams, raw: bool, speculate: bool, draft_tokens: int | None
    ) -> Running:
        tokens = self.tokens_of(prompt, raw=raw)
        if not tokens:
            raise RequestError("the prompt is empty")
        vocabulary = self.model.shape.vocab_size
        if max(tokens) >= vocabulary or min(tokens) < 0:
            wrong = max(tokens) if max(tokens) >= vocabulary else min(tokens)
            raise RequestError(f"the prompt holds token {wrong}; the model's go from 0 to {vocabulary - 1}")
        if len(tokens) + params.max_new_tokens > self.max_length:
            raise RequestError(
                f"a prompt of {len(tokens)} tokens and {params.max_new_tokens} new ones do not fit into max_length"
                f" {self.max_length}; shorten the prompt, ask for fewer tokens or raise max_length"
            )
        if draft_tokens is not None:
            most = self.drafter.max_drafted if self.drafter else 0
            if not 0 <= draft_tokens <= min(most, MAX_ROWS - 1):
                raise RequestError(f"draft_tokens is {draft_tokens}; it must be between 0 and {most}")
        output = Output(params, self.model.tokenizer.eos_ids, self.model.tokenizer.stream())
        return Running(tokens, params, output, self.drafter if speculate else None, draft_tokens)

    def _params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        if len(params) != count:
            raise RequestError(f"{count} prompts came with {len(params)} sets of sampling parameters")
        return list(params)

    @staticmethod
    def _completion(request: Running, text: str) -> Completion:
        reason: Literal["stop", "length"] | None = request.output.finish_reason
        assert reason is not None
        return Completion(text, request.output.token_ids, reason, request.stats)

    def _calibrate(self, prompt: Sequence[int]) -> None:
        """Measures what cycles cost, before the first request that lets the controller choose, on its text."""
        if self._controller is not None or self.drafter is None:
            return
        drafter = self.drafter
        sizes = [size for size in SIZES if size <= drafter.max_drafted]
        with self._group.watching():
            cycles_us = self._measured(drafter, sizes, prompt)
            verify_us, draft_us = cycles_us, {}
            if not drafter.is_free and self._state.padding_slot > 1:  # a batch does not draft as it verifies
                verify_us = self._measured(self._rank.arbitrary, sizes, prompt)
                draft_us = {size: max(cycles_us[size] - verify_us[size], 0.0) for size in sizes if size}
        costs = CostModel({size + 1: us for size, us in verify_us.items()}, draft_us)
        self._controller = Controller(costs, drafter.max_drafted, drafter.is_free, drafter.is_tree)
        self._scheduler.controller = self._controller

    @torch.inference_mode()
    def _measured(self, drafter: Drafter, sizes: Sequence[int], prompt: Sequence[int]) -> dict[int, float]:
        """Microseconds of one request's cycle by size, over a text that the model writes itself: what a draft costs
        depends on how well it goes."""
        state, slot = self._state, self._state.padding_slot
        prompt = prompt[: min(256, (self.max_length + 1) // 2)]
        self._begin(drafter, prompt)
        rows: list[list[float]] = []
        for _ in range(6):
            rows.append([])
            for size in sizes:
                if int(state.text.length[slot]) > self.max_length:
                    self._rewind(len(prompt))
                rows[-1].append(self._time_cycle(drafter, size))
        # A machine changes its speed from one second to the next, so sizes are compared within a round. The first one
        # warms up.
        logs = torch.tensor(rows[1:]).log()
        level = logs.mean(1, keepdim=True)
        us = ((logs - level).median(0).values + level.median()).exp()
        return dict(zip(sizes, us.tolist(), strict=True))

    def _begin(self, drafter: Drafter, prompt: Sequence[int]) -> None:
        """Puts a text on the padding slot, for measuring."""
        self._scheduler.runner.begin(drafter, self._state.padding_slot, prompt, SamplingParams())

    def _rewind(self, length: int) -> None:
        """Cuts the text on the padding slot."""
        self._scheduler.runner.rewind(self._state.padding_slot, length)

    def _time_cycle(self, drafter: Drafter, size: int) -> float:
        """Microseconds of one cycle on the padding slot."""
        slot = self._state.padding_slot
        extent = int(self._state.text.length[slot]) + size
        start = perf_counter()
        self._scheduler.runner.start(drafter, [slot], size, extent, True).read()
        return (perf_counter() - start) * 1e6


def _is_text(prompt: str) -> bool:
    """False for what UTF-8 cannot hold, as bytes that were no text leave behind."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        return False
    return True


def _drafter(draft: str | Drafter | None) -> Drafter | None:
    if not isinstance(draft, str):
        return draft
    if draft == "ngram":
        return NGramDrafter()
    if draft == "eagle3":
        return Eagle3Drafter(SMOLLM2_HEAD)
    if (folder := Path(draft).expanduser()).is_dir():
        return Eagle3Drafter(folder)
    raise SlipstreamError(
        f"unknown drafter {draft!r}; give {', '.join(DRAFTERS)}, none, or a drafter's folder"
    )
