"""What a config asks for and is not supported is refused by name; what is supported is read as it is meant."""

from __future__ import annotations

import copy

import pytest

from slipstream.errors import ModelError
from slipstream.target.config import read_config
from slipstream.target.named import _FOLDER, _read, find_config

LLAMA = _read(_FOLDER / "llama-3.1-8b.json")
QWEN3 = _read(_FOLDER / "qwen3-8b.json")
DEEPSEEK = _read(_FOLDER / "deepseek-v3.json")
KIMI = _read(_FOLDER / "kimi-k2.5.json")


def int4(**changes):
    found = copy.deepcopy(KIMI["text_config"]["quantization_config"])
    found["config_groups"]["group_0"]["weights"] |= changes
    return {"quantization_config": found}


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (LLAMA, {"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        (LLAMA, {"architectures": []}, "none named"),
        (LLAMA, {"sliding_window": 4096}, "sliding_window 4096"),
        (QWEN3, {"use_sliding_window": True, "sliding_window": 4096}, "sliding_window"),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention' layers"),
        (LLAMA, {"attention_sinks": True}, "attention sinks"),
        (LLAMA, {"vision_config": {"hidden_size": 8}}, "vision tower"),
        (LLAMA, {"hidden_act": "gelu"}, "gelu"),
        (LLAMA, {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        (LLAMA, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "part of each head"),
        (LLAMA, {"num_key_value_heads": 5}, "5 KV heads"),
        (LLAMA, {"hidden_size": "wide"}, "cannot be read"),
        (LLAMA, {"quantization_config": {"quant_method": "awq"}}, "awq"),
        (LLAMA, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        (LLAMA, {"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        (LLAMA, {"quantization_config": {"quant_method": "fp8"}}, "block scales"),
        (LLAMA, int4(group_size=128), "group_size 128"),
        (LLAMA, int4(symmetric=False), "symmetric False"),
        (LLAMA, int4(num_bits=8), "num_bits 8"),
        (LLAMA, int4(strategy="channel"), "strategy 'channel'"),
        (LLAMA, int4(actorder="group"), "actorder"),
        (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        (DEEPSEEK, {"topk_method": "greedy"}, "topk_method 'greedy'"),
        (DEEPSEEK, {"n_group": 7}, "7 groups"),
        (DEEPSEEK, {"num_experts_per_tok": 300}, "300 of 256"),
        (DEEPSEEK, {"topk_group": 1, "num_experts_per_tok": 40}, "too few"),
        (KIMI["text_config"], {"kv_lora_rank": None}, "cannot be read"),
    ],
)
def test_refused_by_name(config, changes, named):
    with pytest.raises(ModelError, match=named):
        read_config(config | changes)


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_attention_heads", "intermediate_size"])
def test_a_missing_field_is_named(field):
    with pytest.raises(ModelError, match=f"no {field}"):
        read_config({name: value for name, value in LLAMA.items() if name != field})


def test_a_window_that_is_switched_off_is_no_window():
    read_config(QWEN3 | {"use_sliding_window": False, "sliding_window": 4096})


def test_the_text_part_of_a_multimodal_config():
    found = read_config(KIMI)
    assert found.shape.family == "deepseek_v3"
    assert found.shape.eos_ids == (163586,)
    assert found.quantisation is not None
    assert found.quantisation.format == "int4"
    assert "only its text part" in found.notes[0]


def test_multi_token_prediction_layers_are_left_out():
    assert read_config(DEEPSEEK).ignored == ("model.layers.61.",)


def test_yarns_scale_of_kimi():
    """Worked by hand: (0.1 ln 64 + 1)^2 / sqrt(192); cos and sin are not scaled, as both mscales are 1."""
    shape = read_config(KIMI).shape
    assert abs(shape.attention_scale - (0.1 * 4.1588830833596715 + 1) ** 2 / 192**0.5) < 1e-12
    assert shape.rope.table_scale == 1.0


def test_unknown_names_list_the_known(tmp_path):
    with pytest.raises(ModelError, match=r"kimi-k2\.5"):
        find_config("kimi")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="not a JSON object"):
        find_config(str(tmp_path))
