"""Drafts with an EAGLE-3 network: each step a pass through it, on the target's states first and then on its own.

Slot t of the drafter pairs the embedding of token t + 1 with the target's state at t, and predicts token t + 2. A text
of L tokens has states up to L - 2 (its last token has not been run), so slot L - 2 gives the first drafted token; from
then on the drafter's own state stands in for the target's. Its KV of accepted slots is computed again from the target's
states before the next draft, and only then: while nobody drafts, the states wait in a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.draft.drafter import Drafter
from slipstream.draft.eagle3.checkpoint import Checkpoint, load
from slipstream.draft.eagle3.grow import Candidates, capacity, depth_for
from slipstream.draft.eagle3.network import Network
from slipstream.draft.text import Text
from slipstream.draft.tree import Tree
from slipstream.errors import ModelError
from slipstream.kernels.device import reads_freely
from slipstream.kernels.linear import GROUP, Format
from slipstream.kernels.sampling import argmax
from slipstream.target.family import Target
from slipstream.target.rows import Rows

SMOLLM2_HEAD = Path(__file__).parent / "heads" / "smollm2-135m"
"""The head that is shipped, for SmolLM2-135M-Instruct."""


def drafter_folder(name: str) -> Path:
    """What a user may call a drafter: `eagle3`, the one that is shipped, or a folder."""
    return SMOLLM2_HEAD if name == "eagle3" else Path(name).expanduser()


_RING = 1024
"""States that wait for a request's next draft; a power of two, and several prefill chunks."""
_WIDTHS = (1, 2, 4, 8, 16, 32)
"""Buckets of the states that a draft takes in first, where their number is part of a graph."""
_CHUNK = 256
"""States that are taken in at once outside of a draft."""
_MARGIN = 64
"""Positions beyond a text that a cycle may write into the ring."""


class Eagle3Drafter(Drafter):
    """A drafter from a folder (`checkpoint.py`): chains, or the dynamic trees of EAGLE-2 (arXiv 2406.16858)."""

    name = "eagle3"

    def __init__(
        self,
        drafter: Path | Checkpoint,
        max_drafted: int = 15,
        *,
        top_k: int = 4,
        depth: int = 6,
        weights: Format | None = None,
        temperature: float = 0.0,
    ) -> None:
        """max_drafted: the most tokens of one draft. top_k: nodes that each level of the tree keeps and that each of
        them tries; 1 drafts chains. depth: the longest path of a tree. weights: the format of its linear layers; by
        default 8 bits where they fit, which cost no acceptance that was seen (docs/log.md). temperature: above 0 a
        chain is sampled from the drafter's own distribution instead of its first choices, and accepted by rejection
        sampling where the request samples too. Raises ModelError.
        """
        if top_k < 1 or depth < 1 or max_drafted < 1:
            raise ModelError("a draft has at least one token, one level and one try")
        if temperature > 0 and top_k > 1:
            raise ModelError(
                "a sampled draft is a chain: a tree that keeps its best nodes would not be a fair sample"
            )
        self._made_with = (drafter, max_drafted, top_k, depth, weights, temperature)
        self._temperature = temperature
        self.is_capturable = (
            temperature == 0
        )  # a draw's noise comes from a generator that a graph would repeat
        self._draw: torch.Generator | None = None
        self.checkpoint = drafter if isinstance(drafter, Checkpoint) else load(drafter)
        self.top_k = top_k = min(top_k, self.checkpoint.shape.draft_vocab_size)
        self.is_tree = top_k > 1
        self.max_drafted = min(max_drafted, capacity(top_k, depth)) if self.is_tree else max_drafted
        self.depth = depth if self.is_tree else max_drafted
        self._format: Format = weights or _format(self.checkpoint)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another rank makes one of its own, from the same folder."""
        return _made, self._made_with

    def attach(self, target: Target, slots: int, width: int) -> None:
        self.shape = self.checkpoint.shape.paired(target.shape)
        assert self.shape.taps is not None
        self.taps = self.shape.taps
        self._target, self._embedding = target, _embedding(self.checkpoint, target)
        device = self._device = target.device
        self._is_static = not reads_freely(device)
        scratch = self.depth * self.top_k
        self._network = Network(self.checkpoint, target.dtype, self._format, device, width + self.depth)
        self._ids = self.checkpoint.target_ids.to(device)
        self._limit = min(width, self.shape.max_positions)
        width += scratch
        self._table = torch.arange(slots * width, device=device).view(slots, width)
        self._kv = [
            tuple(
                torch.zeros(slots * width, *part.shape, dtype=target.dtype, device=device) for part in layer
            )
            for layer in self._network.kv_layout()
        ]
        features = len(self.taps) * self.shape.target_hidden_size
        self._states = torch.zeros(slots, _RING, features, dtype=target.dtype, device=device)
        self._done = torch.zeros(slots, dtype=torch.int64, device=device)
        """By slot: the drafter's KV is that of the target's states up to here."""
        self._waiting = [0] * slots
        """By slot: the most states that are not in the drafter's KV yet, as far as the host knows."""
        self._width = 1
        """The most states that the next draft takes in."""

    def reset(self, slot: int) -> None:
        self._done[slot] = 0
        self._waiting[slot] = 0

    def before(self, text: Text, slots: Sequence[int], size: int, observed: int) -> int:
        waiting = max(self._waiting[slot] for slot in slots)
        if waiting + observed > _RING - _MARGIN or (size and waiting > _WIDTHS[-1] and self._is_static):
            waiting = 0
            for slot in slots:
                self._catch_up(text, slot)
        self._width = next((width for width in _WIDTHS if width >= waiting), 0)
        for slot in slots:
            self._waiting[slot] = (0 if size else self._waiting[slot]) + observed
        return self._width if size else 0

    def _catch_up(self, text: Text, slot: int) -> None:
        """Takes in the states of a slot that wait."""
        at = torch.tensor([slot], device=self._device)
        # A bound, while the text is generated; exact in a prefill, where the text is ahead of the states.
        last = torch.minimum(self._done[at] + self._waiting[slot], text.length[at] - 1) - 1
        chunk = _CHUNK if self._is_static else _RING
        for _ in range(-(-self._waiting[slot] // chunk)):
            reach = torch.minimum(self._done[at] + chunk - 1, last)
            self._refresh(text, at, reach, chunk)
        self._waiting[slot] = 0

    def observe(self, text: Text, slots: Tensor, first: Tensor, features: Tensor) -> None:
        at = (first[:, None] + torch.arange(features.shape[1], device=self._device)) % _RING
        self._states[slots[:, None], at] = features

    def outlook(self, text: Text, slots: Tensor) -> Tensor:
        length = text.length[slots]
        return ((length >= 2) & (length + self.depth <= self._limit)).long()

    def draft(self, text: Text, slots: Tensor, size: int) -> Tree:
        last = (text.length[slots] - 2).clamp_min(0)
        state, normed = self._refresh(text, slots, last, self._width)
        is_valid = (text.length[slots] >= 2)[:, None]
        if self.is_tree and size > 1:
            return self._tree(slots, last, state, normed, size, is_valid)
        chosen = [self._choose(normed)]
        for step in range(1, size):
            state, normed = self._run(chosen[-1][0][:, None], state, self._rows(slots, last + step))
            chosen.append(self._choose(normed))
        drafted = torch.stack([tokens for tokens, _ in chosen], dim=1)
        q = [q for _, q in chosen if q is not None]
        return Tree.chain(drafted, is_valid.expand_as(drafted), torch.stack(q, dim=1) if q else None)

    def _choose(self, normed: Tensor) -> tuple[Tensor, Tensor | None]:
        """The next token after states [B, 1, H], as the target numbers it (int64 [B]): the likeliest, or one that is
        drawn, with the distribution that it is drawn from (float32 [B, V])."""
        logits = self._network.logits(normed[:, 0])
        if not self._temperature:
            return self._ids[argmax(logits)], None
        if self._draw is None:
            self._draw = torch.Generator(self._device).manual_seed(0)
        among = (logits / self._temperature).softmax(-1)
        tokens = self._ids[torch.multinomial(among, 1, generator=self._draw)[:, 0]]
        q = among.new_zeros(len(among), self.shape.vocab_size)
        q[:, self._ids] = among
        return tokens, q

    def _tree(
        self, slots: Tensor, last: Tensor, state: Tensor, normed: Tensor, size: int, is_valid: Tensor
    ) -> Tree:
        """The `size` likeliest nodes of a tree that grows from the state of slot `last`.

        Every node that is run is a request of its own with one row, whose table is its slot's with its own path in it.
        """
        batch, depth = len(slots), depth_for(size, self.top_k, self.depth)
        kept = Candidates.first(self._network.logits(normed[:, 0]), self._ids, self.top_k)
        width, hidden = kept.width, state.shape[-1]
        table = self._table[slots].repeat_interleave(width, dim=0)
        state = state.expand(-1, width, -1).reshape(batch * width, 1, hidden)
        each = torch.arange(batch * width, device=self._device)
        column = last.repeat_interleave(width)
        own = self._table[slots, -self.depth * self.top_k :]  # rows that no text ever uses
        for level in range(1, depth):
            column = column + 1
            rows = own[:, (level - 1) * width : level * width].reshape(-1, 1)
            table.scatter_(1, column[:, None], rows)
            run = Rows(
                tokens=kept.tokens.view(-1, 1),
                positions=column[:, None],
                kv_rows=rows,
                table=table,
                slots=each,
                prefix=column,
                extent=table.shape[1],
            )
            state, normed = self._run(run.tokens, state, run)
            logits = self._network.logits(normed).view(batch, width, -1)
            chosen = kept.grow(logits, self._ids)
            if not self._is_static and level + 1 < depth and not kept.may_matter(size):
                break  # what grows from here cannot be among the best: the same tree, sooner
            parents = (torch.arange(batch, device=self._device)[:, None] * width + chosen).view(-1)
            table, state = table[parents], state[parents]
        return kept.best(size, depth, is_valid)

    def _rows(self, slots: Tensor, first: Tensor) -> Rows:
        """One row a slot, after everything before it."""
        index = first[:, None]
        return Rows(
            tokens=index,  # not read
            positions=index,
            kv_rows=self._table[slots[:, None], index],
            table=self._table,
            slots=slots,
            prefix=first,
            extent=self._table.shape[1],
        )

    def _refresh(self, text: Text, slots: Tensor, last: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Runs the slots up to `last` (int64 [B]) that wait, the last at least; returns its state and normed state.

        width: a bound of how many they are, where finding that out would mean to wait for the device.
        """
        first = torch.minimum(self._done[slots], last)
        counts = last - first
        is_even = width == 1
        if not self._is_static:
            width = int(counts.max()) + 1
            is_even = bool((counts == width - 1).all())
        # Shorter requests repeat their last slot: it writes the same KV again.
        order = torch.arange(width, device=self._device).expand(len(slots), -1)
        depth = order.minimum(counts[:, None])
        index = first[:, None] + depth
        at = slots[:, None]
        rows = Rows(
            tokens=text.tokens[at, index + 1],
            positions=index,
            kv_rows=self._table[at, index],
            table=self._table,
            slots=slots,
            prefix=first,
            depth=None if is_even else depth,
            ancestors=None if is_even else order[:, None].expand(-1, width, -1),
            extent=self._table.shape[1],
        )
        state = self._network.fuse(self._states[at, index % _RING])
        outputs = self._run(rows.tokens, state, rows)
        self._done[slots] = last + 1
        return outputs[0][:, -1:], outputs[1][:, -1:]

    def _run(self, tokens: Tensor, state: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        table = self._embedding
        embedded = self._target.embed(tokens) if table is None else table[tokens]
        return self._network(embedded, state, rows, self._kv)


def _made(
    drafter: Path | Checkpoint,
    max_drafted: int,
    top_k: int,
    depth: int,
    weights: Format | None,
    temperature: float,
) -> Eagle3Drafter:
    return Eagle3Drafter(
        drafter, max_drafted, top_k=top_k, depth=depth, weights=weights, temperature=temperature
    )


def _format(checkpoint: Checkpoint) -> Format:
    """8 bits where every linear layer's input is made of whole groups."""
    inputs = {
        t.shape[-1]
        for name, t in checkpoint.tensors.items()
        if t.dim() == 2 and name != "embed_tokens.weight"
    }
    latent = checkpoint.shape.decoder.latent
    inputs |= {latent.nope_dim} if latent else set()
    return "bfloat16" if any(size % GROUP for size in inputs) else "q8_0"


def _embedding(checkpoint: Checkpoint, target: Target) -> Tensor | None:
    """The drafter's own embedding, where it is not the target's. Raises ModelError when it should have one."""
    own = checkpoint.tensors.get("embed_tokens.weight")
    if own is None:
        if checkpoint.shape.hidden_size != target.shape.hidden_size:
            raise ModelError(
                f"the drafter's states have {checkpoint.shape.hidden_size} elements, the target's embedding"
                f" {target.shape.hidden_size}, and the drafter brings no embedding of its own"
            )
        return None
    own = own.to(target.device, target.dtype)
    if len(own) != target.shape.vocab_size or own.shape[1] != target.shape.hidden_size:
        return own
    # All parts, as every rank makes the same calls, and one by one, as the target may have to add them up.
    parts = torch.arange(len(own), device=target.device).split(1024)
    same = [torch.equal(own[tokens], target.embed(tokens)) for tokens in parts]
    return None if all(same) else own
