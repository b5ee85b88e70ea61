"""The numbers of a model's shape, against numbers known from elsewhere."""

from __future__ import annotations

import random

import pytest
import torch

from slipstream.target.load import load
from slipstream.target.named import find_config, names
from tests.target.tiny import FAMILIES, write_model

STATED = {  # total and active parameters, as their authors state them
    "llama-3.1-8b": (8_030_261_248, None),
    "llama-3.1-70b": (70_553_706_496, None),
    "qwen3-8b": (8.19e9, None),
    "qwen3-32b": (32.8e9, None),
    "qwen3-235b-a22b": (235e9, 22e9),
    "deepseek-v3": (671e9, 37e9),
    "kimi-k2.5": (1.03e12, 32e9),
    "smollm2-135m": (134_515_008, None),
}


@pytest.mark.parametrize("name", names())
def test_parameters_are_those_that_the_authors_state(name):
    shape = find_config(name).shape
    total, active = STATED[name]
    assert shape.parameters == total if isinstance(total, int) else abs(shape.parameters / total - 1) < 0.005
    assert active is None or abs(shape.active_parameters / active - 1) < 0.025


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_that_transformers_holds(tmp_path, family):
    reference = write_model(tmp_path, family)
    held = sum(parameter.numel() for parameter in reference.parameters())
    held += sum(b.numel() for n, b in reference.named_buffers() if n.endswith("e_score_correction_bias"))
    model = load(str(tmp_path), dtype="float32", positions=32)
    assert model.shape.parameters == held


def test_kimis_checkpoint_is_as_large_as_it_is_published():
    """594 GB, the text part: 4-bit experts with a 16-bit scale for 32 weights, the rest in 16 bits."""
    config = find_config("kimi-k2.5")
    assert abs(config.shape.held_bytes(config.weight_bytes()) / 594e9 - 1) < 0.005


def test_kv_bytes():
    assert find_config("llama-3.1-8b").shape.kv_bytes_per_token(2) == 2 * 32 * 8 * 128 * 2
    assert find_config("kimi-k2.5").shape.kv_bytes_per_token(2) == 61 * (512 + 64) * 2


def test_collectives_of_a_pass():
    shape = find_config("kimi-k2.5").shape
    assert shape.collectives(8, 1, 2) == []
    every = shape.collectives(8, 8, 2)
    in_layers = [each for each in every if each.layer is not None]
    assert len(in_layers) == 122
    assert {(each.kind, each.bytes) for each in in_layers} == {("all_reduce", 8 * 7168 * 2)}
    outside = [(each.kind, each.place, each.bytes) for each in every if each.layer is None]
    assert outside == [("all_reduce", "embed", 8 * 7168 * 2), ("all_gather", "logits", 8 * 163840 // 8 * 4)]


def test_flops_of_a_row_are_about_two_a_weight():
    shape = find_config("llama-3.1-8b").shape
    assert 2 * 7.5e9 < shape.flops(1, 1) < 2 * 8.1e9
    assert shape.flops(8, 100) == 8 * shape.flops(1, 100)
    assert shape.flops(1, 101) - shape.flops(1, 100) == 2 * 32 * 2 * 32 * 128


def test_flops_of_absorbed_latent_attention():
    shape = find_config("deepseek-v3").shape
    assert shape.flops(1, 101) - shape.flops(1, 100) == 2 * 61 * 128 * (512 + 64 + 512)


def test_experts_that_rows_are_expected_to_reach():
    shape = find_config("kimi-k2.5").shape
    draw = random.Random(0)
    simulated = [len({e for _ in range(8) for e in draw.sample(range(384), 8)}) for _ in range(2000)]
    assert abs(shape.distinct_experts(8) - sum(simulated) / 2000) < 0.15
    assert shape.distinct_experts(1) == pytest.approx(8)
    assert find_config("qwen3-8b").shape.distinct_experts(8) == 0


def test_weights_that_a_pass_reads():
    dense = find_config("llama-3.1-8b").shape
    assert round(dense.weight_bytes(1, 2) / 1e9, 1) == 15.0
    assert dense.weight_bytes(8, 2) == dense.weight_bytes(1, 2)
    mixed = find_config("kimi-k2.5")
    read = [mixed.shape.weight_bytes(rows, mixed.weight_bytes()) for rows in (0, 1, 8, 10**6)]
    assert read[0] == 0
    assert read[1] < read[2] / 3
    embedding = 163840 * 7168 * 2  # held, but of it a pass reads single rows
    assert read[3] == pytest.approx(mixed.shape.held_bytes(mixed.weight_bytes()) - embedding)


def test_what_the_engine_reads_is_what_the_shape_says(tmp_path):
    sizes = {"first_k_dense_replace": 0, "qk_rope_head_dim": 32, "n_routed_experts": 32}  # no panel is padded
    write_model(tmp_path, "deepseek_v3", **sizes)
    target = load(str(tmp_path), dtype="float32", positions=32).target
    assert target.weight_bytes == pytest.approx(target.shape.weight_bytes(1, 4.0))
    assert target.kv_layout()[0][0].shape == (1, 32 + 32)
    assert torch.float32.itemsize * 3 * (32 + 32) == target.shape.kv_bytes_per_token(4)
