"""What a drafter proposes: a tree of tokens under the last committed one. A chain is a tree, and so is nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """B trees of N drafted tokens each, of one static shape. Row 0 is the root, node i is row i + 1."""

    tokens: Tensor
    """int64 [B, N]"""
    valid: Tensor
    """bool [B, N]; a node that is not valid is verified as padding and never accepted, nor is anything below it."""
    parents: Tensor | None = None
    """int64 [B, N]: the row of each node's parent, always a lower row. None is a chain: node i hangs under row i."""
    max_depth: int = 0
    """The longest path that the shape allows (static); a chain's is N."""
    q: Tensor | None = None
    """float32 [B, N, V] where the drafter sampled: the distribution each node was drawn from, given the siblings
    before it. None for proposals that are not random."""

    @staticmethod
    def chain(tokens: Tensor, valid: Tensor, q: Tensor | None = None) -> Tree:
        """A chain of N tokens, tokens and valid [B, N]."""
        return Tree(tokens, valid, None, tokens.shape[1], q)

    @staticmethod
    def empty(batch: int, device: torch.device) -> Tree:
        """No draft at all: the cycle over it is plain decoding."""
        nothing = torch.empty(batch, 0, dtype=torch.int64, device=device)
        return Tree.chain(nothing, nothing.bool())

    @property
    def size(self) -> int:
        """N, the drafted tokens of one request."""
        return self.tokens.shape[1]

    @property
    def is_chain(self) -> bool:
        return self.parents is None

    @cached_property
    def row_parents(self) -> Tensor:
        """int64 [B, N + 1]: each row's parent row; the root is its own."""
        if self.parents is None:
            rows = torch.arange(-1, self.size, device=self.tokens.device).clamp_min(0)
            return rows.expand(self.tokens.shape[0], -1)
        return torch.cat([torch.zeros_like(self.parents[:, :1]), self.parents], dim=1)

    @cached_property
    def paths(self) -> tuple[Tensor, Tensor]:
        """depth int64 [B, N + 1], and ancestors int64 [B, N + 1, max_depth + 1]: the rows from the root to each
        row, itself at its depth; what lies beyond that repeats row 0."""
        batch, rows = self.row_parents.shape
        here = torch.arange(rows, device=self.tokens.device).expand(batch, -1)
        climbed = [here]
        for _ in range(self.max_depth):
            here = self.row_parents.gather(1, here)
            climbed.append(here)
        steps = torch.stack(climbed, dim=-1)  # [B, rows, max_depth + 1]: 0, 1, 2 ... steps towards the root
        depth = (steps[..., :-1] != 0).sum(-1)
        up = depth[..., None] - torch.arange(self.max_depth + 1, device=depth.device)
        ancestors = torch.where(up >= 0, steps.gather(-1, up.clamp_min(0)), 0)
        return depth, ancestors
