"""The training-time test over packed rows is that over each sample, its mask and loss those of their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.train.eagle3_model import _attend, _visible, places
from slipstream.train.losses import goals_of
from slipstream.train.packing import batch_of
from tests.draft.heads import FLAGS, SHAPES
from tests.train.toy import CPU, DRAFT_IDS, Toy, alone, module_of, outcome, samples_of

STEPS = 4
LENGTHS = (9, 1, 14, 3, 6, 2)
ROWS = [[2, 4, 1], [0, 5, 3], [3]]  # some rows end in padding, one sample comes twice
WIDTH = 22


@pytest.fixture
def samples():
    draw = torch.Generator().manual_seed(1)
    return samples_of([(torch.rand(length, generator=draw) < 0.7).tolist() for length in LENGTHS])


def loss_and_gradients(module, found):
    weights = torch.tensor([0.9**step for step in range(STEPS)])
    module.zero_grad()
    (sum(each.loss for each in found) * weights).sum().backward()
    return {name: weight.grad.clone() for name, weight in module.named_parameters()}


def assert_same(found, expected):
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-6 + 2e-5 * scale, msg=name)
    assert any(bool(gradient.any()) for gradient in expected.values())


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("kind", SHAPES)
def test_packed_rows_are_their_samples(samples, kind, flags):
    module, toy = module_of(kind, **flags), Toy(LENGTHS)
    batch = batch_of(samples, ROWS, WIDTH, CPU)
    given = torch.zeros(*batch.tokens.shape, toy.features[0].shape[-1])
    for sample, row, place in zip(batch.samples, batch.rows, batch.places, strict=True):
        given[row, place : place + LENGTHS[sample]] = toy.features[sample]
    packed = torch.stack(
        module(batch.tokens, batch.documents, given, STEPS, lambda step, normed: module.logits(normed))
    )
    for sample, row, place in zip(batch.samples, batch.rows, batch.places, strict=True):
        length = LENGTHS[sample]
        single = alone(module, toy, samples, sample, STEPS)
        for step in range(STEPS):
            rows = max(0, length - 1 - step)  # what lies beyond reads tokens of the next sample
            torch.testing.assert_close(
                packed[step, row, place : place + rows], single[step, :rows], rtol=1e-4, atol=1e-4
            )
    found = outcome(module, toy, samples, ROWS, WIDTH, STEPS)
    each = [
        outcome(module, toy, samples, [[sample]], LENGTHS[sample], STEPS) for row in ROWS for sample in row
    ]
    for name, value in vars(found).items():
        expected = sum(getattr(one, name) for one in each)
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4, msg=name)
    assert_same(loss_and_gradients(module, [found]), loss_and_gradients(module, each))


@pytest.mark.parametrize(("scores", "logits"), [(1, 1 << 28), (500, 1 << 28), (1 << 28, 4), (3000, 20)])
@pytest.mark.parametrize("kind", ["two layers", "latent"])
def test_pieces_change_nothing(samples, monkeypatch, kind, scores, logits):
    module, toy = module_of(kind, norm_output=True), Toy(LENGTHS)
    whole = outcome(module, toy, samples, ROWS, WIDTH, STEPS)
    expected = loss_and_gradients(module, [whole])
    monkeypatch.setattr("slipstream.train.eagle3_model._SCORES", {"cpu": scores})
    monkeypatch.setattr("slipstream.train.losses._LOGITS", logits)
    pieces = outcome(module, toy, samples, ROWS, WIDTH, STEPS)
    for name, value in vars(whole).items():
        torch.testing.assert_close(getattr(pieces, name), value, rtol=1e-5, atol=1e-5, msg=name)
    assert_same(loss_and_gradients(module, [pieces]), expected)


def test_the_loss_is_soft_cross_entropy(samples):
    """By hand, in float64: over the draft vocabulary renormalised, rows left out whose choice is out of it."""
    module, toy = module_of(), Toy(LENGTHS)
    found = outcome(module, toy, samples, ROWS, WIDTH, STEPS)
    ids = list(DRAFT_IDS)
    expected = [0.0] * STEPS
    for sample in (sample for row in ROWS for sample in row):
        logits = alone(module, toy, samples, sample, STEPS).double().tolist()
        mask = samples.sample(sample)[1].tolist()
        for step in range(STEPS):
            for t in range(LENGTHS[sample] - step - 2):
                wanted = toy.hidden[sample][t + step + 1].double().tolist()
                if not mask[t + step + 2] or max(range(len(wanted)), key=wanted.__getitem__) not in ids:
                    continue
                over_p = sum(math.exp(wanted[i]) for i in ids)
                over_q = sum(math.exp(each) for each in logits[step][t])
                expected[step] -= sum(
                    math.exp(wanted[token]) / over_p * (logits[step][t][i] - math.log(over_q))
                    for i, token in enumerate(ids)
                )
    torch.testing.assert_close(found.loss.double(), torch.tensor(expected).double(), rtol=1e-5, atol=1e-5)


def test_goals_of_a_whole_vocabulary_in_pieces(monkeypatch):
    toy, ids = Toy((30,)), torch.tensor(DRAFT_IDS)
    hidden = toy.hidden[0].view(3, 10, -1)
    whole = goals_of(toy, hidden, ids, torch.float32)
    p = hidden.double().softmax(-1)
    torch.testing.assert_close(whole.mass, p[..., ids].sum(-1).float())
    torch.testing.assert_close(whole.soft, (p[..., ids] / p[..., ids].sum(-1, keepdim=True)).float())
    assert torch.equal(whole.best, p.argmax(-1))
    assert torch.equal(whole.draftable, ids[p[..., ids].argmax(-1)])
    assert bool((whole.best != whole.draftable).any())
    monkeypatch.setattr("slipstream.train.losses._LOGITS", 25)
    for name, value in vars(goals_of(toy, hidden, ids, torch.float32)).items():
        assert torch.equal(value, getattr(whole, name))


def test_attention_is_that_of_the_definition():
    """Step k's query at t sees step 0's keys up to t in its own sample, and those at t of steps 1 .. k."""
    draw = torch.Generator().manual_seed(2)
    documents = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 3, [2] * 12])
    batch, length = documents.shape
    heads, dim, scale = 2, 8, 0.3
    past = [tuple(torch.randn(batch, heads, length, dim, generator=draw) for _ in range(2)) for _ in range(3)]
    q = torch.randn(batch, heads, length, dim, generator=draw)
    found = _attend(q, _visible(documents), scale, 0, past)
    for b in range(batch):
        for t in range(length):
            seen = [(0, j) for j in range(t + 1) if documents[b, j] == documents[b, t]] + [(1, t), (2, t)]
            keys, values = (
                torch.stack([past[step][part][b, :, j] for step, j in seen], 1) for part in (0, 1)
            )
            weights = ((q[b, :, t, None] * keys).sum(-1).double() * scale).softmax(-1)
            expected = (weights[..., None] * values).sum(1)
            torch.testing.assert_close(found[b, :, t].double(), expected, rtol=1e-5, atol=1e-5)


def test_places_are_counted_from_each_samples_beginning():
    documents = torch.tensor([[0, 0, 0, 1, 2, 2, -1, -1], [3, 3, 3, 3, 3, 3, 3, 3]])
    assert places(documents).tolist() == [[0, 1, 2, 0, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7]]


def test_padding_may_be_longer_than_any_sample(samples):
    """The rotary tables reach as far as the longest sample and the steps, whatever the row is padded to."""
    short = module_of(positions=max(LENGTHS) + STEPS - 1)
    found = outcome(short, Toy(LENGTHS), samples, ROWS, 60, STEPS)
    expected = outcome(module_of(), Toy(LENGTHS), samples, ROWS, WIDTH, STEPS)
    torch.testing.assert_close(found.loss, expected.loss)


def test_later_tokens_change_nothing_earlier(samples):
    """A step's row depends on nothing beyond the token that it has read."""
    module, toy = module_of("two layers"), Toy(LENGTHS)
    before = alone(module, toy, samples, 2, STEPS)
    at = 9
    samples.tokens[samples.starts[2] + at :] = (samples.tokens[samples.starts[2] + at :] + 1) % 6
    toy.features[2][at:] += 1
    after = alone(module, toy, samples, 2, STEPS)
    for step in range(STEPS):
        rows = at - 1 - step
        torch.testing.assert_close(after[step, :rows], before[step, :rows], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(after[step, rows], before[step, rows])
