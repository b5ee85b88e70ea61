"""Evaluation: figures equal to loops over single positions, and those of the real cycle to its token counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import slipstream
from slipstream.draft.eagle3.checkpoint import Checkpoint
from slipstream.draft.eagle3.drafter import SMOLLM2_HEAD, Eagle3Drafter
from slipstream.engine.request import SamplingParams
from slipstream.errors import DataError, SlipstreamError
from slipstream.train import evaluate
from slipstream.train.acceptance import Acceptance
from slipstream.train.drafted import DraftShape, drafted
from slipstream.train.evaluate import looping, teacher_forced
from slipstream.train.samples import LOOPING, loops
from slipstream.train.states import OnlineStates
from tests.draft.heads import made
from tests.train.toy import DRAFT_IDS, Toy, alone, make_forgetful, module_of, samples_of

STEPS = 3
MASKS = st.lists(st.lists(st.booleans(), max_size=14), min_size=1, max_size=8)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def module():
    return module_of()


def by_hand(module, toy, samples):
    """Every sum of `Acceptance` and every draft's end, from one position at a time."""
    names = "counted right seen drafted in_vocabulary overlap counted_draftable lenient_counted lenient_right"
    sums = {name: [0.0] * STEPS for name in names.split()}
    for number in range(len(samples)):
        mask = samples.sample(number)[1].tolist()
        logits = alone(module, toy, samples, number, STEPS).detach().double()
        for start in range(len(mask)):
            alive = lenient = True
            for step in range(STEPS):
                place = start + step + 2
                if place >= len(mask) or not mask[place]:
                    alive = lenient = False  # not a token that anything is measured on
                    continue
                p = toy.hidden[number][place - 1].double().softmax(-1)
                q = logits[step, start].softmax(-1)
                guess, best = DRAFT_IDS[int(q.argmax())], int(p.argmax())
                draftable = max(DRAFT_IDS, key=lambda token, p=p: float(p[token]))
                found = {
                    "counted": alive,
                    "right": alive and guess == best,
                    "seen": True,
                    "drafted": guess == best,
                    "in_vocabulary": best in DRAFT_IDS,
                    "overlap": sum(min(float(p[t]), float(q[i])) for i, t in enumerate(DRAFT_IDS)),
                    "counted_draftable": alive and best in DRAFT_IDS,
                    "lenient_counted": lenient,
                    "lenient_right": lenient and guess == draftable,
                }
                for name, value in found.items():
                    sums[name][step] += value
                alive, lenient = found["right"], found["lenient_right"]
    return sums


def assert_sums(found: Acceptance, expected) -> None:
    for name, values in expected.items():
        assert getattr(found, name) == pytest.approx(values, abs=1e-4), name


@settings(max_examples=40, deadline=None)
@given(MASKS, st.integers(0, 99), st.integers(14, 40), st.integers(1, 3))
def test_figures_are_those_of_single_positions(module, masks, seed, row_length, rows):
    samples = samples_of(masks, seed)
    toy = Toy([len(mask) for mask in masks], seed)
    if not any(masks):
        with pytest.raises(DataError, match="no sample"):
            teacher_forced(module, toy, samples, toy, STEPS, row_length)
        return
    found = teacher_forced(module, toy, samples, toy, STEPS, row_length, rows=rows)
    assert_sums(found, by_hand(module, toy, samples))
    assert 0 <= found.coverage <= 1 <= found.tokens_a_cycle <= 1 + STEPS


def test_conventions(module):
    """On enough positions that every convention differs from every other."""
    masks = [[False] * 3 + [True] * (i % 29) + [False] * (i % 2) + [True] * 4 for i in range(60)]
    toy, samples = Toy([len(mask) for mask in masks]), samples_of(masks)
    found = teacher_forced(module, toy, samples, toy, STEPS, 64)
    sums = by_hand(module, toy, samples)
    assert_sums(found, sums)
    share = {
        name: [a / b for a, b in zip(sums[part], sums[whole], strict=True)]
        for name, part, whole in (
            ("conditional", "right", "counted"),
            ("conditional_draftable", "right", "counted_draftable"),
            ("conditional_lenient", "lenient_right", "lenient_counted"),
            ("unconditional", "drafted", "seen"),
            ("unconditional_draftable", "drafted", "in_vocabulary"),
            ("mean_overlap", "overlap", "seen"),
        )
    }
    for name, values in share.items():
        assert getattr(found, name) == pytest.approx(values, abs=1e-6)
    assert len({round(values[1], 6) for values in share.values()}) == len(share)
    a, b, c = share["conditional"]
    assert found.cumulative == pytest.approx([a, a * b, a * b * c])
    assert found.tokens_a_cycle == pytest.approx(1 + a + a * b + a * b * c)
    assert found.accepted_a_cycle == pytest.approx(a + a * b + a * b * c)
    a, b, c = share["unconditional"]
    assert found.simulated_acc_len == pytest.approx(a + a * b + a * b * c)
    assert found.coverage == pytest.approx(sums["in_vocabulary"][0] / sums["seen"][0])
    assert f"{found.tokens_a_cycle:.2f} tokens a cycle" in found.summary()
    assert found.as_dict()["sums"]["right"] == found.right
    half = torch.arange(60) < 20
    parts = []
    for which in (half, ~half):
        toy_part = Toy([])
        numbers = which.nonzero()[:, 0].tolist()
        toy_part.features = [toy.features[i] for i in numbers]
        toy_part.hidden = [toy.hidden[i] for i in numbers]
        parts.append(teacher_forced(module, toy_part, samples.select(which), toy_part, STEPS, 64))
    assert_sums(parts[0] + parts[1], sums)


def test_ranks_share_the_work_without_loss(module):
    """Each has as many batches, those too that have none left; together they count every sample once."""
    masks = [[True] * (3 + i % 7) for i in range(41)]
    toy, samples = Toy([len(mask) for mask in masks]), samples_of(masks)
    whole = teacher_forced(module, toy, samples, toy, STEPS, 20, rows=2)
    for ranks in (2, 3, 7):
        every = [list(evaluate._batches(samples, 20, 2, rank, ranks)) for rank in range(ranks)]
        assert len({len(batches) for batches in every}) == 1
        counted = [s for each in every for rows, counts in each if counts for row in rows for s in row]
        assert sorted(counted) == list(range(41))
    idle = evaluate._narrow(samples, [[0, 1]], torch.device("cpu"), False)
    assert not bool(idle.mask.any())
    assert whole.seen[0] == sum(len(mask) - 2 for mask in masks)


def test_what_is_too_long_is_refused(module):
    toy, samples = Toy([30]), samples_of([[True] * 30])
    with pytest.raises(DataError, match="30 tokens; the evaluation goes up to 20"):
        teacher_forced(module, toy, samples, toy, STEPS, 20)
    with pytest.raises(DataError, match="goes up to 14"):
        teacher_forced(module_of(positions=16), toy, samples, toy, STEPS, 64)


def test_states_of_a_real_target_do_not_depend_on_their_company(tmp_path, monkeypatch):
    """Short and long samples, in any order, with a cache that must not become as long as all and as many."""
    target, head = made(tmp_path)
    monkeypatch.setattr("slipstream.train.states._ROWS", 64)
    states = OnlineStates(target, head.shape.taps)
    draw = torch.Generator().manual_seed(0)
    lengths = [2] * 30 + [60, 3, 1, 50, 17]
    tokens = [torch.randint(96, (length,), generator=draw) for length in lengths]
    together = states(range(len(tokens)), tokens)
    assert states._state.padding_slot * states._state.max_length <= 128
    for number in (0, 30, 32, 34):
        for a, b in zip(
            together[number], OnlineStates(target, head.shape.taps)([0], [tokens[number]])[0], strict=True
        ):
            torch.testing.assert_close(a, b)


def test_looping_samples_are_flagged():
    samples = samples_of(
        [[False] * 5 + [True] * 40 + [False] * 9 + [True] * 6, [True] * 40, [False] * 50, []]
    )
    samples.tokens[5:45] = torch.arange(40) % 3
    samples.tokens[60:100] = torch.arange(40)
    samples.tokens[100:] = 1
    assert looping(samples).tolist() == [True, False, False, False]


def assert_consistent(found, params) -> None:
    shape = found.shape
    for answer in found.answers:
        stats = answer.stats
        assert answer.is_same
        uncut = stats.cycles + sum(stats.accepted)
        assert 0 <= uncut - stats.new_tokens <= shape.levels
        assert stats.cycles == sum(stats.cycles_by_drafted.values())
        assert stats.tried[0] == stats.cycles - stats.cycles_by_drafted.get(0, 0)
        assert stats.tried[1:] == stats.accepted[:-1]
        assert len(stats.tried) == shape.levels
    told = found.as_dict()
    stats = [answer.stats for answer in found.answers]
    assert told["tokens_a_cycle"] == sum(s.new_tokens for s in stats) / sum(s.cycles for s in stats)
    assert told["accepted_a_cycle"] == sum(sum(s.accepted) for s in stats) / sum(s.cycles for s in stats)
    assert told["drafted"] == shape.size * told["tried"][0]
    assert told["cumulative"] == pytest.approx([each / told["tried"][0] for each in told["accepted"]])


SHAPES = [DraftShape.chain(4), DraftShape(3, 3, 8), DraftShape.chain(1)]


def test_the_real_cycle_of_the_shipped_head(smollm2):
    before = smollm2.drafter
    smollm2.use(Eagle3Drafter(SMOLLM2_HEAD))
    try:
        params = SamplingParams(max_new_tokens=24)
        steps = []
        prompts = ["Why is the sky blue?", "Write a haiku.", "Count to twelve."]
        results = drafted(
            smollm2, prompts, params, SHAPES, group=2, progress=lambda *step: steps.append(step)
        )
        assert isinstance(smollm2.drafter, Eagle3Drafter)
        assert smollm2.drafter.max_drafted == 15
    finally:
        smollm2.use(before)
    assert steps[0] == ("plain decoding", 0, 12)
    assert steps[-1] == ("done", 12, 12)
    for found in results:
        assert_consistent(found, params)
    chain, tree, single = (found.as_dict()["tokens_a_cycle"] for found in results)
    assert 1 < single < chain < tree


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_that_loop_are_told_apart(tmp_path, temperature):
    """A forgetful greedy target soon repeats itself; a sampled one does not."""
    made(tmp_path)
    make_forgetful(tmp_path)
    drafter = Eagle3Drafter(tmp_path / "head")
    engine = slipstream.Engine(str(tmp_path), draft=drafter, dtype="float32", max_length=150, max_batch=4)
    params = SamplingParams(max_new_tokens=120, temperature=temperature, ignore_eos=True)
    prompts = [[number, 7] for number in range(10, 16)]
    plain = engine.generate_batch(prompts, params, speculate=False)
    expected = [number for number, each in enumerate(plain) if loops(each.token_ids) > LOOPING]
    assert bool(expected) == (temperature == 0)
    known = set(drafter.checkpoint.target_ids.tolist())
    for found in drafted(engine, prompts, params, SHAPES):
        assert_consistent(found, params)
        assert found.looping == expected
        kept = found.without_loops()
        assert len(kept.answers) == len(prompts) - len(expected)
        assert not kept.looping
        tokens = sum(token in known for each in plain for token in each.token_ids)
        assert found.as_dict()["coverage"] == tokens / (120 * len(prompts))
    assert engine.drafter is drafter


def test_what_cannot_be_drafted_is_refused(tmp_path):
    made(tmp_path)
    engine = slipstream.Engine(str(tmp_path), draft=None, dtype="float32", max_length=60, max_batch=2)
    params = SamplingParams(max_new_tokens=4)
    with pytest.raises(SlipstreamError, match="no EAGLE-3 drafter"):
        drafted(engine, [[5]], params, SHAPES)
    engine.use(Eagle3Drafter(tmp_path / "head"))
    for shape in (DraftShape(2, 1, 5), DraftShape.chain(32)):
        with pytest.raises(SlipstreamError, match="cannot be"):
            drafted(engine, [[5]], params, [shape])
    stream = engine.stream([5], SamplingParams(max_new_tokens=9, ignore_eos=True), draft_tokens=1)
    next(stream)
    with pytest.raises(SlipstreamError, match="while a request is running"):
        engine.use(None)
    stream.close()


def test_a_checkpoint_is_the_module_it_was_made_of(tmp_path):
    target, head = made(tmp_path, norm_output=True)
    again = evaluate.module_of(Checkpoint.of(head.shape, head.tensors()), target, 40)
    assert torch.equal(again.ids, head.ids)
    assert torch.equal(again.embedding, head.embedding)
    for name, weight in head.weights.items():
        assert torch.equal(again.weights[name], weight)
