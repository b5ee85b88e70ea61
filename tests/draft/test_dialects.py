"""Drafters in four dialects: what is written is read bit for bit, and what is not known is refused by name."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from slipstream.draft.eagle3.checkpoint import Checkpoint, load, read, save
from slipstream.draft.eagle3.dialects import Dialect
from slipstream.draft.eagle3.shape import Eagle3Shape, weight_names
from slipstream.errors import ModelError
from tests.draft.heads import SHAPES

LAYERS = 12
DEFAULT = (2, 6, 9)


def made(shape: Eagle3Shape, dtype=torch.bfloat16, extra: bool = False) -> Checkpoint:
    """Random tensors for a shape."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(size).to(dtype) for name, size in weight_names(shape).items()}
    if "d2t" in tensors:
        ids = torch.randperm(shape.vocab_size)[: shape.draft_vocab_size].sort().values
        tensors["d2t"] = ids - torch.arange(len(ids))
    if extra:
        tensors["embed_tokens.weight"] = torch.randn(shape.vocab_size, shape.hidden_size).to(dtype)
    return Checkpoint.of(shape, tensors)


def same_tensors(one: Checkpoint, other: Checkpoint) -> bool:
    names = one.tensors.keys() - {"t2d"}
    return names == other.tensors.keys() - {"t2d"} and all(
        torch.equal(one.tensors[name], other.tensors[name])
        and one.tensors[name].dtype == other.tensors[name].dtype
        for name in names
    )


@st.composite
def shapes(draw) -> Eagle3Shape:
    norms = draw(st.sampled_from([{}, {"norm_before_fc": True}, {"fc_norm": True}]))
    taps = tuple(sorted(draw(st.sets(st.integers(1, LAYERS), min_size=1, max_size=4))))
    decoder = SHAPES[draw(st.sampled_from(sorted(SHAPES)))]
    return Eagle3Shape(
        decoder=dataclasses.replace(decoder, max_positions=draw(st.integers(64, 4096))),
        target_hidden_size=draw(st.sampled_from([64, 32])),
        draft_vocab_size=draw(st.sampled_from([17, decoder.vocab_size])),
        taps=draw(st.sampled_from([DEFAULT, taps])),
        norm_before_residual=draw(st.booleans()),
        norm_output=draw(st.booleans()),
        fc_bias=draw(st.booleans()),
        **norms,
    )


def counted(shape: Eagle3Shape) -> Eagle3Shape:
    return dataclasses.replace(shape, tap_count=len(shape.taps or ()))


def can_say(shape: Eagle3Shape, dialect: Dialect) -> bool:
    is_plain = not (shape.norm_before_residual or shape.norm_before_fc or shape.fc_norm or shape.norm_output)
    if dialect == Dialect.EAGLE:
        return is_plain and shape.taps == DEFAULT and not shape.decoder.latent and shape.decoder.layers == 1
    return dialect != Dialect.SPECFORGE or shape.decoder.layers == 1


@settings(max_examples=40, deadline=None)
@given(shapes().map(counted), st.sampled_from([torch.bfloat16, torch.float32]), st.booleans())
def test_round_trips_are_bit_equal(shape, dtype, extra):
    """Each dialect alone, and one after another around the circle."""
    first = now = made(shape, dtype, extra)
    with tempfile.TemporaryDirectory() as folder:
        circle = [each for each in Dialect if can_say(shape, each)]
        for number, dialect in enumerate([*circle, *circle[:1]]):
            for kind, given_ in (("alone", first), ("circle", now)):
                save(Path(folder) / f"{kind}{number}", given_, dialect, LAYERS)
            alone, now = load(Path(folder) / f"alone{number}"), load(Path(folder) / f"circle{number}")
            for found in (alone, now):
                assert found.dialect == dialect
                assert same_tensors(found, first)
                assert dataclasses.replace(found.shape, taps=shape.taps) == shape
                assert found.shape.taps == (None if dialect == Dialect.EAGLE else shape.taps)
                if "t2d" in found.tensors:
                    assert torch.equal(found.tensors["t2d"], first.marked())
            now = now.changed(taps=list(shape.taps))
        for dialect in set(Dialect) - set(circle):
            with pytest.raises(ModelError):
                save(Path(folder) / "no", first, dialect, LAYERS)


LLAMA = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "vocab_size": 96, "max_position_embeddings": 2048,
    "hidden_act": "silu", "attention_bias": False, "initializer_range": 0.02, "use_cache": True,
}  # fmt: skip
IDS = "eagle_aux_hidden_state_layer_ids"
EAGLE = {
    **LLAMA, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": 17,
    "bos_token_id": 128000, "eos_token_id": 128001, "pretraining_tp": 1, "rope_scaling": None, "torch_dtype": "float16",
    "tie_word_embeddings": False, "transformers_version": "4.46.2",
}  # fmt: skip
SPECFORGE = {
    **EAGLE, "architectures": ["LlamaForCausalLMEagle3"], "rope_theta": 500000.0,
    "eagle_config": {IDS: [1, 5, 8], "use_aux_hidden_state": True},
}  # fmt: skip
MODELOPT = {
    **SPECFORGE,
    "eagle_config": {
        IDS: [1, 5, 8], "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
        "norm_before_residual": True,
    },
}  # fmt: skip
SPECULATORS = {
    "architectures": ["Eagle3Speculator"], "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"}, "draft_vocab_size": 17,
    "has_no_defaults_at_init": False, "norm_before_residual": True, "speculators_model_type": "eagle3",
    "speculators_version": "0.1.0.dev42", "target_hidden_size": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.55.0", IDS: None,
    "speculators_config": {
        "algorithm": "eagle3", "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "meta-llama/Llama-3.1-8B-Instruct"},
    },
    "transformer_layer_config": {
        **LLAMA, "model_type": "llama", "attention_dropout": 0.0, "mlp_bias": False, "pretraining_tp": 1,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
        "rope_theta": 500000.0,
    },
}  # fmt: skip
WILD = {
    Dialect.EAGLE: EAGLE,
    Dialect.SPECFORGE: SPECFORGE,
    Dialect.MODELOPT: MODELOPT,
    Dialect.SPECULATORS: SPECULATORS,
}


def write(folder: Path, dialect: Dialect, config: dict, **changes) -> Path:
    """A drafter as the dialect's own tool leaves it: names and files are written here, not by slipstream."""
    shape = Eagle3Shape(SHAPES["llama"], 64, 17, taps=DEFAULT)
    torch.manual_seed(0)
    first = "midlayer." if dialect in (Dialect.EAGLE, Dialect.SPECFORGE) else "layers.0."
    tensors = {n.replace("layers.0.", first): torch.randn(s) for n, s in weight_names(shape).items()}
    tensors["d2t"] = torch.arange(17) * 2
    if dialect != Dialect.MODELOPT:
        tensors["t2d"] = torch.zeros(96, dtype=torch.bool)
        tensors["t2d"][torch.arange(17) * 3] = True
    tensors |= changes
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if dialect == Dialect.EAGLE:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dialect", WILD)
def test_as_found_in_the_wild(tmp_path, dialect):
    found = load(write(tmp_path, dialect, WILD[dialect]))
    assert found.dialect == dialect
    assert found.target_ids.tolist() == list(range(0, 51, 3))
    assert found.shape.taps == (DEFAULT if dialect in (Dialect.SPECFORGE, Dialect.MODELOPT) else None)
    assert found.shape.norm_before_residual == (dialect in (Dialect.MODELOPT, Dialect.SPECULATORS))
    assert found.shape.decoder.rope.theta == (10000.0 if dialect == Dialect.EAGLE else 500000.0)
    assert found.shape.decoder.rope.scaling == ("llama3" if dialect == Dialect.SPECULATORS else "default")
    save(tmp_path / "again", found)
    again = load(tmp_path / "again")
    assert (again.shape, again.dialect) == (found.shape, dialect)
    assert same_tensors(again, found)


@pytest.mark.parametrize("dialect", WILD)
def test_every_unknown_key_is_refused_by_name(tmp_path, dialect):
    config = WILD[dialect]
    inner = [key for key in ("eagle_config", "transformer_layer_config") if key in config]
    places = [
        {**config, "surprise": 1},
        *({**config, key: {**config[key], "surprise": 1}} for key in inner),
    ]
    for changed in places:
        with pytest.raises(ModelError, match="'surprise'"):
            read(write(tmp_path, dialect, changed))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"architectures": ["Eagle4"]}, "Eagle4"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm"),
        ({"eagle_config": {"norm_output": True}, "norm_output": False}, "norm_output twice"),
        ({"eagle_config": {IDS: [8, 5, 1]}}, "not ascending"),
        ({"draft_vocab_size": 97}, "97"),
        ({"hidden_size": None}, "cannot be read"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path, changes, named):
    with pytest.raises(ModelError, match=named):
        load(write(tmp_path, Dialect.SPECFORGE, {**SPECFORGE, **changes}))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 70000.0},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 70000.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 70000}},
    ],
)
def test_rope_theta_wherever_it_stands(tmp_path, rope):
    config = {key: value for key, value in SPECFORGE.items() if not key.startswith("rope")} | rope
    found = load(write(tmp_path, Dialect.SPECFORGE, config))
    assert found.shape.decoder.rope.theta == 70000.0
    for dialect in (Dialect.SPECULATORS, Dialect.MODELOPT):
        save(tmp_path / dialect, found, dialect)
        assert load(tmp_path / dialect).shape.decoder.rope == found.shape.decoder.rope


def test_older_names_of_the_norms(tmp_path):
    norms = {f"aux_norm_{name}.weight": torch.randn(64) for name in ("low", "mid", "high")}
    found = load(write(tmp_path, Dialect.SPECFORGE, {**SPECFORGE, "fc_norm": True}, **norms))
    assert [found.tensors[f"fc_norm.{tap}.weight"].tolist() for tap in range(3)] == [
        norm.tolist() for norm in norms.values()
    ]


def test_the_whole_vocabulary_needs_no_map(tmp_path):
    shape = counted(Eagle3Shape(SHAPES["llama"], 64, 96, taps=DEFAULT))
    for dialect in Dialect:
        save(tmp_path / dialect, made(shape), dialect, LAYERS)
        found = load(tmp_path / dialect)
        assert not {"d2t", "t2d"} & found.tensors.keys()
        assert found.target_ids.tolist() == list(range(96))


def test_eagle_needs_the_target_for_its_layer_ids(tmp_path):
    head = made(counted(Eagle3Shape(SHAPES["llama"], 64, 17, taps=DEFAULT)))
    with pytest.raises(ModelError, match="name the target"):
        save(tmp_path, head, Dialect.EAGLE)
    with pytest.raises(ModelError, match="not the default"):
        save(tmp_path, head, Dialect.EAGLE, LAYERS + 1)


class Code:
    """Runs something when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return os.mkdir, (str(self._path),)


def test_a_pickle_with_code_is_not_run(tmp_path):
    folder = write(tmp_path / "head", Dialect.EAGLE, EAGLE)
    torch.save({"fc.weight": Code(tmp_path / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be read as weights alone"):
        read(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("dialect", WILD)
def test_truncated_and_missing_files(tmp_path, dialect):
    folder = write(tmp_path / "head", dialect, WILD[dialect])
    weights = next(path for path in folder.iterdir() if path.name != "config.json")
    whole = weights.read_bytes()
    for size in (0, 100, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:size])
        with pytest.raises(ModelError, match="cannot be read"):
            read(folder)
    weights.unlink()
    with pytest.raises(ModelError, match="holds neither"):
        read(folder)
    (folder / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        read(folder)
