"""The accept rule: which of the drafted tokens stand, and what comes after them.

Keyed acceptance (greedy, and sampling from drafters whose proposals are not random): every row's next token is the
target's own, drawn with the noise of its position, and a drafted child stands when it equals it. Nothing about the
draft enters the text, so plain and speculative texts are the same, token for token.

Rejection sampling (drafters that sample from q): Leviathan et al. 2023 (arXiv 2211.17192) and, for the siblings of a
tree, SpecInfer (arXiv 2305.09781): accept x with probability min(1, p(x) / q(x)), else go on with the residual
max(p - q, 0), renormalised. A proposal that is not random has q = 1 at its token. The text then has the target's
distribution, but is not the same as the plain one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.draft.tree import Tree
from slipstream.kernels.sampling import argmax, filtered_logits, gumbel, sample, uniform


@dataclass(frozen=True)
class Sampling:
    """How each slot's (or row's) tokens are chosen; all of one length."""

    temperature: Tensor
    """float32; 0 is greedy"""
    top_k: Tensor
    """int64; 0 keeps all"""
    top_p: Tensor
    """float32; 1 keeps all"""
    seed: Tensor
    """int64"""

    @staticmethod
    def greedy(count: int, device: torch.device) -> Sampling:
        return Sampling(
            torch.zeros(count, device=device),
            torch.zeros(count, dtype=torch.int64, device=device),
            torch.ones(count, device=device),
            torch.zeros(count, dtype=torch.int64, device=device),
        )

    def rows(self, slots: Tensor, rows: int) -> Sampling:
        """For a batch of `rows` rows a slot, flattened: [B * rows] each."""
        at = slots.repeat_interleave(rows)
        return Sampling(self.temperature[at], self.top_k[at], self.top_p[at], self.seed[at])


@dataclass(frozen=True)
class Path:
    """What was accepted of B trees, D = max_depth of the shape."""

    accepted: Tensor
    """int64 [B]: drafted tokens that stand."""
    tokens: Tensor
    """int64 [B, D + 1]: the committed tokens, accepted ones and then the target's own; the rest is arbitrary."""
    rows: Tensor
    """int64 [B, D + 1]: the tree rows on the path, the root first; 0 beyond its end."""


def accept(logits: Tensor, tree: Tree, sampling: Sampling | None, positions: Tensor) -> Path:
    """The path that stands, for logits float32 [B, N + 1, V] over a tree of N nodes.

    sampling: one entry a row, [B * (N + 1)]; None when the whole batch is greedy. positions: int64 [B, N + 1] of the
    rows; the token drawn from a row stands one further.
    """
    batch, rows, vocabulary = logits.shape
    if sampling is not None and tree.q is not None:
        return rejection(logits, tree, sampling, positions)
    flat = logits.view(batch * rows, vocabulary)
    if sampling is None:
        drawn = argmax(flat)
    else:
        position = positions.reshape(-1) + 1
        drawn = sample(flat, sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed, position)
    return keyed(drawn.view(batch, rows), tree)


def keyed(drawn: Tensor, tree: Tree) -> Path:
    """The path of drafted tokens that equal what was drawn (int64 [B, N + 1]) from their parents' rows."""
    if tree.size == 0:
        none = torch.zeros_like(drawn[:, 0])
        return Path(none, drawn, none[:, None])
    if tree.is_chain:
        stands = (tree.tokens == drawn[:, :-1]) & tree.valid
        accepted = stands.to(torch.int64).cumprod(1).sum(1)
        rows = torch.arange(tree.size + 1, device=drawn.device).expand(drawn.shape[0], -1)
        return Path(accepted, drawn, rows)
    parents = tree.row_parents
    matches = (tree.tokens == drawn.gather(1, parents[:, 1:])) & tree.valid
    matches = torch.cat([torch.ones_like(matches[:, :1]), matches], dim=1)
    stands = matches
    for _ in range(tree.max_depth - 1):
        stands = matches & stands.gather(1, parents)
    depth, ancestors = tree.paths
    # Two siblings may hold the same token; the deepest path through either is as right as the other.
    accepted, last = torch.where(stands, depth, -1).max(dim=1)
    rows = ancestors.gather(1, last[:, None, None].expand(-1, -1, ancestors.shape[2]))[:, 0]
    return Path(accepted, drawn.gather(1, rows), rows)


_COIN = -0x61C8864680B583EB
"""Mixed into the seed of acceptance coins, which must not depend on the noise of the draws at the same position."""


def rejection(logits: Tensor, tree: Tree, sampling: Sampling, positions: Tensor) -> Path:
    """Multi-round rejection sampling over a tree. Rows at temperature 0 have a one-hot target distribution."""
    batch, rows, vocabulary = logits.shape
    p = _target_distribution(logits.view(-1, vocabulary), sampling).view(batch, rows, vocabulary)
    every = torch.arange(batch, device=logits.device)
    seed = sampling.seed.view(batch, rows)[:, 0]
    coins = uniform(seed + _COIN, positions[:, 0] + 1, rows)
    at = torch.zeros(batch, dtype=torch.int64, device=logits.device)  # the row that the path has reached
    residual = p[:, 0]
    accepted = torch.zeros_like(at)
    path_rows = torch.zeros(batch, tree.max_depth + 1, dtype=torch.int64, device=logits.device)
    for node in range(tree.size):
        token = tree.tokens[:, node]
        q = _proposal(tree, node, vocabulary)
        is_tried = (tree.row_parents[:, node + 1] == at) & tree.valid[:, node]
        stands = is_tried & (coins[:, node] * q[every, token] < residual[every, token])
        left = (residual - q).clamp_min(0)
        mass = left.sum(-1, keepdim=True)
        # No mass left means p == q up to rounding, where a rejection has probability 0 up to rounding.
        left = torch.where(mass > 0, left / mass.clamp_min(torch.finfo(left.dtype).tiny), residual)
        at = torch.where(stands, node + 1, at)
        accepted = accepted + stands
        path_rows.scatter_(1, torch.where(stands, accepted, 0)[:, None], torch.where(stands, at, 0)[:, None])
        is_rejected = is_tried & ~stands
        residual = torch.where(
            stands[:, None], p[:, node + 1], torch.where(is_rejected[:, None], left, residual)
        )
    noise = gumbel(seed, positions[every, at] + 1, vocabulary)
    final = argmax((residual.log() + noise).float())
    drafted = torch.cat([tree.tokens.new_zeros(batch, 1), tree.tokens], dim=1).gather(1, path_rows)
    tokens = torch.cat([drafted[:, 1:], final[:, None]], dim=1).scatter(1, accepted[:, None], final[:, None])
    return Path(accepted, tokens, path_rows)


def _target_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """float32 [R, V]: what the target samples from, after temperature, top-k and top-p."""
    filtered = filtered_logits(logits, sampling.temperature, sampling.top_k, sampling.top_p)
    one_hot = torch.nn.functional.one_hot(argmax(logits), logits.shape[-1])
    return torch.where((sampling.temperature > 0)[:, None], filtered.softmax(-1), one_hot.to(filtered.dtype))


def _proposal(tree: Tree, node: int, vocabulary: int) -> Tensor:
    """float32 [B, V]: the distribution that a node was drawn from; one-hot where the drafter does not sample."""
    if tree.q is not None:
        return tree.q[:, node]
    return torch.nn.functional.one_hot(tree.tokens[:, node], vocabulary).float()
