"""Checkpoints in the formats that DeepSeek-V3 and Kimi-K2.5 ship in, and pieces of them."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import ModelError
from slipstream.kernels.linear import QuantisedWeight, dense
from slipstream.target.load import load
from slipstream.target.quantisation import unpack_int4
from slipstream.target.safetensors_files import SafetensorsFolder
from slipstream.target.weights import Part
from tests.target.tiny import VOCABULARY, forward, write_model

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [24, 40]}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*"],
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "actorder": None,
            },
        }
    },
}


def to_fp8(weight):
    """The two tensors of an fp8 weight, and the exact numbers that they stand for, in float64."""
    rows, columns = (
        torch.arange(n) // block for n, block in zip(weight.shape, FP8["weight_block_size"], strict=True)
    )
    scale = torch.rand(int(rows[-1]) + 1, int(columns[-1]) + 1) * 0.01 + 0.001
    wide = scale[rows][:, columns]
    stored = (weight / wide).to(torch.float8_e4m3fn)
    return stored, scale, stored.double() * wide.double()


def to_int4(weight):
    """Packed words and scales, and the exact numbers, in float64."""
    groups = weight.view(weight.shape[0], -1, 32)
    scale = (groups.abs().amax(-1) / 7).to(torch.bfloat16)
    q = (groups / scale.float()[..., None]).round().clamp(-8, 7)
    nibbles = (q + 8).to(torch.int64).view(weight.shape[0], -1, 8)
    words = (nibbles << torch.arange(0, 32, 4)).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return words, scale, (q.double() * scale.double()[..., None]).view_as(weight)


def rewrite(folder, quantise, prefix="", config_changes=None):
    """Replaces the experts' and dense MLPs' weights by quantised ones; returns the exact numbers by name."""
    tensors, exact, new = load_file(folder / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        if ".mlp." in name and name.endswith("_proj.weight"):
            if quantise == "fp8":
                new[prefix + name], new[f"{prefix}{name}_scale_inv"], exact[name] = to_fp8(tensor)
            else:
                words, scale, exact[name] = to_int4(tensor)
                size = torch.tensor(tensor.shape)
                new |= {
                    f"{prefix}{name}_packed": words,
                    f"{prefix}{name}_scale": scale,
                    f"{prefix}{name}_shape": size,
                }
        else:
            new[prefix + name] = tensor
    if prefix:
        new["vision_tower.patch_embed.weight"] = torch.zeros(2, 2)
        new["mm_projector.weight"] = torch.zeros(2, 2)
    save_file(new, folder / "model.safetensors")
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": FP8 if quantise == "fp8" else INT4}
    path.write_text(json.dumps(config_changes(config) if config_changes else config))
    return exact


def with_exact(reference, exact):
    """transformers' model with the numbers that the quantised tensors stand for."""
    experts = {}
    for name, value in exact.items():
        parts = name.split(".")
        if "experts" in parts and "shared_experts" not in parts:
            experts.setdefault((int(parts[2]), parts[-2]), {})[int(parts[5])] = value.float()
        else:
            reference.get_submodule(name.removesuffix(".weight")).weight.data = value.float()
    for layer in {layer for layer, _ in experts}:
        every = {kind: [experts[layer, kind][e] for e in sorted(experts[layer, kind])] for _, kind in experts}
        mixture = reference.model.layers[layer].mlp.experts
        mixture.gate_up_proj.data = torch.stack(
            [torch.cat(pair) for pair in zip(every["gate_proj"], every["up_proj"], strict=True)]
        )
        mixture.down_proj.data = torch.stack(every["down_proj"])
    return reference


@pytest.mark.parametrize("quantise", ["fp8", "int4"])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "llama"])
def test_logits_are_those_of_the_exact_numbers(tmp_path, family, quantise):
    reference = write_model(tmp_path, family)
    reference = with_exact(reference, rewrite(tmp_path, quantise))
    tokens = torch.randint(0, VOCABULARY, (60,))
    with torch.no_grad():
        expected = reference(tokens[None]).logits[0]
    got = forward(load(str(tmp_path), dtype="float32", positions=100).target, tokens)
    assert (got - expected).abs().max() < 1e-3


def kimi(config):
    """The config of a multimodal model around this one."""
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": config | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"},
        "vision_config": {"hidden_size": 8},
        "eos_token_id": 5,
    }


def test_the_text_part_of_a_multimodal_checkpoint(tmp_path):
    reference = write_model(tmp_path, "deepseek_v3", n_group=1, topk_group=1)
    reference = with_exact(reference, rewrite(tmp_path, "int4", "language_model.", kimi))
    (tmp_path / "generation_config.json").unlink()
    tokens = torch.randint(0, VOCABULARY, (60,))
    with torch.no_grad():
        expected = reference(tokens[None]).logits[0]
    model = load(str(tmp_path), dtype="float32", positions=100)
    assert (forward(model.target, tokens) - expected).abs().max() < 1e-3
    assert any("only its text part" in note for note in model.notes)


def test_int4_is_kept_bit_for_bit(tmp_path):
    words, scale, exact = to_int4(torch.randn(16, 64))
    weight = unpack_int4(words, scale)
    assert isinstance(weight, QuantisedWeight)
    assert torch.equal(weight.dequantise().double(), exact)


def test_int4_with_scales_beyond_float16():
    words, scale, exact = to_int4(torch.randn(16, 64) * 1e-9)
    weight = unpack_int4(words, scale)
    assert isinstance(weight, torch.Tensor)
    torch.testing.assert_close(weight.double(), exact, rtol=1e-7, atol=0)


@pytest.mark.parametrize("quantise", ["fp8", "int4", None])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("at", [64, 40])
def test_parts_make_the_whole(tmp_path, quantise, dim, at):
    """What each of two ranks would read, put together, is the weight; 40 is within a group of inputs."""
    write_model(tmp_path, "deepseek_v3", intermediate_size=128, moe_intermediate_size=64)
    if quantise:
        rewrite(tmp_path, quantise)
    folder = SafetensorsFolder(tmp_path)
    for name, size in folder.sizes().items():
        if len(size) == 2:
            ends = [0, min(at, size[dim] - 1), size[dim]]
            parts = [dense(folder.fetch(name, Part(dim, *each))) for each in pairwise(ends)]
            assert torch.equal(torch.cat(parts, dim), dense(folder.fetch(name))), name


def test_quantised_tensors_that_the_config_does_not_explain(tmp_path):
    write_model(tmp_path, "llama")
    rewrite(tmp_path, "int4")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="names no int4 quantisation"):
        load(str(tmp_path), positions=100)
