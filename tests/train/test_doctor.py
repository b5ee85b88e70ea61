"""The drafter doctor: every fault that is planted in a good drafter is named, and mended bit for bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import slipstream
from slipstream.draft.eagle3.checkpoint import Checkpoint, read
from slipstream.draft.eagle3.dialects import Dialect
from slipstream.draft.eagle3.drafter import SMOLLM2_HEAD
from slipstream.errors import DataError
from slipstream.lab.prompts import load_prompts
from slipstream.target.load import load
from slipstream.train.doctor import examine
from slipstream.train.doctor_search import GAIN
from slipstream.train.doctor_trials import EMBEDDING, Acceptance, Evidence, Reading, write_answers
from slipstream.train.losses import features_of, goals_of, outcome_of
from slipstream.train.packing import batch_of
from slipstream.train.samples import Samples
from slipstream.train.states import OnlineStates
from tests.draft.heads import random_head, shape_of
from tests.target.tiny import VOCABULARY, write_model


@pytest.fixture(autouse=True)
def _one_thread(_threads):
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def engine():
    torch.set_num_threads(1)
    return slipstream.Engine(draft=None, max_batch=12, max_length=512)


@pytest.fixture(scope="module")
def chat(engine):
    """Answers of SmolLM2 to four chat prompts."""
    prompts = [each.prompt for each in load_prompts() if each.kind in ("chat", "code")]
    return write_answers(engine, prompts[:4], 48)


@pytest.fixture(scope="module")
def evidence(engine, chat):
    """All states of these answers."""
    target = engine.model.target
    return Evidence.gather(target, chat, range(target.shape.layers + 1))


@pytest.fixture(autouse=True)
def _states_once(monkeypatch, chat, evidence):
    real = Evidence.gather

    def gather(target, texts, boundaries):
        return evidence if texts is chat else real(target, texts, boundaries)

    monkeypatch.setattr(Evidence, "gather", staticmethod(gather))


@pytest.fixture(scope="module")
def good():
    return read(SMOLLM2_HEAD)


@pytest.fixture
def one_change(monkeypatch):
    """For time: no second fault is looked for."""
    monkeypatch.setattr("slipstream.train.doctor_search.FAULTS", 1)


def is_same(one: Checkpoint | None, other: Checkpoint) -> bool:
    return (
        one is not None
        and one.config == other.config
        and one.tensors.keys() == other.tensors.keys()
        and all(torch.equal(one.tensors[name], tensor) for name, tensor in other.tensors.items())
    )


def fact(found, name):
    return next(each for each in found.facts if each.name == name)


def absolute(good):
    return good.changed({"d2t": good.target_ids})


def twice(good):
    return good.changed({"d2t": good.tensors["d2t"] - torch.arange(len(good.tensors["d2t"]))})


def stranger(good):
    torch.manual_seed(0)
    return good.changed({EMBEDDING: torch.randn(49152, 576, dtype=torch.bfloat16) * 0.1})


FAULTS = {
    "absolute": (absolute, "d2t was read as offsets; read as absolute ids, acceptance at position 1 goes from"),
    "twice": (twice, "taken twice"),
    "ids + 1": (lambda good: good.changed(taps=[3, 16, 28]), "ids [2, 15, 27] were read as outputs of layers; read as"),
    "ids - 1": (lambda good: good.changed(taps=[1, 14, 26]), "ids [0, 13, 25] were read as outputs of layers; each"),
    "residual": (lambda good: good.changed(norm_before_residual=True), "norm_before_residual was on; off, acceptance"),
    "output": (lambda good: good.changed(norm_output=True), "norm_output was on; off, acceptance at position 2"),
    "embedding": (stranger, "drafter's own embedding was used; with the target's"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_and_mended(engine, chat, good, fault, one_change):
    plant, named = FAULTS[fault]
    found = examine(plant(good), engine.model.target, chat)
    assert named in found.verdict
    assert not found.healthy
    assert is_same(found.mended, good)
    assert found.cured.tokens_a_cycle > found.acceptance.tokens_a_cycle + GAIN


def test_two_faults_that_only_help_together(engine, chat, good):
    """Without the right norm the right map brings nothing, and the other way round."""
    found = examine(absolute(good).changed(norm_before_residual=True), engine.model.target, chat)
    assert (
        "d2t was read as offsets and norm_before_residual was on; read as absolute ids and off"
        in found.verdict
    )
    assert is_same(found.mended, good)


def test_two_faults_one_after_the_other(engine, chat, good):
    found = examine(good.changed(norm_output=True, taps=[1, 14, 26]), engine.model.target, chat)
    assert "norm_output was on" in found.verdict
    assert "layer ids [0, 13, 25]" in found.verdict
    assert is_same(found.mended, good)


@pytest.mark.slow
def test_rope_theta(engine, good, monkeypatch):
    """It costs so little that more texts are needed; of the other readings only the ropes are tried here."""
    prompts = [each.prompt for each in load_prompts() if each.kind in ("chat", "code")][:12]
    texts = write_answers(engine, prompts, 128)
    for others in ("_shifts", "_maps", "_flags", "_layers"):
        monkeypatch.setattr(f"slipstream.train.doctor_readings.{others}", lambda *given: ())
    found = examine(good.changed(rope_theta=500000.0), engine.model.target, texts)
    assert "Rope theta was 500000; with 10000, tokens a cycle with a chain of 4 go from 2.2" in found.verdict
    assert is_same(found.mended, good)


def test_a_healthy_drafter(engine, chat, good, monkeypatch):
    found = examine(good, engine.model.target, chat, [0.67])
    assert found.healthy, found.verdict
    assert "is healthy: acceptance at position 1 is 0.5" in found.verdict
    assert "claims 0.67" in found.verdict
    assert found.mended is None
    assert found.cured is None
    assert {each.status for each in found.facts} == {"ok"}
    monkeypatch.setattr("slipstream.train.doctor_search.alternatives", lambda *given: [])
    found = examine(good, engine.model.target, chat, [0.95])
    assert not found.healthy
    assert "its training claims 0.95" in found.verdict


def test_a_random_drafter_gets_no_false_cure(engine, chat, good):
    torch.manual_seed(0)
    noise = {name: torch.randn(t.shape) * 0.03 for name, t in good.tensors.items() if t.dim() > 1}
    found = examine(good.changed(noise), engine.model.target, chat)
    assert not found.healthy
    assert found.mended is None
    assert "No other reading helps: it is undertrained" in found.verdict


def test_what_is_wrong_without_a_loss(engine, chat, good, monkeypatch):
    """A t2d that engines ignore, tensors of a flag that is off: said, and mended."""
    monkeypatch.setattr("slipstream.train.doctor_search.alternatives", lambda *given: [])
    marked = good.marked()
    found = examine(good.changed({"t2d": marked.roll(1)}), engine.model.target, chat)
    assert not found.healthy
    assert fact(found, "t2d").status == "fail"
    assert torch.equal(found.mended.tensors["t2d"], marked)
    found = examine(good.changed({"input_norm.weight": torch.ones(1728)}), engine.model.target, chat)
    assert "input_norm.weight belongs to no flag that is on" in fact(found, "tensors").found
    assert is_same(found.mended, good)


def test_a_drafter_that_cannot_be_run(engine, chat, good, one_change):
    """A flag without its tensors, a missing map: read otherwise where that can be."""
    found = examine(good.changed(norm_before_fc=True), engine.model.target, chat)
    assert found.acceptance is None
    assert "norm_before_fc was on, so it cannot be run; off, acceptance at position 1 is 0.5" in found.verdict
    assert is_same(found.mended, dataclasses.replace(good, config={**good.config, "norm_before_fc": False}))
    tensors = {name: tensor for name, tensor in good.tensors.items() if name != "fc.weight"}
    found = examine(Checkpoint(good.config, tensors, good.dialect), engine.model.target, chat)
    assert "cannot be run: the tensor fc.weight is missing" in found.verdict
    tensors = {**good.tensors, "t2d": good.marked()}
    del tensors["d2t"]
    found = examine(Checkpoint(good.config, tensors, good.dialect), engine.model.target, chat)
    assert "d2t is missing; rebuilt from t2d" in found.verdict
    assert torch.equal(found.mended.target_ids, good.target_ids)


def test_another_models_drafter(engine, chat, good):
    found = examine(good.changed(target_hidden_size=2048), engine.model.target, chat)
    assert "2048, but the target's is 576" in found.verdict
    assert found.acceptance is None


def test_chains_are_counted_as_in_training(engine, chat, good):
    """The doctor's chains against the trainer's training-time test, over the slots that both count."""
    target = engine.model.target
    evidence = Evidence.gather(target, chat, [2, 15, 27])
    found = evidence.measure(Reading(good))
    batch = batch_of(chat, [[i] for i in range(len(chat))], int(chat.lengths.max()), target.device)
    features, hidden = features_of(batch, OnlineStates(target, (2, 15, 27)))
    head = evidence._module(good, good.shape.paired(target.shape))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        outcome = outcome_of(head, batch, features, goals_of(target, hidden, head.ids, torch.float32), 4)
    rates = (outcome.right / outcome.counted).tolist()
    assert found.conditional == pytest.approx(rates, abs=0.03)  # it counts the ends of texts too
    assert found.tokens_a_cycle == pytest.approx(1 + sum(found.cumulative))


def test_figures_of_acceptance():
    texts = torch.tensor([0, 0, 1, 1])
    one = Acceptance(torch.tensor([0, 1, 2, 2]), texts, 2)
    assert one.checked == [4, 3]
    assert one.conditional == [3 / 4, 2 / 3]
    assert one.cumulative == [3 / 4, 1 / 2]
    assert one.tokens_a_cycle == 1 + 5 / 4
    assert one.gain(one) == (0.0, 0.0)
    gain, error = one.gain(Acceptance(torch.tensor([1, 2, 2, 2]), texts, 2))
    assert gain == 0.5
    assert error > 0


def test_texts_that_are_too_short(engine, good):
    short = Samples.of_rows(torch.ones(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(DataError, match="too short"):
        examine(good, engine.model.target, short)


def trained(target, texts: Samples, shift: int) -> Checkpoint:
    """A drafter that learned to pair the state at t with token t + 1 + shift."""
    head = random_head(target, shape_of(taps=(1, 2, 3), vocabulary=VOCABULARY))
    batch = batch_of(texts, [[i] for i in range(len(texts))], int(texts.lengths.max()), target.device)
    features, hidden = features_of(batch, OnlineStates(target, (1, 2, 3)))
    goals = goals_of(target, hidden, head.ids, torch.float32)
    fed = dataclasses.replace(batch, tokens=batch.tokens.roll(-shift, dims=1))
    optimiser = torch.optim.Adam(head.parameters(), 3e-3)
    for _ in range(60):
        optimiser.zero_grad()
        outcome = outcome_of(head, fed, features, goals, 2)
        outcome.loss.sum().div(batch.mask.sum()).backward()
        optimiser.step()
    return Checkpoint.of(head.shape, head.tensors())


def test_a_wrong_alignment_is_named(tmp_path):
    write_model(tmp_path, "llama")
    model = load(str(tmp_path), dtype="float32", positions=256)
    torch.manual_seed(0)
    prompts = torch.randint(2, VOCABULARY, (40, 6)).tolist()
    engine = slipstream.Engine(str(tmp_path), draft=None, dtype="float32", max_batch=16, max_length=64)
    texts = write_answers(engine, prompts, 32)
    head = trained(model.target, texts, -1)
    found = examine(head, model.target, texts.select(torch.arange(0, 40, 4)))
    assert "The target's state at t was paired with token t + 1; with token t, " in found.verdict
    assert "No setting of a checkpoint can say that" in found.verdict
    assert found.mended is None
    assert head.dialect == Dialect.SPECFORGE
    assert found.cured.tokens_a_cycle > found.acceptance.tokens_a_cycle + GAIN
