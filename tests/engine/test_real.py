"""The engine on real weights: equal to transformers, equal to itself without speculation, in any batch."""

from __future__ import annotations

import pytest
import torch

import slipstream
from slipstream.draft.drafter import Drafter
from slipstream.draft.tree import Tree
from slipstream.engine.state import State
from slipstream.errors import RequestError
from tests.target.tiny import FAMILIES, VOCABULARY, write_model

PROMPTS = [
    "Why is the sky blue?",
    "Write a Python function that reverses a list.",
    "Repeat this sentence three times: the quick brown fox jumps over the lazy dog.",
    "Name three large cities in Europe and one thing each is known for.",
    "What is 12 plus 30?",
    "Correct the spelling: I beleive this sentense has erors.",
    "List the months of the year.",
    "Explain in one paragraph what a transformer model is.",
]


def params(count: int, **more) -> slipstream.SamplingParams:
    return slipstream.SamplingParams(max_new_tokens=count, ignore_eos=True, **more)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_64_greedy_tokens_equal_transformers(smollm2, reference_smollm2, prompt):
    ids = smollm2.tokens_of(prompt)
    plain = smollm2.generate(prompt, params(64), speculate=False).token_ids
    with (
        torch.no_grad()
    ):  # one forward over the whole text: each token has to be the likeliest after those before it
        logits = reference_smollm2(torch.tensor([ids + plain[:-1]])).logits[0, len(ids) - 1 :]
    assert logits.argmax(-1).tolist() == plain
    assert smollm2.generate(prompt, params(64)).token_ids == plain


@pytest.mark.parametrize("draft_tokens", [None, 1, 7, 31])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculative_equals_plain_in_bfloat16(smollm2_bf16, draft_tokens, temperature):
    sampling = params(48, temperature=temperature, top_p=0.95, seed=3)
    for prompt in PROMPTS[1:4]:
        plain = smollm2_bf16.generate(prompt, sampling, speculate=False)
        speculative = smollm2_bf16.generate(prompt, sampling, draft_tokens=draft_tokens)
        assert speculative.token_ids == plain.token_ids
        assert speculative.text == plain.text


def test_a_batch_of_different_lengths_equals_one_by_one(smollm2_bf16):
    every = [params(8 + 9 * i, temperature=0.7 * (i % 2), seed=i) for i in range(len(PROMPTS))]
    alone = [
        smollm2_bf16.generate(p, q, speculate=False).token_ids for p, q in zip(PROMPTS, every, strict=True)
    ]
    for speculate in (False, True):
        together = smollm2_bf16.generate_batch(PROMPTS, every, speculate=speculate)
        assert [each.token_ids for each in together] == alone


def test_stream_gives_the_same_text_in_pieces(smollm2_bf16):
    chunks = list(smollm2_bf16.stream(PROMPTS[2], params(40)))
    whole = smollm2_bf16.generate(PROMPTS[2], params(40))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert chunks[-1].stats is not None
    assert chunks[-1].stats.new_tokens == 40


def test_streams_that_are_open_together_keep_their_texts_apart(smollm2_bf16):
    alone = [smollm2_bf16.generate(prompt, params(12)).token_ids for prompt in PROMPTS[:2]]
    first, second = (smollm2_bf16.stream(prompt, params(12)) for prompt in PROMPTS[:2])
    begun = next(first).token_ids + next(first).token_ids
    together = [token for chunk in second for token in chunk.token_ids]
    begun += [token for chunk in first for token in chunk.token_ids]
    assert [begun, together] == alone


def test_an_abandoned_stream_leaves_no_request_behind(smollm2_bf16):
    stream = smollm2_bf16.stream(PROMPTS[0], params(40))
    next(stream)
    stream.close()
    assert not smollm2_bf16._scheduler.running
    assert smollm2_bf16.generate(PROMPTS[4], params(4)).stats.new_tokens == 4


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write_model(folder, request.param)
    return folder


class RandomTrees(Drafter):
    """Random trees of few distinct tokens, so that some are right, with siblings that repeat."""

    name, max_drafted = "random", 31

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def draft(self, text, slots, size):
        def draw(high, *shape):
            return torch.randint(0, high, shape, generator=self.generator)

        recent = text.tokens[slots][:, :64]
        tokens = recent.gather(1, draw(8, len(slots), size))
        parents = torch.stack([draw(node + 1, len(slots)) for node in range(size)], dim=1)
        return Tree(tokens, torch.ones_like(tokens).bool(), parents, size)


@pytest.mark.parametrize(
    ("dtype", "weights"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "int4")]
)
@pytest.mark.parametrize("draft_tokens", [1, 6, 31])
def test_random_trees_on_a_tiny_model_change_nothing(tiny, dtype, weights, draft_tokens):
    engine = slipstream.Engine(
        str(tiny), draft=RandomTrees(draft_tokens), dtype=dtype, weights=weights, max_length=200, max_batch=3
    )
    prompts = ["A B C D", "E", "$ $ $ % %", "X Y Z X Y Z X"]
    sampling = [params(60 + i, temperature=0.9 * (i % 2), seed=i) for i in range(4)]
    plain = engine.generate_batch(prompts, sampling, raw=True, speculate=False)
    drafted = engine.generate_batch(prompts, sampling, raw=True, draft_tokens=draft_tokens)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_after_trees_is_bitwise_that_of_a_fresh_prefill(tiny, dtype):
    engine = slipstream.Engine(str(tiny), draft=RandomTrees(0), dtype=dtype, max_length=200, max_batch=1)
    engine.generate("A B C A B C", params(80), raw=True, draft_tokens=11)
    state, target = engine._state, engine.model.target
    length = int(state.text.length[0])
    fresh = State.allocate(target.kv_layout(), 1, 200, 32, engine.model.dtype, torch.device("cpu"))
    fresh.put(0, state.text.tokens[0, :length].tolist(), 0.0, 0, 1.0, 0)
    target.forward(fresh.known_rows(0, 0, length - 1), fresh.kv)
    for ours, theirs in zip(state.kv, fresh.kv, strict=True):
        for held, expected in zip(ours, theirs, strict=True):
            assert torch.equal(held[state.table[0, : length - 1]], expected[fresh.table[0, : length - 1]])


def test_threads_do_not_change_a_bit(tiny):
    engine = slipstream.Engine(str(tiny), dtype="bfloat16", max_length=200)
    texts = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        texts.append(engine.generate("A B C", params(60), raw=True).token_ids)
    assert texts[0] == texts[1]


def test_limits_are_named(tiny):
    engine = slipstream.Engine(str(tiny), dtype="float32", max_length=32)
    with pytest.raises(RequestError, match="max_length 32"):
        engine.generate("A B C", params(30), raw=True)
    with pytest.raises(RequestError, match="empty"):
        engine.generate("", params(3))
    with pytest.raises(RequestError, match="empty"):
        engine.generate([], params(3))
    assert engine.generate("A B C", params(29), raw=True).stats.new_tokens == 29
    assert engine.generate("A", params(1), raw=True).stats.prompt_tokens == 1
    with pytest.raises(RequestError, match="draft_tokens"):
        engine.generate("A", params(1), raw=True, draft_tokens=32)
    ids = engine.tokens_of("A B C", raw=True)
    assert (
        engine.generate(ids, params(9)).token_ids == engine.generate("A B C", params(9), raw=True).token_ids
    )
    for wrong in (VOCABULARY, -1):
        with pytest.raises(RequestError, match=f"token {wrong};"):
            engine.generate([*ids, wrong], params(3))


def test_step_costs_and_description(tiny):
    engine = slipstream.Engine(str(tiny), dtype="float32", max_length=64)
    costs = engine.step_costs((1, 4), rounds=2)
    assert set(costs) == {1, 4}
    assert all(us > 0 for us in costs.values())
    assert engine.describe()["draft"] == "ngram"
    with pytest.raises(slipstream.SlipstreamError, match="rows"):
        engine.step_costs((0,))
