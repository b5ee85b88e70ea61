"""Several ranks, one engine: the same text as one rank, and one end for all."""

from __future__ import annotations

import pickle

import pytest

from slipstream.draft.eagle3.drafter import Eagle3Drafter
from slipstream.draft.ngram import NGramDrafter
from slipstream.engine.followers import Leader, follow
from slipstream.engine.output import Output
from slipstream.engine.rank import Rank, Settings
from slipstream.engine.request import SamplingParams
from slipstream.engine.scheduler import Running, Scheduler
from slipstream.errors import RankError, SlipstreamError
from tests.draft.heads import made
from tests.engine.toy import Pieces, TreeDrafter, check_invariants, greedy
from tests.target.ranks import on_ranks
from tests.target.tiny import VOCABULARY, write_model

PROMPTS = [[5, 6, 7, 8] * 3, [9, 10, 11], [40, 41, 40, 41, 40]]
PARAMS = [greedy(24), SamplingParams(16, temperature=0.8, top_p=0.9, seed=3), greedy(20)]


def settings(folder, tp, dtype="float32", weights="auto"):
    return Settings(str(folder), dtype, weights, 96, 3, "cpu", tp, "threads")


def complete(scheduler, drafter, size):
    """The output tokens of PROMPTS, run together."""
    requests = [
        Running(list(prompt), each, Output(each, [], Pieces()), drafter, size)
        for prompt, each in zip(PROMPTS, PARAMS, strict=True)
    ]
    scheduler.waiting.extend(requests)
    while scheduler.waiting or scheduler.running:
        scheduler.step()
        check_invariants(scheduler)
    return [request.output.token_ids for request in requests]


def alone(folder, drafter=None, size=0, **options):
    from slipstream.collectives.interface import Solo

    rank = Rank(settings(folder, 1, **options), Solo(), "cpu")
    rank.use(drafter)
    return complete(Scheduler(rank.runner, None), drafter, size)


def together(folder, tp, runs, spoil=None, **options):
    """The outputs of every (drafter, size) of `runs`, one after the other, on tp ranks."""

    def work(collectives):
        rank = Rank(settings(folder, tp, **options), collectives, "cpu")
        if collectives.rank:
            if spoil:
                spoil(rank)
            return follow(rank, collectives)
        leader, outputs = Leader(collectives, rank), []
        scheduler = Scheduler(leader, None)
        for drafter, size in runs:
            leader.use(drafter)
            outputs.append(complete(scheduler, drafter, size))
            leader.rest()
        leader.close()
        return outputs

    return on_ranks(tp, work)[0]


FAMILIES = {
    "llama": ("llama", {}),
    "uneven heads": ("llama", {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "one KV head": ("llama", {"num_key_value_heads": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3 moe": ("qwen3_moe", {}),
    "deepseek": ("deepseek_v3", {}),
    "kimi": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}),
}


def fork(text, size):
    """A tree over a text: two guesses under the root, the others under the first."""
    return [(text[-1] + 7 * node) % VOCABULARY for node in range(size)], [0, 0, *[1] * (size - 2)][:size]


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize(("family", "changes"), FAMILIES.values(), ids=FAMILIES)
def test_the_text_is_that_of_one_rank(tmp_path, family, changes, tp):
    """Plain, with chains and with trees; a batch of greedy and sampled requests, padded to a bucket."""
    write_model(tmp_path, family, **changes)
    expected = alone(tmp_path)
    runs = [(None, 0), (NGramDrafter(), 5), (None, 0), (TreeDrafter(fork), 3)]
    for output in together(tmp_path, tp, runs):
        assert output == expected


@pytest.mark.parametrize(
    ("dtype", "weights"), [("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("float32", "int4")]
)
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_speculative_equals_plain_in_every_format(tmp_path, family, dtype, weights):
    write_model(tmp_path, family, intermediate_size=96, moe_intermediate_size=64)
    runs = [(None, 0), (NGramDrafter(), 7), (TreeDrafter(fork), 3)]
    plain, *speculative = together(tmp_path, 2, runs, dtype=dtype, weights=weights)
    assert speculative == [plain, plain]


def test_eagle3_drafts_alike_on_every_rank(tmp_path):
    made(tmp_path)
    expected = alone(tmp_path)
    chains = Eagle3Drafter(tmp_path / "head", top_k=1, max_drafted=5)
    trees = Eagle3Drafter(tmp_path / "head", top_k=3, depth=3, max_drafted=7)
    for output in together(tmp_path, 2, [(chains, 4), (trees, 6), (chains, 2)]):
        assert output == expected


def test_an_attached_drafter_is_handed_on_without_its_state(tmp_path):
    made(tmp_path)
    drafter = Eagle3Drafter(tmp_path / "head", top_k=2, depth=2, max_drafted=3)
    alone(tmp_path, drafter, 3)
    copy = pickle.loads(pickle.dumps(drafter))
    assert (copy.max_drafted, copy.top_k, copy.depth) == (3, 2, 2)
    assert not hasattr(copy, "_kv")


def test_ranks_that_hold_different_texts_end(tmp_path):
    """One token of a prompt that only one rank holds: found by the next comparison."""
    write_model(tmp_path, "llama")

    def spoil(rank):
        put = rank.state.put
        object.__setattr__(rank.state, "put", lambda slot, prompt, *more: put(slot, [*prompt[:-1], 7], *more))

    with pytest.raises(RankError, match="rank 1 does not hold the text that rank 0 holds"):
        together(tmp_path, 2, [(None, 0)], spoil)


def test_a_drafter_that_no_rank_can_use_leaves_the_old_one(tmp_path):
    """Its states are of another size than the target's; all ranks refuse it, and go on."""
    made(tmp_path / "other")
    write_model(tmp_path, "llama", hidden_size=128)
    wrong = Eagle3Drafter(tmp_path / "other" / "head")

    def work(collectives):
        rank = Rank(settings(tmp_path, 2), collectives, "cpu")
        if collectives.rank:
            return follow(rank, collectives)
        leader, drafter = Leader(collectives, rank), NGramDrafter()
        leader.use(drafter)
        with pytest.raises(SlipstreamError, match=r"hidden|states|size"):
            leader.use(wrong)
        with pytest.raises(SlipstreamError, match="handed to the other ranks"):
            leader.use(TreeDrafter(lambda text, size: ([], [])))
        output = complete(Scheduler(leader, None), drafter, 4)
        leader.close()
        return output

    assert on_ranks(2, work)[0] == alone(tmp_path)
