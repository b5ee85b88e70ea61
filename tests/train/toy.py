"""Random EAGLE-3 modules beside targets that are but a table of states, so small that guesses are often right."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file

from slipstream.draft.eagle3.shape import Eagle3Shape
from slipstream.train.eagle3_model import Eagle3Module
from slipstream.train.losses import features_of, goals_of, outcome_of
from slipstream.train.packing import batch_of
from slipstream.train.samples import Samples
from tests.draft.heads import SHAPES

VOCABULARY, DRAFT_IDS = 6, (0, 2, 3, 5)
WIDTH, TAPS = 64, (0, 1, 2)
CPU = torch.device("cpu")


def module_of(kind="llama", positions=64, seed=0, **flags) -> Eagle3Module:
    """All weights random, the norms too."""
    draw = torch.Generator().manual_seed(seed)
    decoder = dataclasses.replace(SHAPES[kind], vocab_size=VOCABULARY)
    shape = Eagle3Shape(decoder, WIDTH, len(DRAFT_IDS), TAPS, len(TAPS), **flags)
    torch.manual_seed(seed)
    embedding = torch.randn(VOCABULARY, WIDTH, generator=draw)
    module = Eagle3Module(shape, embedding, torch.tensor(DRAFT_IDS), positions)
    with torch.no_grad():
        for name, weight in module.weights.items():
            if "norm" in name or name.endswith("bias"):
                weight.normal_(float("norm" in name), 0.3)
    return module


class Toy:
    """A target whose final states are its logits, and the states of some samples: all random."""

    device, dtype, shape = CPU, torch.float32, SimpleNamespace(vocab_size=VOCABULARY, hidden_size=WIDTH)

    def __init__(self, lengths, seed=0):
        draw = torch.Generator().manual_seed(seed)
        self.features = [torch.randn(length, len(TAPS) * WIDTH, generator=draw) for length in lengths]
        self.hidden = [2 * torch.randn(length, VOCABULARY, generator=draw) for length in lengths]

    def logits(self, hidden):
        return hidden

    def __call__(self, samples, tokens):
        assert [len(each) for each in tokens] == [len(self.hidden[sample]) for sample in samples]
        return [(self.features[sample], self.hidden[sample]) for sample in samples]


def samples_of(masks, seed=0) -> Samples:
    """Random tokens under given masks (lists of bools)."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([0, *map(len, masks)])
    mask = torch.tensor([each for mask in masks for each in mask], dtype=torch.bool)
    tokens = torch.randint(VOCABULARY, (len(mask),), generator=draw, dtype=torch.int32)
    return Samples(tokens, mask, lengths.cumsum(0))


def outcome(module, toy, samples, rows, width, steps):
    """Of some rows of samples in one batch."""
    batch = batch_of(samples, rows, width, CPU)
    features, hidden = features_of(batch, toy)
    return outcome_of(module, batch, features, goals_of(toy, hidden, module.ids, torch.float32), steps)


def alone(module, toy, samples, number, steps):
    """A sample's draft logits [steps, T, Vd], run by itself."""
    if not len(samples.sample(number)[0]):
        return torch.empty(steps, 0, len(module.ids))
    tokens = samples.sample(number)[0].long()[None]
    given = toy.features[number][None]
    return torch.stack(
        module(tokens, torch.zeros_like(tokens), given, steps, lambda step, normed: module.logits(normed)[0])
    )


def make_forgetful(folder) -> None:
    """A saved model's next token then depends on its last one alone, so that greedy texts soon go round in circles."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    blind = {
        name: each * 0
        for name, each in tensors.items()
        if name.endswith(("o_proj.weight", "down_proj.weight"))
    }
    save_file({**tensors, **blind}, path, metadata={"format": "pt"})
