"""Sampled text has the target's distribution, by chi-square, whatever is drafted: through the whole cycle."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from scipy import stats

import slipstream
from slipstream.draft.drafter import Drafter
from slipstream.draft.eagle3.drafter import Eagle3Drafter
from slipstream.draft.tree import Tree
from slipstream.engine.request import SamplingParams
from tests.draft.heads import made
from tests.engine.toy import VOCABULARY, ToyTarget, run, scheduler, sequence_hash

PROMPT = [1, 5, 2]
REQUESTS = 3000
NEVER_BY_CHANCE = 1e-4
"""A right engine fails one run in 10,000 of each test; seeds are fixed, so it either does or does not."""


def p_value(observed: Counter, expected: dict) -> float:
    """Of the observed counts, cells that expect less than five thrown together."""
    count = sum(observed.values())
    seen, wanted, rest_seen, rest_wanted = [], [], 0.0, 0.0
    for cell, share in expected.items():
        if share * count < 5:
            rest_seen, rest_wanted = rest_seen + observed[cell], rest_wanted + share * count
        else:
            seen.append(observed[cell])
            wanted.append(share * count)
    assert set(observed) <= set(expected)
    if rest_wanted > 0:
        seen, wanted = [*seen, rest_seen], [*wanted, rest_wanted]
    scale = sum(seen) / sum(wanted)
    return float(stats.chisquare(seen, [w * scale for w in wanted]).pvalue)


def toy_pairs(target: ToyTarget) -> dict:
    """The probability of every pair of first tokens."""

    def after(tokens):
        return target.logits(torch.tensor([[sequence_hash(tokens)]]))[0].softmax(-1)

    first = after(PROMPT)
    return {
        (a, b): float(first[a] * p)
        for a in range(VOCABULARY)
        for b, p in enumerate(after([*PROMPT, a]).tolist())
    }


class Sampler(Drafter):
    """Draws from a distribution of its own, as a chain of two or as a tree: two siblings without replacement under the
    root and a child under each."""

    name, max_drafted = "sampler", 4

    def __init__(self, is_tree: bool, is_honest: bool = True) -> None:
        self.draw, self.is_tree = torch.Generator().manual_seed(1), is_tree
        self.tilt = torch.linspace(0, 2, VOCABULARY)
        self.is_honest = is_honest

    def draft(self, text, slots, size):
        q = self.tilt.softmax(-1).expand(len(slots), -1)
        first = torch.multinomial(q, 2 if self.is_tree else 1, generator=self.draw)
        without = q.scatter(1, first[:, :1], 0)
        without = without / without.sum(-1, keepdim=True)
        below = [torch.multinomial(q, 1, generator=self.draw) for _ in range(first.shape[1])]
        tokens = torch.cat([first, *below], dim=1)
        told = [q, without, q, q] if self.is_tree else [q, q]
        if not self.is_honest:
            told = [torch.full_like(q, 1 / VOCABULARY)] * len(told)
        valid = torch.ones_like(tokens, dtype=torch.bool)
        if not self.is_tree:
            return Tree.chain(tokens, valid, torch.stack(told, 1))
        parents = torch.tensor([0, 0, 1, 2]).expand_as(tokens)
        return Tree(tokens, valid, parents, 2, torch.stack(told, 1))


class OneHot(Sampler):
    """The same without a word about how they were drawn: keyed acceptance."""

    def draft(self, text, slots, size):
        tree = super().draft(text, slots, size)
        return Tree(tree.tokens, tree.valid, tree.parents, tree.max_depth)


@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", [Sampler, OneHot])
def test_pairs_of_tokens_on_a_toy_vocabulary(kind, is_tree):
    target = ToyTarget(sharpness=3.0)
    drafter = kind(is_tree)
    params = [SamplingParams(max_new_tokens=2, temperature=1.0, seed=seed) for seed in range(REQUESTS)]
    engine = scheduler(target, slots=48, max_length=16)
    pairs = run(engine, [PROMPT] * REQUESTS, params, drafter, 4 if is_tree else 2)
    assert p_value(Counter(map(tuple, pairs)), toy_pairs(target)) > NEVER_BY_CHANCE


def test_the_chi_square_sees_a_drafter_that_lies():
    target = ToyTarget(sharpness=3.0)
    params = [SamplingParams(max_new_tokens=2, temperature=1.0, seed=seed) for seed in range(REQUESTS)]
    engine = scheduler(target, slots=48, max_length=16)
    pairs = run(engine, [PROMPT] * REQUESTS, params, Sampler(False, is_honest=False), 2)
    assert p_value(Counter(map(tuple, pairs)), toy_pairs(target)) < NEVER_BY_CHANCE


@pytest.mark.parametrize(
    "settings",
    [{"top_k": 1, "temperature": 1.0}, {"top_k": 1}, {"top_k": 3}],
    ids=["sampled", "chain", "tree"],
)
def test_pairs_of_tokens_with_eagle3(tmp_path, settings):
    torch.set_num_threads(1)
    made(tmp_path)
    drafter = Eagle3Drafter(tmp_path / "head", weights="float32", **settings)
    engine = slipstream.Engine(str(tmp_path), draft=drafter, dtype="float32", max_length=40, max_batch=48)
    heat = 2.0
    params = [
        SamplingParams(max_new_tokens=3, temperature=heat, seed=seed, ignore_eos=True, top_k=8)
        for seed in range(REQUESTS)
    ]
    texts = [
        done.token_ids
        for done in engine.generate_batch([[7, 8, 9]] * REQUESTS, params, raw=True, draft_tokens=3)
    ]
    plain = slipstream.Engine(str(tmp_path), draft=None, dtype="float32", max_length=40, max_batch=1)

    def after(tokens):
        from tests.target.tiny import forward

        logits = forward(plain.model.target, torch.tensor(tokens))[-1] / heat
        kept = logits.topk(8)
        return dict(zip(kept.indices.tolist(), kept.values.softmax(-1).tolist(), strict=True))

    pairs = {(a, b): p * q for a, p in after([7, 8, 9]).items() for b, q in after([7, 8, 9, a]).items()}
    assert p_value(Counter(tuple(text[:2]) for text in texts), pairs) > NEVER_BY_CHANCE
