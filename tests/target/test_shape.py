"""The numbers of a model's shape, against numbers known from elsewhere."""

from __future__ import annotations

from slipstream.target.shape import ModelShape

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "eos_token_id": [128001, 128008, 128009],
}


def test_llama_3_1_8b():
    shape = ModelShape.from_config(LLAMA_8B)
    assert shape.parameters == 8_030_261_248  # as its authors state
    assert shape.kv_bytes_per_token(2) == 131072
    assert round(shape.weight_bytes(1, 2) / 1e9, 1) == 15.0
    assert shape.eos_ids == (128001, 128008, 128009)


def test_collectives_of_a_pass():
    shape = ModelShape.from_config(LLAMA_8B)
    assert shape.collectives(8, 1, 2) == []
    every = shape.collectives(8, 2, 2)
    in_layers = [each for each in every if each.layer is not None]
    assert len(in_layers) == 64
    assert {each.bytes for each in in_layers} == {8 * 4096 * 2}
    assert [each.place for each in every if each.layer is None] == ["embed", "logits"]


def test_flops_of_a_row_are_about_two_a_weight():
    shape = ModelShape.from_config(LLAMA_8B)
    assert 2 * 7.5e9 < shape.flops(1, 1) < 2 * 8.1e9
    assert shape.flops(8, 100) == 8 * shape.flops(1, 100)
