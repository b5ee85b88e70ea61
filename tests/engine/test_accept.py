"""The accept rules against brute force, and the distribution of rejection sampling by chi-square."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from slipstream.draft.tree import Tree
from slipstream.engine.accept import Sampling, accept, keyed, rejection
from slipstream.kernels.sampling import sample

V = 5
REQUESTS = 40_000


@st.composite
def trees(draw):
    size = draw(st.integers(0, 9))
    parents = [draw(st.integers(0, node)) for node in range(size)]
    tokens = [draw(st.integers(0, 2)) for _ in range(size)]
    valid = [draw(st.booleans()) for _ in range(size)]
    drawn = [draw(st.integers(0, 2)) for _ in range(size + 1)]
    return parents, tokens, valid, drawn


def longest_path(parents, tokens, valid, drawn) -> int:
    """The deepest node whose whole path stands, by recursion from the root."""

    def below(row):
        children = [
            i + 1
            for i, parent in enumerate(parents)
            if parent == row and valid[i] and tokens[i] == drawn[row]
        ]
        return max((1 + below(child) for child in children), default=0)

    return below(0)


@given(st.lists(trees(), min_size=1, max_size=4).filter(lambda batch: len({len(t[0]) for t in batch}) == 1))
@settings(max_examples=300, deadline=None)
def test_keyed_acceptance_takes_the_longest_path(batch):
    parents, tokens, valid, drawn = (torch.tensor([each[i] for each in batch]) for i in range(4))
    size = parents.shape[1]
    tree = Tree(tokens.long(), valid.bool(), parents.long(), size)
    path = keyed(drawn, tree)
    for b, each in enumerate(batch):
        count = int(path.accepted[b])
        assert count == longest_path(*each)
        rows = path.rows[b, : count + 1].tolist()
        assert rows[0] == 0
        for depth in range(count):
            node = rows[depth + 1] - 1
            assert each[0][node] == rows[depth]
            assert each[1][node] == each[3][rows[depth]]
        assert path.tokens[b, : count + 1].tolist() == [each[3][row] for row in rows]


@given(st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_a_chain_is_a_tree(size, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 2, (3, size), generator=generator)
    valid = torch.rand(3, size, generator=generator) < 0.9
    drawn = torch.randint(0, 2, (3, size + 1), generator=generator)
    chain = Tree.chain(tokens, valid)
    tree = Tree(tokens, valid, torch.arange(size).expand(3, -1), size)
    for a, b in zip(chain.paths, tree.paths, strict=True):
        assert torch.equal(a, b)
    one, other = keyed(drawn, chain), keyed(drawn, tree)
    assert torch.equal(one.accepted, other.accepted)
    for b, count in enumerate(one.accepted.tolist()):
        assert torch.equal(one.tokens[b, : count + 1], other.tokens[b, : count + 1])


def test_depth_and_ancestors_of_a_small_tree():
    #      0
    #    1   2
    #    3   5      3 under 1, 5 under 2
    #    4          4 under 3
    tree = Tree(
        torch.zeros(1, 5, dtype=torch.int64), torch.ones(1, 5).bool(), torch.tensor([[0, 0, 1, 3, 2]]), 3
    )
    depth, ancestors = tree.paths
    assert depth.tolist() == [[0, 1, 1, 2, 3, 2]]
    assert ancestors[0, 4].tolist() == [0, 1, 3, 4]
    assert ancestors[0, 5, :3].tolist() == [0, 2, 5]


def test_the_empty_tree_commits_the_targets_token():
    tree = Tree.empty(2, torch.device("cpu"))
    logits = torch.tensor([[[0.0, 2.0, 1.0]], [[3.0, 2.0, 3.0]]])
    path = accept(logits, tree, None, torch.zeros(2, 1, dtype=torch.int64))
    assert path.accepted.tolist() == [0, 0]
    assert path.tokens.tolist() == [[1], [0]]  # a tie goes to the lowest id


def sampling(rows: int, temperature: float = 1.0) -> Sampling:
    every = Sampling.greedy(REQUESTS * rows, torch.device("cpu"))
    seeds = torch.arange(REQUESTS).repeat_interleave(rows)
    return Sampling(torch.full_like(every.temperature, temperature), every.top_k, every.top_p, seeds)


class Model:
    """A target and a drafter with known conditional distributions over V tokens."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.generator = generator
        self.first = torch.randn(V, generator=generator) * 1.5
        self.second = torch.randn(V, V, generator=generator) * 1.5  # by the first token
        self.third = torch.randn(V, V, generator=generator)
        self.q_first = torch.randn(V, generator=generator).softmax(0)
        self.q_second = torch.randn(V, V, generator=generator).softmax(1)

    def draw(self, q: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(q.expand(REQUESTS, -1) if q.dim() == 1 else q, 1, generator=self.generator)[
            :, 0
        ]

    def joint(self) -> torch.Tensor:
        return self.first.softmax(0)[:, None] * self.second.softmax(1)


def p_value(model: Model, tree: Tree, logits: torch.Tensor) -> float:
    """That the first two tokens of every request follow the target's joint distribution."""
    positions = (7 + tree.paths[0]).expand(REQUESTS, -1)
    path = rejection(logits, tree, sampling(tree.size + 1), positions)
    first, second = path.tokens[:, 0], path.tokens[:, min(1, tree.max_depth)]
    # Where only one token was committed, the next cycle draws the second one plainly.
    every = sampling(1)
    drawn = sample(
        model.second[first],
        every.temperature,
        every.top_k,
        every.top_p,
        every.seed,
        torch.full((REQUESTS,), 9),
    )
    second = torch.where(path.accepted >= 1, second, drawn)
    observed = torch.bincount(first * V + second, minlength=V * V).double()
    expected = model.joint().flatten().double() * REQUESTS
    return float(stats.chisquare(observed.numpy(), (expected * REQUESTS / expected.sum()).numpy()).pvalue)


def chain_of_two(
    model: Model, claimed_first: torch.Tensor, claimed_second: torch.Tensor
) -> tuple[Tree, torch.Tensor]:
    x1 = model.draw(model.q_first)
    x2 = model.draw(model.q_second[x1])
    q = torch.stack([claimed_first.expand(REQUESTS, -1), claimed_second[x1]], dim=1)
    tokens = torch.stack([x1, x2], dim=1)
    tree = Tree.chain(tokens, torch.ones_like(tokens, dtype=torch.bool), q)
    logits = torch.stack([model.first.expand(REQUESTS, -1), model.second[x1], model.third[x2]], dim=1)
    return tree, logits


@pytest.mark.parametrize("seed", range(3))
def test_chain_with_sampled_proposals_keeps_the_distribution(seed):
    model = Model(seed)
    assert p_value(model, *chain_of_two(model, model.q_first, model.q_second)) > 1e-3


def test_the_chi_square_sees_a_wrong_q():
    """A drafter that misstates its q (as one without the d2t scatter does) is caught, so the test above has power."""
    model = Model(0)
    assert p_value(model, *chain_of_two(model, torch.full((V,), 1 / V), model.q_second)) < 1e-12


@pytest.mark.parametrize("kind", ["one-hot", "independent", "without replacement"])
@pytest.mark.parametrize("seed", range(2))
def test_siblings_keep_the_distribution(kind, seed):
    """Three siblings under the root and one child below the second."""
    model = Model(10 + seed)
    q = model.q_first.expand(REQUESTS, -1)
    if kind == "one-hot":
        siblings = torch.tensor([2, 0, 2]).expand(REQUESTS, -1)  # a duplicate among them
        q_nodes = None
    elif kind == "independent":
        siblings = torch.stack([model.draw(q) for _ in range(3)], dim=1)
        q_nodes = torch.stack([q] * 3, dim=1)
    else:
        drawn, left, given_q = [], q.clone(), []
        for _ in range(3):
            given_q.append(left / left.sum(1, keepdim=True))
            drawn.append(model.draw(given_q[-1]))
            left = left.scatter(1, drawn[-1][:, None], 0)
        siblings, q_nodes = torch.stack(drawn, dim=1), torch.stack(given_q, dim=1)
    child = model.draw(model.q_second[siblings[:, 1]])
    tokens = torch.cat([siblings, child[:, None]], dim=1)
    parents = torch.tensor([0, 0, 0, 2]).expand(REQUESTS, -1)
    if q_nodes is not None:
        q_nodes = torch.cat([q_nodes, model.q_second[siblings[:, 1]][:, None]], dim=1)
    tree = Tree(tokens, torch.ones_like(tokens, dtype=torch.bool), parents, 2, q_nodes)
    if kind == "one-hot":  # then the child's proposal counts as one-hot, too: it must not be random
        tokens = torch.cat([siblings, torch.full((REQUESTS, 1), 3)], dim=1)
        tree = Tree(tokens, torch.ones_like(tokens, dtype=torch.bool), parents, 2)
    logits = torch.cat(
        [
            model.first.expand(REQUESTS, 1, -1),
            model.second[siblings],
            model.third[tree.tokens[:, 3]][:, None],
        ],
        dim=1,
    )
    assert p_value(model, tree, logits) > 1e-3


def test_rejection_at_temperature_zero_is_greedy():
    model = Model(3)
    tree, logits = chain_of_two(model, model.q_first, model.q_second)
    positions = tree.paths[0].expand(REQUESTS, -1)
    path = rejection(logits, tree, sampling(3, temperature=0.0), positions)
    greedy = keyed(logits.argmax(-1), tree)
    assert torch.equal(path.accepted, greedy.accepted)
    for depth in range(3):
        is_committed = path.accepted >= depth
        assert torch.equal(path.tokens[is_committed, depth], greedy.tokens[is_committed, depth])


def test_a_proposal_outside_the_targets_support_is_never_accepted():
    model = Model(4)
    tree, logits = chain_of_two(model, model.q_first, model.q_second)
    logits = logits.clone()
    logits[torch.arange(REQUESTS), 0, tree.tokens[:, 0]] = float("-inf")
    path = rejection(logits, tree, sampling(3), tree.paths[0].expand(REQUESTS, -1))
    assert int(path.accepted.max()) == 0
    assert not bool((path.tokens[:, 0] == tree.tokens[:, 0]).any())
