"""How trainings begin: on any target's dimensions, or on a drafter, whose map of tokens stays bit for bit."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

import slipstream
from slipstream.draft.eagle3.checkpoint import Checkpoint, load, save
from slipstream.draft.eagle3.config import FLAGS
from slipstream.draft.eagle3.dialects import Dialect
from slipstream.draft.eagle3.drafter import Eagle3Drafter
from slipstream.draft.eagle3.shape import default_taps, weight_names
from slipstream.engine.request import SamplingParams
from slipstream.errors import DataError, ModelError
from slipstream.target.load import load as load_target
from slipstream.train.begin import design_shape, fine_tune, from_scratch, is_unset, output_rows
from slipstream.train.samples import Samples
from tests.draft.heads import random_head, shape_of
from tests.target.tiny import VOCABULARY, write_model
from tests.train.training import DESIGN, changed, do, guessable, lengths_of, said_by, same_drafter


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return guessable(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def samples(model):
    return said_by(model.target, lengths_of(40))


def drafter_in(folder, target, dialect=Dialect.SPECFORGE, dtype=torch.float32, **settings) -> Checkpoint:
    """A random drafter that was written in a dialect, and read again."""
    head = random_head(target, shape_of(**settings))
    tensors = {name: each.to(dtype) if name != "d2t" else each for name, each in head.tensors().items()}
    save(folder, Checkpoint.of(head.shape, tensors), dialect)
    return load(folder)


DIALECTS = {
    "SpecForge": (Dialect.SPECFORGE, {"norm_output": True, "fc_norm": True}),
    "speculators": (Dialect.SPECULATORS, {"norm_before_residual": True}),
    "two layers": (Dialect.MODELOPT, {"kind": "two layers"}),
    "latent": (Dialect.SPECFORGE, {"kind": "latent"}),
}


@pytest.mark.parametrize("name", DIALECTS)
def test_a_drafter_that_learns_nothing_is_the_same(model, samples, tmp_path, name):
    dialect, settings = DIALECTS[name]
    start = drafter_in(tmp_path / "start", model.target, dialect, **settings)
    do(tmp_path / "out", model, samples, changed(lr=0.0), start=start)
    assert same_drafter(load(tmp_path / "out"), start)
    first, second = ((tmp_path / each / "config.json").read_text() for each in ("start", "out"))
    assert json.loads(first) == json.loads(second)


def test_fine_tuning_in_the_dialect_of_eagle(tmp_path):
    """Its file is a pickle, and it has no place for the boundaries, which are then the default ones."""
    model = guessable(tmp_path / "target", num_hidden_layers=8)
    head = random_head(model.target, shape_of(taps=default_taps(8)))
    save(tmp_path / "start", Checkpoint.of(head.shape, head.tensors()), Dialect.EAGLE, target_layers=8)
    start = load(tmp_path / "start")
    samples = said_by(model.target, lengths_of(20))
    do(tmp_path / "out", model, samples, changed(lr=0.0), start=start)
    assert same_drafter(load(tmp_path / "out"), start)
    assert (tmp_path / "out" / "pytorch_model.bin").exists()


def test_a_drafter_that_learns_nothing_in_another_format(model, samples, tmp_path):
    start = drafter_in(tmp_path / "start", model.target)
    do(tmp_path / "out", model, samples, changed(lr=0.0), start=start, weights="bfloat16")
    found = load(tmp_path / "out")
    assert found.config == {**start.config, "dtype": "bfloat16"}
    for key, tensor in start.tensors.items():
        wanted = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(found.tensors[key], wanted), key


def test_skewed_data_leaves_the_map_alone(model, samples, tmp_path):
    """All answers are of tokens that the drafter cannot draft: its coverage says so, its map stays."""
    start = drafter_in(tmp_path / "start", model.target)
    missing = torch.tensor([token for token in range(VOCABULARY) if token not in start.target_ids.tolist()])
    skewed = Samples(missing[samples.tokens % len(missing)].int(), samples.mask, samples.starts)
    facts, said = do(tmp_path / "out", model, skewed, changed(rows=1), start=start)
    assert facts["coverage"] == 0
    assert "40 draft tokens cover 0.00% of the answers; what they miss can never be drafted" in said[0]
    found = load(tmp_path / "out")
    for name in ("d2t", "t2d"):
        assert torch.equal(found.tensors[name], start.tensors[name])
    assert not torch.equal(found.tensors["fc.weight"], start.tensors["fc.weight"])


def test_fine_tuning_helps(model, tmp_path):
    samples = said_by(model.target, lengths_of(200))
    start = drafter_in(tmp_path / "start", model.target)
    few, _ = do(tmp_path / "few", model, samples, changed(lr=0.0), start=start, minutes=0.0)
    many, _ = do(tmp_path / "many", model, samples, changed(epochs=3, lr=1e-2), start=start)
    assert many["accepted"][0] > few["accepted"][0] + 0.2


def test_another_start_does_not_continue(model, samples, tmp_path):
    start = drafter_in(tmp_path / "start", model.target)
    do(tmp_path / "out", model, samples, start=start, minutes=0.0)
    other = start.changed({"norm.weight": start.tensors["norm.weight"] + 1})
    with pytest.raises(DataError, match=r"other settings .*start was"):
        do(tmp_path / "out", model, samples, start=other)
    with pytest.raises(DataError, match=r"other settings .*start was .* is 'random'"):
        do(tmp_path / "out", model, samples, design=dataclasses.replace(DESIGN))


def test_unset_maps_are_refused(model, samples, tmp_path):
    start = drafter_in(tmp_path / "start", model.target)
    unset = start.changed({"d2t": torch.zeros_like(start.tensors["d2t"])})
    unset = dataclasses.replace(
        unset, tensors={name: each for name, each in unset.tensors.items() if name != "t2d"}
    )
    with pytest.raises(ModelError, match="map of tokens is unset: its 40 draft tokens"):
        do(tmp_path / "out", model, samples, start=unset)
    first = Samples(samples.tokens % 40, samples.mask, samples.starts)
    with pytest.raises(DataError, match="no answer has a token beyond the target's first 40"):
        do(tmp_path / "other", model, first)
    assert not is_unset(torch.arange(VOCABULARY), VOCABULARY)
    whole = dataclasses.replace(DESIGN, vocabulary=VOCABULARY + 9)
    do(tmp_path / "whole", model, first, design=whole)
    assert "d2t" not in load(tmp_path / "whole").tensors


def test_drafters_that_cannot_be_right_are_refused(model, samples, tmp_path):
    start = drafter_in(tmp_path / "start", model.target)
    d2t = start.tensors["d2t"].clone()
    d2t[-1] = VOCABULARY
    with pytest.raises(ModelError, match="d2t leads out of the target's vocabulary of 96"):
        fine_tune(start.changed({"d2t": d2t}), model.target, samples, 64)
    with pytest.raises(ModelError, match=r"holds absolute ids|d2t"):
        fine_tune(start.changed({"d2t": start.target_ids}), model.target, samples, 64)
    tensors = {name: each for name, each in start.tensors.items() if name != "fc.weight"}
    with pytest.raises(ModelError, match=r"the tensor fc\.weight is missing"):
        fine_tune(dataclasses.replace(start, tensors=tensors), model.target, samples, 64)
    path = tmp_path / "start" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="may be truncated"):
        load(tmp_path / "start")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 100}, "the drafter is for a target of vocabulary 96, this one's is 100"),
        ({"hidden_size": 32}, "the drafter is for a target of hidden size 64, this one's is 32"),
        ({"num_hidden_layers": 2}, "boundaries .1, 2, 3., this one has 2 layers"),
    ],
)
def test_drafters_of_another_target_are_refused(model, samples, tmp_path, changes, words):
    start = drafter_in(tmp_path / "start", model.target)
    write_model(tmp_path / "other", "llama", **changes)
    other = load_target(str(tmp_path / "other"), dtype="float32", positions=64)
    with pytest.raises(ModelError, match=words):
        fine_tune(start, other.target, samples, 64)


def test_an_embedding_of_its_own_is_kept(model, samples, tmp_path):
    start = drafter_in(tmp_path / "start", model.target)
    own = torch.randn(VOCABULARY, 64)
    start = start.changed({"embed_tokens.weight": own})
    do(tmp_path / "out", model, samples, start=start, weights="bfloat16")
    assert torch.equal(load(tmp_path / "out").tensors["embed_tokens.weight"], own)
    module, _ = fine_tune(start, model.target, samples, 64)
    assert torch.equal(module.embedding, own)


DESIGNS = [
    {},
    {"layers": 3},
    {"flags": ("norm_before_residual", "norm_before_fc")},
    {"flags": ("norm_output", "fc_norm"), "layers": 2},
    {"taps": (1, 3), "intermediate_size": 50, "rope_theta": 500.0, "max_positions": 77},
]


KINDS = [
    *(("llama", "grouped", design) for design in DESIGNS),
    *(("deepseek_v3", "latent", design) for design in DESIGNS),
    ("qwen3_moe", "grouped", {}),
    ("deepseek_v3", "grouped", {}),
]


@pytest.mark.parametrize(("family", "attention", "design"), KINDS, ids=str)
def test_a_drafter_for_any_target_is_trained_written_and_drafts(tmp_path, family, attention, design):
    model = guessable(tmp_path / "target", family)
    design = dataclasses.replace(DESIGN, attention=attention, **design)
    samples = said_by(model.target, lengths_of(20))
    do(tmp_path / "out", model, samples, changed(steps=2), design=design)
    found = load(tmp_path / "out")
    shape = found.shape
    assert shape == dataclasses.replace(
        design_shape(design, model.shape), decoder=dataclasses.replace(shape.decoder)
    )
    assert (shape.taps, shape.decoder.layers) == (design.taps, design.layers)
    assert {flag for flag in FLAGS if getattr(shape, flag)} == set(design.flags)
    assert bool(shape.decoder.latent) == (attention == "latent")
    assert {name: tuple(found.tensors[name].shape) for name in weight_names(shape)} == weight_names(shape)
    engine = slipstream.Engine(
        str(tmp_path / "target"), draft=Eagle3Drafter(tmp_path / "out"), dtype="float32", max_length=64
    )
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    fast, plain = (engine.generate([5, 7], params, speculate=each) for each in (True, False))
    assert fast.token_ids == plain.token_ids


def test_what_cannot_be_designed(model):
    for settings, words in (
        ({"flags": ("norm_it",)}, "unknown norm flag 'norm_it'; known are norm_before_residual"),
        ({"attention": "sparse"}, "unknown attention 'sparse'; known are grouped, latent"),
        ({"attention": "latent"}, "takes its dimensions from the target, which has none"),
        ({"taps": None}, r"the boundaries .2, 1, 0. must ascend .* may need --taps"),
        ({"taps": (0, 1)}, "must ascend"),
        ({"taps": (1, 2, 4)}, r"reads the target at the boundaries .1, 2, 4., this one has 3 layers"),
        ({"vocabulary": 0}, "a vocabulary of 0 tokens"),
    ):
        with pytest.raises(ModelError, match=words):
            design_shape(dataclasses.replace(DESIGN, **settings), model.shape)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_output_layer_begins_as_the_targets(tmp_path, dtype, tied):
    write_model(tmp_path, "llama", tie_word_embeddings=tied)
    model = load_target(str(tmp_path), dtype=dtype, positions=64)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    wanted = tensors[name].to(getattr(torch, dtype)).float()
    ids = torch.tensor([3, 4, 50, 95])
    assert torch.equal(output_rows(model.target, ids), wanted[ids])
    samples = said_by(model.target, lengths_of(10))
    module, coverage = from_scratch(DESIGN, model.target, samples, 0, 64)
    assert torch.equal(module.weight("lm_head.weight"), wanted[module.ids])
    said = samples.tokens[samples.mask]
    assert coverage == pytest.approx(float(torch.isin(said, module.ids.int()).float().mean()))
    assert len(module.ids) == 40
