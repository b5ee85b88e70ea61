"""The EAGLE-3 head: what is trained is what drafts, and drafting changes no text."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import slipstream
from slipstream.draft.eagle3.checkpoint import load, save
from slipstream.draft.eagle3.drafter import Eagle3Drafter
from slipstream.draft.eagle3.shape import Eagle3Shape
from slipstream.engine.request import SamplingParams
from slipstream.errors import ModelError
from slipstream.target.load import load as load_target
from slipstream.target.shape import Rope
from slipstream.train.conversations import Template, make_conversations
from slipstream.train.eagle3_model import Eagle3Module
from slipstream.train.eagle3_trainer import Recipe, States, losses, train
from slipstream.train.samples import Samples, draft_vocabulary
from tests.target.tiny import FAMILIES, VOCABULARY, write_model

SHAPE = Eagle3Shape(
    hidden_size=64,
    target_hidden_size=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=VOCABULARY,
    draft_vocab_size=40,
    rms_norm_eps=1e-5,
    rope=Rope(10000.0),
    taps=(0, 1, 3),
    max_positions=256,
)


def made(folder, family="llama", seed=0, **flags):
    """A tiny target in `folder`, and a random head on it, saved in `folder/head`."""
    write_model(folder, family)
    target = load_target(str(folder), dtype="float32", positions=256).target
    torch.manual_seed(seed)
    ids = torch.randperm(VOCABULARY)[:40].sort().values
    head = Eagle3Module(
        dataclasses.replace(SHAPE, **flags),
        target.embed(torch.arange(VOCABULARY)),
        ids - torch.arange(40),
        256,
    )
    with torch.no_grad():
        for name, weight in head.weights.items():
            if "norm" in name:
                weight.normal_(1.0, 0.3)
    save(folder / "head", head.shape, head.tensors())
    return target, head


class Recorded(Eagle3Drafter):
    """Remembers what was drafted for which text."""

    def __init__(self, folder) -> None:
        super().__init__(folder, weights="float32")
        self.drafts = []

    def draft(self, text, slots, size):
        tree = super().draft(text, slots, size)
        for row, slot in enumerate(slots.tolist()):
            length = int(text.length[slot])
            self.drafts.append((text.tokens[slot, :length].tolist(), tree.tokens[row].tolist()))
        return tree


@pytest.mark.parametrize("flags", [{}, {"norm_before_residual": True}, {"norm_output": True}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_the_trained_module(tmp_path, family, flags):
    """In a batch, after any acceptance, whatever the KV held before: the head's first choice at each step."""
    target, head = made(tmp_path, family, **flags)
    drafter = Recorded(tmp_path / "head")
    engine = slipstream.Engine(str(tmp_path), draft=drafter, dtype="float32", max_length=120, max_batch=3)
    params = [
        SamplingParams(max_new_tokens=20 + 9 * i, temperature=0.5 * (i % 2), ignore_eos=True)
        for i in range(3)
    ]
    engine.generate_batch(["a b a b", "c", "d e f g h i j k l"], params, raw=True, draft_tokens=4)
    checked = 0
    for text, drafted in drafter.drafts:
        if len(text) < 3:
            continue  # the padding of a batch
        tokens = torch.tensor([text + drafted])
        features, _ = States(target, SHAPE.taps, 1, tokens.shape[1], "cpu")(tokens)
        at = len(text) - 2
        with torch.no_grad():
            logits = [step[0, at] for step in head.steps(tokens, features, 4)]
        ids = torch.arange(40) + head.d2t
        chosen = torch.stack(logits).sort(dim=-1, descending=True)
        clear = chosen.values[:, 0] - chosen.values[:, 1] > 1e-4  # else rounding may decide
        expected = ids[chosen.indices[:, 0]]
        assert bool(((torch.tensor(drafted) == expected) | ~clear).all())
        checked += int(clear.sum())
    assert checked > 60


@pytest.mark.parametrize("draft_tokens", [None, 1, 7])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafting_changes_no_text(tmp_path, dtype, draft_tokens):
    made(tmp_path)
    engine = slipstream.Engine(
        str(tmp_path), draft=Eagle3Drafter(tmp_path / "head"), dtype=dtype, max_length=120, max_batch=2
    )
    prompts = ["a b a b", "c", "d e f"]
    params = [
        SamplingParams(max_new_tokens=50, temperature=0.7 * (i % 2), ignore_eos=True, seed=i)
        for i in range(3)
    ]
    plain = engine.generate_batch(prompts, params, raw=True, speculate=False)
    drafted = engine.generate_batch(prompts, params, raw=True, draft_tokens=draft_tokens)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]


def test_a_long_wait_before_the_next_draft(tmp_path, monkeypatch):
    """The ring gets full while nobody drafts; what is drafted then is what a fresh drafter drafts."""
    monkeypatch.setattr("slipstream.draft.eagle3.drafter._RING", 64)
    monkeypatch.setattr("slipstream.draft.eagle3.drafter._MARGIN", 16)
    monkeypatch.setattr("slipstream.engine.scheduler.PREFILL_CHUNK", 32)
    made(tmp_path)
    drafts = []
    for prompt_length in (1, 90):
        drafter = Recorded(tmp_path / "head")
        engine = slipstream.Engine(str(tmp_path), draft=drafter, dtype="float32", max_length=256, max_batch=1)
        prompt = engine.generate(
            [5], SamplingParams(max_new_tokens=160, ignore_eos=True), speculate=False
        ).token_ids
        text = [5, *prompt]
        stream = engine.stream(
            text[:prompt_length], SamplingParams(max_new_tokens=160, ignore_eos=True), draft_tokens=0
        )
        while int(engine._state.text.length[0]) < 150:
            next(stream)
        slots = torch.tensor([0])
        drafts.append(drafter.draft(engine._state.text, slots, 5).tokens.tolist())
        stream.close()
    assert drafts[0] == drafts[1]


def test_a_round_trip_keeps_every_bit(tmp_path):
    _, head = made(tmp_path)
    shape, tensors = load(tmp_path / "head")
    assert shape == head.shape
    assert all(torch.equal(tensors[name], value) for name, value in head.tensors().items())


def test_broken_drafters_are_refused(tmp_path):
    _, head = made(tmp_path)
    tensors = head.tensors()
    with pytest.raises(ModelError, match=r"config\.json"):
        load(tmp_path / "nowhere")
    for changed, named in (
        ({"d2t": torch.arange(40) * 3}, "out of the target's vocabulary"),
        ({"d2t": tensors["d2t"].flip(0)}, "not sorted|out of"),
        ({"extra": torch.zeros(1)}, "extra"),
        ({"fc.weight": torch.zeros(64, 64)}, "fc.weight is"),
    ):
        folder = tmp_path / "broken"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text((tmp_path / "head" / "config.json").read_text())
        from safetensors.torch import save_file

        save_file({**tensors, **changed}, folder / "model.safetensors")
        with pytest.raises(ModelError, match=named):
            load(folder)


def test_a_drafter_of_another_target_is_refused(tmp_path):
    made(tmp_path)
    write_model(tmp_path / "other", "llama", hidden_size=32)
    with pytest.raises(ModelError, match="hidden size 64"):
        slipstream.Engine(str(tmp_path / "other"), draft=Eagle3Drafter(tmp_path / "head"), max_length=50)


def test_training_learns_a_target_that_can_be_guessed(tmp_path):
    """Greedy texts of a tiny model: acceptance rises well above where it began, at the later steps too."""
    target, _ = made(tmp_path)
    template = Template([3, 4], [5, 6], end=1)
    conversations = make_conversations(
        target,
        template,
        64,
        user_tokens=8,
        answer_tokens=40,
        user_temperature=1.0,
        answer_temperature=torch.zeros(64),
        seed=0,
        device="cpu",
    )
    place = torch.arange(conversations.tokens.shape[1])
    mask = (place >= conversations.begin[:, None]) & (place < conversations.end[:, None])
    assert bool((conversations.tokens[mask.any(1)][:, :2] == torch.tensor([3, 4])).all())
    d2t, coverage = draft_vocabulary(Samples.of_rows(conversations.tokens, mask), VOCABULARY, 60)
    assert coverage > 0.8
    shape = dataclasses.replace(SHAPE, draft_vocab_size=60)
    torch.manual_seed(0)
    head = Eagle3Module(shape, target.embed(torch.arange(VOCABULARY)), d2t, 128)
    recipe = Recipe(steps=3, batch=16, epochs=40, lr=3e-3)
    seen = []
    train(head, target, conversations.tokens, mask, recipe, lambda progress: seen.append(progress) or True)
    assert len(seen) == 160
    assert seen[-1].loss < 0.8 * seen[0].loss
    assert seen[-1].accepted[0] > seen[0].accepted[0] + 0.15


def test_losses_count_what_drafting_would_accept(tmp_path):
    """Right and counted by step are what the module's first choices show, position by position."""
    target, head = made(tmp_path)
    text = torch.randint(0, VOCABULARY, (1, 60), generator=torch.Generator().manual_seed(3))
    states = States(target, SHAPE.taps, 1, 60, "cpu")
    features, hidden = states(text)
    best = target.logits(hidden)[0].argmax(-1)  # row t: the target's choice for token t + 1
    mask = torch.ones(1, 60, dtype=torch.bool)
    mask[:, :10] = False
    _, right, counted = losses(head, target, text, mask, states, Recipe(steps=3))
    with torch.no_grad():
        chosen = [
            (step[0].argmax(-1) + head.d2t[step[0].argmax(-1)]) for step in head.steps(text, features, 3)
        ]
    expected_right, expected_counted = [0, 0, 0], [0, 0, 0]
    for t in range(60):
        for step in range(3):
            if t + 2 + step >= 60 or not mask[0, t + 2 + step]:
                break
            expected_counted[step] += 1
            if chosen[step][t] != best[t + 1 + step]:
                break
            expected_right[step] += 1
    assert (right.tolist()[0], counted.tolist()[0]) == (expected_right[0], expected_counted[0])
    assert counted[0] == 50
