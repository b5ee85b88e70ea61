"""A target whose every logit depends on the whole ordered sequence of keys that a row sees.

Its KV row holds the token; a row's hidden state is a hash of the tokens that it reaches through the table, in order.
One wrong, missing, stale or swapped KV row changes the next token, so it catches what a smooth model would hide.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.draft.drafter import Drafter
from slipstream.draft.text import Text
from slipstream.draft.tree import Tree
from slipstream.engine.controller import Controller, CostModel
from slipstream.engine.output import Output
from slipstream.engine.request import SamplingParams
from slipstream.engine.runner import Eager
from slipstream.engine.scheduler import Running, Scheduler
from slipstream.engine.state import State
from slipstream.kernels.sampling import uniform
from slipstream.target.rows import KVTensor, Rows

VOCABULARY = 12
MAX_ROWS = 16


def sequence_hash(tokens: list[int]) -> int:
    value = 17
    for token in tokens:
        value = (value * 1000003 + token + 1) % (2**31 - 1)
    return value


class ToyTarget:
    def __init__(self, sharpness: float = 6.0) -> None:
        self.sharpness = sharpness

    def kv_layout(self):
        return [(KVTensor("token", (1,)),)]

    def forward(self, rows: Rows, kv, taps=()) -> tuple[Tensor, None]:
        (cache,) = kv[0]
        cache[rows.kv_rows, 0] = rows.tokens
        batch, width = rows.tokens.shape
        hidden = torch.empty(batch, width, 1, dtype=torch.int64)
        for b in range(batch):
            entries = rows.table[rows.slots[b]]
            before = int(rows.prefix[b])
            for t in range(width):
                if rows.ancestors is None:
                    index = list(range(before + t + 1))
                    depth = t
                else:
                    depth = int(rows.depth[b, t])
                    index = [*range(before), *(before + int(r) for r in rows.ancestors[b, t, : depth + 1])]
                assert int(rows.positions[b, t]) == before + depth
                assert len(index) <= rows.extent
                hidden[b, t, 0] = sequence_hash(cache[entries[index], 0].tolist())
        return hidden, None

    def logits(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1)
        table = uniform(flat, torch.zeros_like(flat), VOCABULARY) * self.sharpness
        return table.view(*hidden.shape[:-1], VOCABULARY)

    def next_token(self, tokens: list[int]) -> int:
        """What greedy decoding says after these tokens, computed without any cache."""
        return int(self.logits(torch.tensor([[sequence_hash(tokens)]]))[0].argmax())


class TreeDrafter(Drafter):
    """Drafts what a function of (text, size) says: tokens and parents of one request."""

    name, max_drafted = "test", MAX_ROWS - 1

    def __init__(self, propose, max_depth: int | None = None) -> None:
        self.propose, self.max_depth = propose, max_depth

    def draft(self, text: Text, slots: Tensor, size: int) -> Tree:
        drafts = [
            self.propose(text.tokens[slot, : text.length[slot]].tolist(), size) for slot in slots.tolist()
        ]
        tokens = torch.tensor([tokens for tokens, _ in drafts])
        parents = [parents for _, parents in drafts]
        if all(each is None for each in parents):
            return Tree.chain(tokens, torch.ones_like(tokens, dtype=torch.bool))
        table = torch.tensor(parents)
        return Tree(tokens, torch.ones_like(tokens, dtype=torch.bool), table, self.max_depth or size)


class Pieces:
    """Detokenises token 3 as " 3"."""

    def push(self, token: int) -> str:
        return f" {token}"


def costs() -> CostModel:
    return CostModel({1: 1000.0, 16: 1500.0})


def scheduler(
    target, slots: int = 3, max_length: int = 96, controller: Controller | None = None, lag: int = 0
) -> Scheduler:
    state = State.allocate(target.kv_layout(), slots, max_length, MAX_ROWS, torch.int64, torch.device("cpu"))
    return Scheduler(Eager(target, state, lag), controller)


def run(engine: Scheduler, prompts, params, drafter, size) -> list[list[int]]:
    """The output tokens of each prompt; checks the invariants of the state after every cycle."""
    every = params if isinstance(params, list) else [params] * len(prompts)
    requests = [
        Running(list(prompt), each, Output(each, [], Pieces()), drafter, size)
        for prompt, each in zip(prompts, every, strict=True)
    ]
    engine.waiting.extend(requests)
    while engine.waiting or engine.running:
        engine.step()
        check_invariants(engine)
    return [request.output.token_ids for request in requests]


def check_invariants(engine: Scheduler) -> None:
    """No KV row owned twice, none lost; a running request's text is what was committed."""
    table = engine.runner.state.table
    assert torch.equal(table.flatten().sort().values, torch.arange(table.numel()))
    width = table.shape[1]
    assert torch.equal(table // width, torch.arange(table.shape[0])[:, None].expand_as(table))
    for request in engine.running:
        if request.flying:  # the device is ahead of what was read
            continue
        text = request.prompt + request.output.token_ids
        assert int(engine.runner.state.text.length[request.slot]) == len(text)
        assert engine.runner.state.text.tokens[request.slot, : len(text)].tolist() == text
    used = {request.slot for request in engine.running} | set(engine._free)
    assert used == set(range(engine.runner.state.padding_slot))


def greedy(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens)
