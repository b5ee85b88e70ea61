"""What the tests of training share: a tiny target whose next token can be guessed, and data in its own words."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from slipstream.draft.eagle3.checkpoint import Checkpoint
from slipstream.target.load import LoadedModel, load
from slipstream.train import job as jobs
from slipstream.train.begin import Design, from_scratch
from slipstream.train.job import Job
from slipstream.train.ranks import Ranks
from slipstream.train.samples import Samples
from slipstream.train.states import OnlineStates
from slipstream.train.trainer import Recipe, Trainer, full
from tests.target.tiny import VOCABULARY, write_model
from tests.train.toy import make_forgetful

TAPS = (1, 2, 3)
DESIGN = Design(vocabulary=40, taps=TAPS)
RECIPE = Recipe(steps=3, row_length=32, rows=2, epochs=1, lr=2e-3)
ALONE = Ranks(0, 1, "cpu")


def guessable(folder: Path, family: str = "llama", dtype: str = "float32", **changes) -> LoadedModel:
    """A model whose next token depends on its last one alone."""
    write_model(folder, family, **changes)
    make_forgetful(folder)
    return load(str(folder), dtype=dtype, positions=256)


def said_by(target, lengths, seed=0, faithful=0.8) -> Samples:
    """Texts in which most tokens are the target's own choice after the one before; the first fifth has no loss."""
    draw = torch.Generator().manual_seed(seed)
    every = torch.arange(VOCABULARY)
    states = OnlineStates(target, TAPS)(range(VOCABULARY), list(every[:, None]))
    following = target.logits(torch.cat([hidden for _, hidden in states])).argmax(-1)
    tokens, mask = [], []
    for length in lengths:
        token = int(torch.randint(VOCABULARY, (), generator=draw))
        for place in range(length):
            tokens.append(token)
            mask.append(place >= length // 5)
            stays = float(torch.rand((), generator=draw)) < faithful
            token = int(following[token]) if stays else int(torch.randint(VOCABULARY, (), generator=draw))
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return Samples(torch.tensor(tokens, dtype=torch.int32), torch.tensor(mask), starts)


def lengths_of(count: int, longest: int = 32, seed: int = 0) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(1, longest + 1, (count,), generator=draw).tolist()


def trainer_of(target, samples, recipe=RECIPE, states=None, design=DESIGN) -> Trainer:
    module, _ = from_scratch(design, target, samples, recipe.seed, recipe.row_length + recipe.steps)
    return Trainer(module, target, samples, states or OnlineStates(target, module.shape.taps), recipe)


def run_to(trainer: Trainer, update: int | None = None) -> list:
    """Trains on, up to an update; what was said after each."""
    found: list = []
    if update is None or trainer.done < update:
        trainer.run(lambda each: found.append(each) is None and each.number != update)
    return found


def bits(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All that a training holds: weights and moments."""
    found = {}
    for name, parameter in trainer.module.named_parameters():
        found[name] = full(parameter.detach()).clone()
        for kind, value in trainer.optimiser.state.get(parameter, {}).items():
            found[f"{kind} {name}"] = value.clone()
    return found


def assert_same_bits(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def do(folder: Path, model: LoadedModel, samples: Samples, recipe: Recipe = RECIPE, **settings) -> tuple:
    """A whole job: its facts, and the lines that were said."""
    said: list[str] = []
    wanted = {"design": DESIGN, "held_out": 6, "weights": "float32", **settings}
    job = Job(folder, recipe, **wanted)
    facts = jobs.run(
        job, model, samples, ALONE, said.append, lambda update, speed: None, lambda what, done, of: None
    )
    return facts, said


def changed(recipe: Recipe = RECIPE, **settings) -> Recipe:
    return dataclasses.replace(recipe, **settings)


def same_drafter(a: Checkpoint, b: Checkpoint) -> bool:
    """Bit for bit, the config too."""
    return (
        a.config == b.config
        and a.tensors.keys() == b.tensors.keys()
        and all(torch.equal(tensor, b.tensors[name]) for name, tensor in a.tensors.items())
    )
