"""Speculation never changes a text: every drafter, every tree shape, every batch, greedy and sampled."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.draft.ngram import NGramDrafter
from slipstream.engine.controller import Controller
from slipstream.engine.output import Output
from slipstream.engine.request import SamplingParams
from slipstream.engine.scheduler import Running
from tests.engine.toy import (
    MAX_ROWS,
    VOCABULARY,
    Pieces,
    ToyTarget,
    TreeDrafter,
    costs,
    greedy,
    run,
    scheduler,
)

TARGET = ToyTarget()


def naive(prompt: list[int], count: int) -> list[int]:
    """Greedy decoding without cache, table, tree or engine."""
    text = list(prompt)
    for _ in range(count):
        text.append(TARGET.next_token(text))
    return text[len(prompt) :]


def continuation(text: list[int], size: int) -> list[int]:
    return naive(text, size)


def always_right(text, size):
    return continuation(text, size), None


def always_wrong(text, size):
    right = continuation(text, size)
    return [(token + 1) % VOCABULARY for token in right], None


def right_then_wrong(text, size):
    right = continuation(text, size)
    return [*right[: size // 2], *((token + 1) % VOCABULARY for token in right[size // 2 :])], None


def repeating(text, size):
    return [text[-1]] * size, None


def duplicate_siblings(text, size):
    """A star under the root that holds the right token many times, then chains below the copies."""
    right = continuation(text, size)
    half = max(1, size // 2)
    tokens = [right[0]] * half + right[1 : size - half + 1]
    parents = [0] * half + [half if i == 0 else half + i for i in range(size - half)]
    return tokens[:size], parents[:size]


def random_tree(text, size):
    rng = random.Random(str(text) + str(size))
    right = continuation(text, size)
    tokens, parents, depth = [], [], [0]
    for node in range(size):
        parent = rng.randrange(node + 1)
        parents.append(parent)
        depth.append(depth[parent] + 1)
        is_right = rng.random() < 0.7
        tokens.append(right[depth[-1] - 1] if is_right else rng.randrange(VOCABULARY))
    return tokens, parents


DRAFTERS = [always_right, always_wrong, right_then_wrong, repeating, duplicate_siblings, random_tree]


@pytest.mark.parametrize("propose", DRAFTERS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("size", [1, 2, 3, 7, MAX_ROWS - 1])
def test_greedy_output_is_naive_decoding(propose, size):
    prompts = [[1], [2, 3, 4, 5], [0] * 9]
    expected = [naive(prompt, 21) for prompt in prompts]
    assert run(scheduler(TARGET), prompts, greedy(21), TreeDrafter(propose), size) == expected


@pytest.mark.parametrize(("propose", "per_cycle"), [(always_right, 8), (always_wrong, 1)])
def test_a_right_drafter_commits_everything_and_a_wrong_one_nothing(propose, per_cycle):
    engine = scheduler(TARGET, slots=1)
    request = Running([1, 2], greedy(24), Output(greedy(24), [], Pieces()), TreeDrafter(propose), 7)
    engine.waiting.append(request)
    while request.output.finish_reason is None:
        engine.step()
    assert request.stats.cycles == 24 / per_cycle
    assert sum(request.stats.accepted) == 24 - request.stats.cycles


@given(
    prompts=st.lists(
        st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20), min_size=1, max_size=5
    ),
    size=st.integers(1, MAX_ROWS - 1),
    drawn=st.randoms(use_true_random=False),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
)
@settings(max_examples=60, deadline=None)
def test_any_draft_leaves_any_text_unchanged(prompts, size, drawn, temperature, top_k, top_p):
    """Trees made by an adversary: right, wrong and repeated tokens in any arrangement, in batches that queue up."""

    def adversary(text, size):
        tokens, parents = [], []
        for node in range(size):
            parents.append(drawn.randrange(node + 1))
            kind = drawn.randrange(4)
            if kind == 0:
                tokens.append(TARGET.next_token(text))
            elif kind == 1:
                tokens.append(text[-1])
            elif kind == 2 and tokens:
                tokens.append(tokens[-1])
            else:
                tokens.append(drawn.randrange(VOCABULARY))
        return tokens, parents

    params = [
        SamplingParams(
            max_new_tokens=1 + 7 * i % 23, temperature=temperature, top_k=top_k, top_p=top_p, seed=i
        )
        for i, _ in enumerate(prompts)
    ]
    plain = run(scheduler(TARGET), prompts, params, None, None)
    one_by_one = [
        run(scheduler(TARGET, slots=1), [p], [q], None, None)[0] for p, q in zip(prompts, params, strict=True)
    ]
    assert plain == one_by_one
    assert run(scheduler(TARGET), prompts, params, TreeDrafter(adversary), size) == plain


def test_a_sampled_text_depends_on_its_seed_alone():
    def params(seed):
        return SamplingParams(max_new_tokens=40, temperature=1.0, seed=seed)

    first, again, other = (run(scheduler(TARGET), [[1, 2]], params(s), None, None)[0] for s in (5, 5, 6))
    assert first == again
    assert first != other


def test_ngram_with_the_controller_equals_plain_on_loops_and_noise():
    prompts = [[1, 2, 3, 4] * 6, [5], [7, 7, 7, 7, 7, 7]]
    plain = run(scheduler(TARGET), prompts, greedy(48), None, None)
    controller = Controller(costs(), MAX_ROWS - 1, is_free=True)
    engine = scheduler(TARGET, controller=controller)
    assert run(engine, prompts, greedy(48), NGramDrafter(MAX_ROWS - 1), None) == plain


def test_the_last_cache_slot_is_used_and_the_tree_may_hang_over_it():
    engine = scheduler(TARGET, slots=1, max_length=30)
    prompt = [1, 2, 3]
    assert run(engine, [prompt], greedy(27), TreeDrafter(always_right), MAX_ROWS - 1)[0] == naive(prompt, 27)


def test_kv_after_a_commit_is_the_kv_of_a_fresh_prefill():
    engine = scheduler(TARGET, slots=1)
    run(engine, [[3, 1, 4]], greedy(30), TreeDrafter(random_tree), 9)
    state = engine.runner.state
    length = int(state.text.length[0]) - 1
    held = state.kv[0][0][state.table[0, :length], 0]
    assert torch.equal(held, state.text.tokens[0, :length])


def test_a_cancelled_request_frees_its_slot():
    engine = scheduler(TARGET, slots=1)
    request = Running([1], greedy(9), Output(greedy(9), [], Pieces()), None)
    engine.waiting.append(request)
    engine.step()
    engine.cancel(request)
    assert run(engine, [[1, 2]], greedy(5), None, None)[0] == naive([1, 2], 5)
