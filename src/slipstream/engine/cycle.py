"""The speculative cycle: draft, verify, accept, commit. Plain decoding is this cycle with an empty tree."""

from __future__ import annotations

from torch import Tensor

from slipstream.draft.drafter import Drafter
from slipstream.draft.tree import Tree
from slipstream.engine.accept import Path, accept
from slipstream.engine.state import State
from slipstream.spans import span
from slipstream.target.family import Target


def cycle(
    target: Target,
    drafter: Drafter | None,
    state: State,
    slots: Tensor,
    size: int,
    extent: int,
    is_greedy: bool,
) -> Path:
    """Advances the requests in slots (int64 [B]) by one cycle with a tree of `size` drafted tokens.

    extent: the host's upper bound of the keys that any row sees. is_greedy: every request's temperature is 0.
    Returns the path of each request; the state has moved on by `path.accepted + 1` tokens.
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
    return path


def prefill(target: Target, drafter: Drafter | None, state: State, slot: int, chunk: int) -> None:
    """Computes the KV of a slot's text up to its last token, which is the root of the first cycle.

    chunk: the most rows of one forward. The same kernels and bits as the verify step's (design rule 3).
    """
    if drafter:
        drafter.reset(slot)
    end = int(state.text.length[slot]) - 1
    for begin in range(0, end, chunk):
        rows = state.known_rows(slot, begin, min(begin + chunk, end))
        _, features = target.forward(rows, state.kv, drafter.taps if drafter else ())
        if drafter and features is not None:
            drafter.observe(state.text, rows.slots, rows.prefix, features)
