"""EAGLE-3 drafters: what is trained is what drafts, chains and trees, and drafting changes no text."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import slipstream
from slipstream.draft.eagle3.checkpoint import Checkpoint, load, save
from slipstream.draft.eagle3.drafter import Eagle3Drafter, _embedding
from slipstream.engine.request import SamplingParams
from slipstream.errors import ModelError
from slipstream.train.states import OnlineStates
from tests.draft.heads import FLAGS, SHAPES, made
from tests.target.tiny import FAMILIES, VOCABULARY, write_model


class Recorded(Eagle3Drafter):
    """Remembers what was drafted for which text."""

    def __init__(self, folder, **settings) -> None:
        super().__init__(folder, weights="float32", **settings)
        self.drafts = []

    def draft(self, text, slots, size):
        tree = super().draft(text, slots, size)
        for row, slot in enumerate(slots.tolist()):
            length = int(text.length[slot])
            parents = tree.row_parents[row].tolist()
            self.drafts.append((text.tokens[slot, :length].tolist(), tree.tokens[row].tolist(), parents))
        return tree


def drafted(folder, **settings):
    """The drafts of a batch of three requests, greedy and sampled, whatever was accepted of those before."""
    drafter = Recorded(folder / "head", **settings)
    engine = slipstream.Engine(str(folder), draft=drafter, dtype="float32", max_length=120, max_batch=3)
    params = [
        SamplingParams(max_new_tokens=20 + 9 * i, temperature=0.5 * (i % 2), ignore_eos=True)
        for i in range(3)
    ]
    engine.generate_batch(
        ["a b a b", "c", "d e f g h i j k l"], params, raw=True, draft_tokens=min(drafter.max_drafted, 7)
    )
    return [each for each in drafter.drafts if len(each[0]) > 2]  # the rest pads a batch


def log_p(target, head, text, path):
    """The module's log-probabilities of what follows a drafted path after a text."""
    tokens = torch.tensor([text + path + [0]])
    features, _ = OnlineStates(target, head.shape.taps)([0], [tokens[0]])[0]
    with torch.no_grad():
        normed = head(
            tokens, torch.zeros_like(tokens), features[None], len(path) + 1, lambda step, normed: normed
        )
        return head.logits(normed[-1][0, len(text) - 2]).log_softmax(-1)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("kind", SHAPES)
def test_chains_are_those_of_the_trained_module(tmp_path, kind, flags):
    """In a batch, after any acceptance, whatever the KV held before: the module's first choice at each step."""
    target, head = made(tmp_path, kind=kind, **flags)
    checked = 0
    for text, tokens, _ in drafted(tmp_path, top_k=1, max_drafted=7)[::4]:
        for step, token in enumerate(tokens):
            ranked = log_p(target, head, text, tokens[:step]).sort(descending=True)
            if ranked.values[0] - ranked.values[1] > 1e-3:  # else rounding may decide
                assert token == head.ids[ranked.indices[0]]
                checked += 1
    assert checked > 30


@pytest.mark.parametrize("family", FAMILIES)
def test_chains_on_every_family(tmp_path, family):
    target, head = made(tmp_path, family=family)
    text, tokens, _ = drafted(tmp_path, top_k=1, max_drafted=7)[-1]
    for step, token in enumerate(tokens):
        ranked = log_p(target, head, text, tokens[:step]).sort(descending=True)
        assert ranked.values[0] - ranked.values[1] < 1e-3 or token == head.ids[ranked.indices[0]]


def grown(target, head, text, top_k, depth, size):
    """EAGLE-2's tree by its definition: (score, path) of the best nodes, the best first."""
    level, every = [(0.0, [])], []
    for _ in range(depth):
        proposed = []
        for score, path in level:
            ranked = log_p(target, head, text, path).sort(descending=True)
            proposed += [
                (score + float(value), [*path, int(head.ids[index])])
                for value, index in zip(ranked.values[:top_k], ranked.indices[:top_k], strict=True)
            ]
        every += proposed
        level = sorted(proposed, key=lambda node: -node[0])[:top_k]
    return sorted(every, key=lambda node: -node[0])[:size]


@pytest.mark.parametrize("kind", SHAPES)
def test_trees_are_those_of_eagle_2(tmp_path, kind):
    target, head = made(tmp_path, kind=kind)
    drafts = drafted(tmp_path, top_k=3, depth=3, max_drafted=7)
    assert any(sorted(set(parents)) != [0] for _, _, parents in drafts)
    for text, tokens, parents in drafts[::6]:
        paths = [[]]
        for token, parent in zip(tokens, parents[1:], strict=True):
            paths.append([*paths[parent], token])
        expected = grown(target, head, text, 3, 3, 8)
        for (score, path), (below, _), found in zip(expected, expected[1:], paths[1:], strict=False):
            if score - below < 1e-3:
                break  # from here on rounding may decide
            assert found == path


@pytest.mark.parametrize("draft_tokens", [None, 1, 7, 15])
@pytest.mark.parametrize("top_k", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafting_changes_no_text(tmp_path, dtype, top_k, draft_tokens):
    made(tmp_path)
    drafter = Eagle3Drafter(tmp_path / "head", top_k=top_k)
    engine = slipstream.Engine(str(tmp_path), draft=drafter, dtype=dtype, max_length=120, max_batch=2)
    prompts = ["a b a b", "c", "d e f"]
    params = [
        SamplingParams(max_new_tokens=50, temperature=0.7 * (i % 2), ignore_eos=True, seed=i)
        for i in range(3)
    ]
    plain = engine.generate_batch(prompts, params, raw=True, speculate=False)
    fast = engine.generate_batch(prompts, params, raw=True, draft_tokens=draft_tokens)
    assert [each.token_ids for each in fast] == [each.token_ids for each in plain]


def test_stopping_to_grow_early_changes_no_tree(tmp_path, monkeypatch):
    made(tmp_path)
    trees = [drafted(tmp_path, top_k=2, depth=6, max_drafted=5)]
    monkeypatch.setattr("slipstream.draft.eagle3.grow.Candidates.may_matter", lambda self, size: True)
    trees.append(drafted(tmp_path, top_k=2, depth=6, max_drafted=5))
    assert trees[0] == trees[1]


def test_a_long_wait_before_the_next_draft(tmp_path, monkeypatch):
    """The ring gets full while nobody drafts; what is drafted then is what a fresh drafter drafts."""
    monkeypatch.setattr("slipstream.draft.eagle3.drafter._RING", 64)
    monkeypatch.setattr("slipstream.draft.eagle3.drafter._MARGIN", 16)
    monkeypatch.setattr("slipstream.engine.runner.PREFILL_CHUNK", 32)
    made(tmp_path)
    drafts = []
    for prompt_length in (1, 90):
        drafter = Recorded(tmp_path / "head", top_k=1)
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
        save(tmp_path / "broken", Checkpoint.of(head.shape, tensors).changed(changed))
        with pytest.raises(ModelError, match=named):
            load(tmp_path / "broken")
    whole = (tmp_path / "head" / "model.safetensors").read_bytes()
    (tmp_path / "head" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="truncated"):
        load(tmp_path / "head")


def test_a_drafter_of_another_target_is_refused(tmp_path):
    made(tmp_path)
    write_model(tmp_path / "other", "llama", hidden_size=32)
    with pytest.raises(ModelError, match="hidden size 64"):
        slipstream.Engine(str(tmp_path / "other"), draft=Eagle3Drafter(tmp_path / "head"), max_length=50)
    write_model(tmp_path / "shallow", "llama", num_hidden_layers=2)
    with pytest.raises(ModelError, match="2 layers"):
        slipstream.Engine(str(tmp_path / "shallow"), draft=Eagle3Drafter(tmp_path / "head"), max_length=50)


def test_a_drafter_with_an_embedding_of_its_own(tmp_path):
    """It is used where it differs from the target's, and needed where the widths do."""
    target, head = made(tmp_path)
    table = target.embed(torch.arange(VOCABULARY))
    drafts = []
    for own in (None, table.clone(), table.flip(0)):
        given = {} if own is None else {"embed_tokens.weight": own}
        save(tmp_path / "head", Checkpoint.of(head.shape, head.tensors()).changed(given))
        drafts.append(drafted(tmp_path, top_k=1, max_drafted=7))
    assert drafts[0] == drafts[1] != drafts[2]
    wide = dataclasses.replace(head.shape, decoder=dataclasses.replace(head.shape.decoder, hidden_size=32))
    with pytest.raises(ModelError, match="no embedding of its own"):
        _embedding(Checkpoint.of(wide, {}), target)
