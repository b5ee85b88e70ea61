"""All state of the running requests, in tensors of fixed shapes on the device (design rules 2 and 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.draft.text import Text
from slipstream.draft.tree import Tree
from slipstream.engine.accept import Path, Sampling
from slipstream.target.family import KVCache
from slipstream.target.rows import KVTensor, Rows

_FACTOR = 0x5851F42D4C957F2D
"""Odd and without a pattern (the multiplier of Knuth's MMIX): checksums multiply by it, modulo 2^64."""


@dataclass(frozen=True)
class State:
    """S slots, one request each; slot S - 1 is never given out and pads a batch to its bucket.

    P, the width of the tables, is the longest text plus room for two trees: the last tree of a request may hang over
    its end, and on a GPU the next one may start before the host has seen that.
    """

    text: Text
    table: Tensor
    """int64 [S, P]: the KV row of each (slot, index). Every row stands in it exactly once, always."""
    kv: KVCache
    sampling: Sampling
    max_length: int

    @staticmethod
    def allocate(
        layout: list[tuple[KVTensor, ...]],
        slots: int,
        max_length: int,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> State:
        """Room for `slots` texts of up to max_length tokens, and trees of up to max_rows rows, beside the padding.

        layout: the KV tensors of one row, by layer, as the model family declares them.
        """
        count, width = slots + 1, max_length + 2 * max_rows
        table = torch.arange(count * width, device=device).view(count, width)
        # Zeros: a device's own attention multiplies what it masks, and NaN would survive that.
        kv = [
            tuple(torch.zeros(count * width, *part.shape, dtype=dtype, device=device) for part in layer)
            for layer in layout
        ]
        text = Text(
            torch.zeros(count, width, dtype=torch.int64, device=device),
            torch.ones(count, dtype=torch.int64, device=device),
        )
        return State(text, table, kv, Sampling.greedy(count, device), max_length)

    @property
    def padding_slot(self) -> int:
        return self.table.shape[0] - 1

    def put(
        self, slot: int, prompt: list[int], temperature: float, top_k: int, top_p: float, seed: int
    ) -> None:
        """Starts a request in a slot. Nothing of its KV is computed yet."""
        self.text.tokens[slot, : len(prompt)] = torch.tensor(prompt, device=self.table.device)
        self.text.length[slot] = len(prompt)
        self.sampling.temperature[slot] = temperature
        self.sampling.top_k[slot] = top_k
        self.sampling.top_p[slot] = top_p
        self.sampling.seed[slot] = seed

    def checksum(self, slots: Sequence[int]) -> int:
        """Of the committed texts of these slots: the same on every rank, or the ranks do not agree."""
        length = self.text.length[list(slots)]
        text = self.text.tokens[list(slots), : int(length.max())]
        place = torch.arange(text.numel(), device=text.device).view(text.shape) + 1
        is_inside = torch.arange(text.shape[1], device=text.device) < length[:, None]
        words = (text + 1) * place * _FACTOR
        return int(((words ^ words >> 32) * _FACTOR * is_inside).sum())

    def tree_rows(self, slots: Tensor, tree: Tree, extent: int) -> Rows:
        """The rows of a verify step: each slot's last committed token and the tree under it."""
        prefix = self.text.length[slots] - 1
        at = slots[:, None]
        index = prefix[:, None] + torch.arange(tree.size + 1, device=slots.device)
        root = self.text.tokens[at, prefix[:, None]]
        depth, ancestors = (None, None) if tree.is_chain else tree.paths
        return Rows(
            tokens=torch.cat([root, tree.tokens], dim=1) if tree.size else root,
            positions=index if depth is None else prefix[:, None] + depth,
            kv_rows=self.table[at, index],
            table=self.table,
            slots=slots,
            prefix=prefix,
            depth=depth,
            ancestors=ancestors,
            extent=extent,
        )

    def known_rows(self, slot: int, start: int, end: int) -> Rows:
        """The rows of a prefill: tokens start .. end - 1 of a slot's text, as a chain."""
        index = torch.arange(start, end, device=self.table.device)[None]
        slots = torch.tensor([slot], device=self.table.device)
        return Rows(
            tokens=self.text.tokens[slots[:, None], index],
            positions=index,
            kv_rows=self.table[slots[:, None], index],
            table=self.table,
            slots=slots,
            prefix=index[:, 0],
            extent=end,
        )

    def commit(self, slots: Tensor, tree: Tree, path: Path) -> None:
        """Appends the path's tokens, and brings its KV rows into the order of the text.

        Only table entries move; gathered first, then scattered, as source and destination overlap. What the path left
        out follows it, so that no row is lost.
        """
        at = slots[:, None]
        length = self.text.length[slots]
        index = length[:, None] + torch.arange(path.tokens.shape[1], device=slots.device)
        self.text.tokens[at, index] = path.tokens
        if not tree.is_chain:
            order = self._path_first(tree.size + 1, path)
            index = (length - 1)[:, None] + torch.arange(tree.size + 1, device=slots.device)
            self.table[at, index] = self.table[at, index].gather(1, order)
        self.text.length[slots] = length + path.accepted + 1

    @staticmethod
    def _path_first(rows: int, path: Path) -> Tensor:
        """int64 [B, rows]: the path's tree rows by depth, then all the others in their order."""
        batch, depths = path.rows.shape
        rank = torch.arange(rows, device=path.rows.device).repeat(batch, 1) + depths
        depth = torch.arange(depths, device=path.rows.device).expand(batch, -1)
        on_path = depth <= path.accepted[:, None]
        # Entries beyond the path's end name row 0, which is on the path at depth 0: rank 0 either way.
        rank.scatter_reduce_(1, torch.where(on_path, path.rows, 0), torch.where(on_path, depth, 0), "amin")
        return rank.argsort(dim=1)
