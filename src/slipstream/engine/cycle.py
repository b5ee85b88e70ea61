"""The speculative cycle: draft, verify, accept, commit. Plain decoding is this cycle with an empty tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.draft.drafter import OUTLOOKS, Drafter
from slipstream.draft.tree import Tree
from slipstream.engine.accept import accept
from slipstream.engine.state import State
from slipstream.spans import span
from slipstream.target.family import Target


@dataclass(frozen=True)
class Outcome:
    """What one cycle brought one request."""

    tokens: list[int]
    """The committed ones: the drafted tokens that stand, and the target's own after them."""
    nodes: list[int]
    """The nodes of the tree that stand, by number; the first is 0."""
    levels: int
    """The longest path that the tree allowed."""
    outlook: int
    """The drafter's, for the next cycle."""
    ahead: list[int]
    """What a drafter whose drafts are free would draft next."""

    @staticmethod
    def read(row: Sequence[int], levels: int) -> Outcome:
        """From a row of what `cycle` returns, with the longest path of its tree."""
        accepted, outlook = row[0], row[1]
        at = 2 + levels + 1
        nodes = [index - 1 for index in row[at + 1 : at + 1 + accepted]]
        return Outcome(list(row[2 : 3 + accepted]), nodes, levels, outlook, list(row[at + levels + 1 :]))


def cycle(
    target: Target,
    drafter: Drafter | None,
    state: State,
    slots: Tensor,
    size: int,
    extent: int,
    is_greedy: bool,
) -> tuple[Tensor, int]:
    """Advances the requests in slots (int64 [B]) by one cycle with a tree of `size` drafted tokens.

    extent: the host's upper bound of the keys that any row sees. is_greedy: every request's temperature is 0.
    Returns what it brought as int64 [B, .], in the form that `Outcome.read` takes, and the tree's longest path. Runs on
    the device alone: nothing here waits for it.
    """
    with span("draft"):
        tree = (
            drafter.draft(state.text, slots, size)
            if drafter and size
            else Tree.empty(len(slots), slots.device)
        )
    with span("verify"):
        rows = state.tree_rows(slots, tree, extent)
        hidden, features = target.forward(rows, state.kv, drafter.taps if drafter else ())
        logits = target.logits(hidden)
    with span("accept"):
        sampling = None if is_greedy else state.sampling.rows(slots, tree.size + 1)
        path = accept(logits, tree, sampling, rows.positions)
    with span("commit"):
        state.commit(slots, tree, path)
        if drafter and features is not None:
            if not tree.is_chain:
                features = features.gather(1, path.rows[..., None].expand(-1, -1, features.shape[-1]))
            drafter.observe(state.text, slots, rows.prefix, features)
    outlook, ahead = _outlook(drafter, state, slots)
    return torch.cat([path.accepted[:, None], outlook, path.tokens, path.rows, *ahead], dim=1), tree.max_depth


def _outlook(drafter: Drafter | None, state: State, slots: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The next cycle's, int64 [B, 1], and what would be drafted where that costs nothing."""
    if drafter is None:
        return torch.zeros_like(slots)[:, None], []
    with span("draft"):
        outlook = drafter.outlook(state.text, slots).clamp(0, OUTLOOKS - 1)[:, None]
        ahead = [drafter.draft(state.text, slots, drafter.max_drafted).tokens] if drafter.is_free else []
    return outlook, ahead


def prefill(
    target: Target, drafter: Drafter | None, state: State, slot: int, length: int, chunk: int
) -> Outcome:
    """Computes the KV of a slot's text up to its last token, which is the root of the first cycle.

    length: of the text. chunk: the most rows of one forward. The same kernels and bits as the verify step's (design
    rule 3). Returns what the drafter says of the first cycle, in an outcome without tokens.
    """
    if drafter:
        drafter.reset(slot)
    for begin in range(0, length - 1, chunk):
        rows = state.known_rows(slot, begin, min(begin + chunk, length - 1))
        if drafter:
            drafter.before(state.text, [slot], 0, rows.tokens.shape[1])
        _, features = target.forward(rows, state.kv, drafter.taps if drafter else ())
        if drafter and features is not None:
            drafter.observe(state.text, rows.slots, rows.prefix, features)
    outlook, ahead = _outlook(drafter, state, torch.tensor([slot], device=state.table.device))
    return Outcome([], [], 0, int(outlook), ahead[0][0].tolist() if ahead else [])
