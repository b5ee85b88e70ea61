"""Drafts a chain with an EAGLE-3 head: each step a pass through its one layer, on the target's states and then its own.

Slot t of the drafter pairs the embedding of token t + 1 with the target's state at t, and predicts token t + 2. A text
of L tokens has states up to L - 2 (its last token has not been run), so slot L - 2 gives the first drafted token; from
then on the drafter's own state stands in for the target's. Its KV of accepted slots is computed again from the target's
states before the next draft, and only then: while nobody drafts, the states wait in a ring.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from slipstream.draft.drafter import Drafter
from slipstream.draft.eagle3.checkpoint import load
from slipstream.draft.eagle3.shape import Eagle3Shape
from slipstream.draft.text import Text
from slipstream.draft.tree import Tree
from slipstream.errors import ModelError
from slipstream.kernels.activation import swiglu
from slipstream.kernels.attention import attention
from slipstream.kernels.linear import Format, linear, pack
from slipstream.kernels.norm import add_rms_norm_, rms_norm
from slipstream.kernels.rope import rope_kv_write
from slipstream.kernels.sampling import argmax
from slipstream.target.family import Target
from slipstream.target.rotary import rotary_tables

SMOLLM2_HEAD = Path(__file__).parent / "heads" / "smollm2-135m"
"""The head that is shipped, for SmolLM2-135M-Instruct."""
_RING = 1024
"""States that wait for a request's next draft; a power of two, and several prefill chunks."""
_MARGIN = 64
"""Positions beyond a text that a cycle may write into the ring."""


class Eagle3Drafter(Drafter):
    """A drafter from a folder (`draft/eagle3/checkpoint.py`)."""

    name = "eagle3"

    def __init__(self, folder: Path, max_drafted: int = 7, weights: Format = "bfloat16") -> None:
        """max_drafted: the longest chain. weights: the format of its linear layers. Raises ModelError."""
        self.shape, self._tensors = load(folder)
        self.taps = self.shape.taps
        self.max_drafted = max_drafted
        self._format: Format = weights

    def attach(self, target: Target, slots: int, width: int) -> None:
        shape = self.shape
        _check_pair(shape, target)
        self._target, dtype = target, target.dtype
        t, at = self._tensors, "midlayer."
        qkv = [t[f"{at}self_attn.{name}_proj.weight"] for name in ("q", "k", "v")]
        gate_up = [t[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        self._fuse = pack(t["fc.weight"], self._format)
        self._qkv, self._out = pack(qkv, self._format), pack(t[f"{at}self_attn.o_proj.weight"], self._format)
        self._gate_up, self._down = (
            pack(gate_up, self._format),
            pack(t[f"{at}mlp.down_proj.weight"], self._format),
        )
        self._head = pack(t["lm_head.weight"], self._format)
        self._embed_norm, self._state_norm, self._mlp_norm, self._norm = (
            t[f"{name}.weight"].to(dtype)
            for name in (f"{at}input_layernorm", f"{at}hidden_norm", f"{at}post_attention_layernorm", "norm")
        )
        self._ids = torch.arange(shape.draft_vocab_size) + t["d2t"]
        self._limit = min(width, shape.max_positions)
        self._cos, self._sin = rotary_tables(shape.rope, shape.head_dim, width + self.max_drafted, "cpu")
        self._table = torch.arange(slots * width).view(slots, width)
        kv = (slots * width, shape.kv_heads, shape.head_dim)
        self._k, self._v = torch.zeros(kv, dtype=dtype), torch.zeros(kv, dtype=dtype)
        self._states = torch.zeros(slots, _RING, len(shape.taps) * shape.target_hidden_size, dtype=dtype)
        self._done = torch.zeros(slots, dtype=torch.int64)
        """By slot: the drafter's KV is that of the target's states up to here."""

    def reset(self, slot: int) -> None:
        self._done[slot] = 0

    def observe(self, text: Text, slots: Tensor, first: Tensor, features: Tensor) -> None:
        count = features.shape[1]
        if int((first + count - self._done[slots]).max()) > _RING - _MARGIN:
            for slot, known in zip(slots[:, None], first.tolist(), strict=True):
                self._refresh(text, slot, torch.tensor([known - 1]))
        at = (first[:, None] + torch.arange(count)) % _RING
        self._states[slots[:, None], at] = features

    def outlook(self, text: Text, slots: Tensor) -> Tensor:
        length = text.length[slots]
        return ((length >= 2) & (length + self.max_drafted <= self._limit)).long()

    def draft(self, text: Text, slots: Tensor, size: int) -> Tree:
        last = (text.length[slots] - 2).clamp_min(0)
        state, normed = self._refresh(text, slots, last)
        tokens = [self._next(normed)]
        for step in range(1, size):
            state, normed = self._layer(tokens[-1][:, None], state, slots, last + step, None)
            tokens.append(self._next(normed))
        drafted = torch.stack(tokens, dim=1)
        return Tree.chain(drafted, (text.length[slots] >= 2)[:, None].expand_as(drafted))

    def _next(self, normed: Tensor) -> Tensor:
        """int64 [B]: the likeliest token after states [B, 1, H], as the target numbers it."""
        logits = linear(normed[:, 0], self._head, torch.float32)
        return self._ids[argmax(logits)]

    def _refresh(self, text: Text, slots: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the slots up to `last` (int64 [B]) that wait, the last at least; returns its state and normed state."""
        first = torch.minimum(self._done[slots], last)
        counts = last - first
        width = int(counts.max()) + 1
        # Shorter requests repeat their last slot: it writes the same KV again.
        depth = torch.arange(width).expand(len(slots), -1).minimum(counts[:, None])
        index = first[:, None] + depth
        at = slots[:, None]
        state = linear(self._states[at, index % _RING], self._fuse)
        is_even = bool((counts == width - 1).all())
        outputs = self._layer(text.tokens[at, index + 1], state, slots, first, None if is_even else depth)
        self._done[slots] = last + 1
        return outputs[0][:, -1:], outputs[1][:, -1:]

    def _layer(
        self, tokens: Tensor, state: Tensor, slots: Tensor, first: Tensor, depth: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """One pass over slots first .. of tokens [B, T] and states [B, T, H]: the next states, raw and normed.

        depth: int64 [B, T], of each row behind `first`; None for 0, 1, 2 ... A repeated depth stands for the same row.
        """
        shape, eps = self.shape, self.shape.rms_norm_eps
        rows = torch.arange(tokens.shape[1]).expand(len(slots), -1)
        index = first[:, None] + (rows if depth is None else depth)
        ancestors = None if depth is None else rows[:, None].expand(-1, rows.shape[1], -1)
        normed = rms_norm(state, self._state_norm, eps)
        embedded = rms_norm(self._target.embed(tokens), self._embed_norm, eps)
        residual = normed.clone() if shape.norm_before_residual else state.clone()
        qkv = linear(torch.cat([embedded, normed], dim=-1), self._qkv)
        kv_rows = self._table[slots[:, None], index]
        q = rope_kv_write(qkv, self._cos, self._sin, index, kv_rows, self._k, self._v)
        seen = attention(
            q, self._k, self._v, self._table, slots, first, depth, ancestors, shape.head_dim**-0.5
        )
        hidden = add_rms_norm_(linear(seen.flatten(2), self._out), residual, self._mlp_norm, eps)
        hidden = linear(swiglu(linear(hidden, self._gate_up)), self._down)
        normed = add_rms_norm_(hidden, residual, self._norm, eps)
        return (normed if shape.norm_output else residual), normed


def _check_pair(shape: Eagle3Shape, target: Target) -> None:
    """Raises ModelError when the drafter was made for another target."""
    theirs = target.shape
    facts = {
        "hidden size": (shape.target_hidden_size, theirs.hidden_size),
        "embedding width": (shape.hidden_size, theirs.hidden_size),
        "vocabulary": (shape.vocab_size, theirs.vocab_size),
    }
    for what, (wanted, found) in facts.items():
        if wanted != found:
            raise ModelError(f"the drafter is for a target of {what} {wanted}, this one's is {found}")
    if max(shape.taps) > theirs.layers or min(shape.taps) < 0:
        raise ModelError(f"the drafter reads layer {max(shape.taps)}, the target has {theirs.layers}")
