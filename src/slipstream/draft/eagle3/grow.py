"""The dynamic tree of EAGLE-2 (arXiv 2406.16858, section 4): grown and pruned by the drafter's own confidence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.draft.tree import Tree


def capacity(width: int, levels: int) -> int:
    """The nodes that are proposed in so many levels."""
    return width + (levels - 1) * width * width


def depth_for(size: int, width: int, longest: int) -> int:
    """The levels of a tree of `size` nodes, `width` kept at each: enough to fill it, and no more than pay."""
    levels = 1
    while capacity(width, levels) < size:
        levels += 1
    return max(levels, min(longest, _USEFUL[min(size, len(_USEFUL) - 1)]))


_USEFUL = (0, 1, 2, 2, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 5, 5, 6)
"""By size: the levels beyond which a tree of that size hardly ever reaches."""


@dataclass
class Candidates:
    """All nodes that were proposed so far: B trees of C nodes; and the `width` that are to be run next."""

    scores: list[Tensor]
    """float32 [B, .] a level: the log-probability of the path from the root to each node, by the drafter."""
    drafted: list[Tensor]
    """int64 [B, .] a level: tokens, as the target numbers them."""
    parents: list[Tensor]
    """int64 [B, .] a level: node numbers, over all levels; -1 is the root."""
    tokens: Tensor
    """int64 [B, width]: of the nodes to run."""
    front: Tensor
    """float32 [B, width]: their scores."""
    nodes: Tensor
    """int64 [B, width]: their numbers."""

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    @staticmethod
    def first(logits: Tensor, ids: Tensor, width: int) -> Candidates:
        """The level under the root, from its logits [B, Vd]. ids: int64 [Vd], draft token to target token."""
        scores, chosen = _likeliest(logits, min(width, logits.shape[-1]))
        tokens = ids[chosen]
        nodes = torch.arange(tokens.shape[1], device=ids.device).expand_as(tokens)
        return Candidates([scores], [tokens], [torch.full_like(nodes, -1)], tokens, scores, nodes)

    def grow(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Adds a level from the logits [B, width, Vd] of the nodes that were run, and keeps the `width` best of it.

        Returns int64 [B, width]: which of the nodes that were run is each kept one's parent.
        """
        batch, width = self.tokens.shape
        scores, chosen = _likeliest(logits, width)
        scores = (self.front[..., None] + scores).view(batch, -1)
        tokens = ids[chosen].view(batch, -1)
        before = sum(level.shape[1] for level in self.scores)
        self.scores.append(scores)
        self.drafted.append(tokens)
        self.parents.append(self.nodes.repeat_interleave(width, dim=1))
        self.front, best = scores.topk(width, dim=1)
        self.tokens, self.nodes = tokens.gather(1, best), before + best
        return best // width

    def may_matter(self, size: int) -> bool:
        """Whether a node that grows from those to be run could be among the `size` best."""
        scores = torch.cat(self.scores, dim=1)
        if scores.shape[1] < size:
            return True
        worst = scores.topk(size, dim=1).values[:, -1]
        return bool((self.front.amax(1) > worst).any())

    def best(self, size: int, depth: int, is_valid: Tensor) -> Tree:
        """The `size` best nodes, the best first; a parent scores no less than its child, so it comes before it."""
        scores, order = torch.cat(self.scores, dim=1).sort(dim=1, descending=True, stable=True)
        order = order[:, :size]
        rows = torch.zeros(len(order), scores.shape[1] + 1, dtype=torch.int64, device=order.device)
        numbers = torch.arange(1, size + 1, device=order.device).expand_as(order)
        rows.scatter_(1, order + 1, numbers)  # by node number + 1: the row in the tree; the root's is 0
        parents = rows.gather(1, torch.cat(self.parents, dim=1).gather(1, order) + 1)
        tokens = torch.cat(self.drafted, dim=1).gather(1, order)
        return Tree(tokens, is_valid.expand_as(tokens), parents, depth)


def _likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The log-probabilities and indices of the `count` largest logits of each row; never above 0, which rounding is."""
    values, chosen = logits.topk(count, dim=-1)
    above = values - values[..., :1]  # the largest is at hand: `logsumexp` would look for it again
    return (above - (logits - values[..., :1]).exp_().sum(-1, keepdim=True).log_()).clamp_max(0), chosen
