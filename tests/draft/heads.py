"""Tiny targets with random EAGLE-3 drafters of every kind on them."""

from __future__ import annotations

import dataclasses

import torch

from slipstream.draft.eagle3.checkpoint import Checkpoint, save
from slipstream.draft.eagle3.dialects import Dialect
from slipstream.draft.eagle3.shape import Eagle3Shape
from slipstream.target.load import load as load_target
from slipstream.target.shape import Latent, ModelShape, Rope
from slipstream.train.eagle3_model import Eagle3Module
from tests.target.tiny import VOCABULARY, write_model

DRAFT_VOCABULARY = 40
GROUPED = ModelShape(
    family="llama",
    vocab_size=VOCABULARY,
    hidden_size=64,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    rms_norm_eps=1e-5,
    rope=Rope(10000.0),
    max_positions=256,
)
LATENT = dataclasses.replace(
    GROUPED,
    family="deepseek_v3",
    kv_heads=1,
    head_dim=48,
    attention_scale=0.0,
    latent=Latent(q_rank=32, kv_rank=32, nope_dim=32, rope_dim=16, value_dim=32),
    rope=Rope(10000.0, interleaved=True),
)
SHAPES = {
    "llama": GROUPED,
    "two layers": dataclasses.replace(GROUPED, layers=2),
    "latent": LATENT,
    "latent, q direct": dataclasses.replace(LATENT, latent=dataclasses.replace(LATENT.latent, q_rank=None)),
    "llama3 rope": dataclasses.replace(GROUPED, rope=Rope(500.0, "llama3", 8.0, 32)),
}
FLAGS = [
    {},
    {"norm_before_residual": True, "norm_before_fc": True},
    {"norm_output": True, "fc_norm": True},
    {"fc_bias": True, "later_norm": "hidden_norm"},
]


def shape_of(kind="llama", taps=(1, 2, 3), vocabulary=DRAFT_VOCABULARY, **flags) -> Eagle3Shape:
    return Eagle3Shape(
        decoder=SHAPES[kind],
        target_hidden_size=64,
        draft_vocab_size=vocabulary,
        taps=taps,
        tap_count=len(taps),
        **flags,
    )


def random_head(target, shape: Eagle3Shape, seed=0) -> Eagle3Module:
    """A module with random weights, its norms too."""
    torch.manual_seed(seed)
    ids = torch.randperm(VOCABULARY)[: shape.draft_vocab_size].sort().values
    head = Eagle3Module(shape, target.embed(torch.arange(VOCABULARY)), ids, 512)
    with torch.no_grad():
        for name, weight in head.weights.items():
            if "norm" in name or name.endswith("bias"):
                weight.normal_(float("norm" in name), 0.3)
    return head


def made(folder, family="llama", seed=0, **settings):
    """A tiny target in `folder`, and a random drafter on it, saved in `folder/head`: the target and the module."""
    write_model(folder, family)
    target = load_target(str(folder), dtype="float32", positions=512).target
    head = random_head(target, shape_of(**settings), seed)
    dialect = Dialect.MODELOPT if head.shape.decoder.layers > 1 else Dialect.SPECFORGE
    save(folder / "head", Checkpoint.of(head.shape, head.tensors()), dialect)
    return target, head
