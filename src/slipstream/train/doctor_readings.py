"""The other ways to read a drafter, each of which somebody's tools have really used: what may be wrong, and its cure.

Each changes one fact. A fault that is not in the checkpoint (the alignment of its training) has a reading too, so that
it can be named, but no cure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.draft.eagle3.checkpoint import Checkpoint
from slipstream.draft.eagle3.config import FLAGS, Config
from slipstream.draft.eagle3.dialects import Dialect
from slipstream.draft.eagle3.shape import default_taps
from slipstream.errors import ModelError
from slipstream.target.config import read_rope
from slipstream.target.shape import ModelShape, Rope
from slipstream.train.doctor_trials import EMBEDDING, Reading

THETAS = (10000.0, 500000.0, 1000000.0, 5000000.0)
"""Of EAGLE's trainer, which reads no other, of Llama 3, of Qwen and of Qwen's long models."""


@dataclass(frozen=True)
class Alternative:
    """One fact read otherwise."""

    fact: str
    was: str
    """What was done, as a clause."""
    now: str
    """What is done instead, as the beginning of a clause."""
    reading: Reading


def alternatives(reading: Reading, target: ModelShape, embedding: Tensor) -> list[Alternative]:
    """All that can be run on the target and differ from the reading. embedding: [V, Ht], the target's."""
    made = [
        *_maps(reading),
        *_layers(reading, target),
        *_flags(reading),
        *_ropes(reading, target),
        *_shifts(reading),
        *_embeddings(reading, embedding),
    ]
    return [each for each in made if each.reading.obstacle(target) is None]


def boundaries(checkpoint: Checkpoint, target: ModelShape) -> list[int]:
    """The target's states that some reading wants."""
    wanted = {tap for each in _places(checkpoint, target).values() for tap in each}
    return sorted(tap for tap in wanted | set(taps_of(checkpoint, target)) if 0 <= tap <= target.layers)


def taps_of(checkpoint: Checkpoint, target: ModelShape) -> list[int]:
    """The boundaries that a drafter reads, in range or not."""
    return list(checkpoint.config.get("taps") or default_taps(target.layers))


def mended(reading: Reading) -> Checkpoint:
    """A reading's checkpoint as it can be saved: without norms that it does not use, its t2d made to fit its d2t."""
    checkpoint = reading.checkpoint
    unused = [name for flag, name in _NORMS.items() if not checkpoint.config.get(flag)]
    tensors = {
        name: tensor
        for name, tensor in checkpoint.tensors.items()
        if not any(name.startswith(each) for each in unused)
    }
    t2d = tensors.get("t2d")
    if t2d is not None and not torch.equal(t2d.bool(), marked := checkpoint.marked()):
        tensors["t2d"] = marked.to(t2d.dtype)
    return Checkpoint(checkpoint.config, tensors, checkpoint.dialect)


_NORMS = {"norm_before_fc": "input_norm.", "fc_norm": "fc_norm."}
"""Flags that bring tensors of their own."""


def _maps(reading: Reading) -> Iterator[Alternative]:
    checkpoint = reading.checkpoint
    given, t2d = checkpoint.tensors.get("d2t"), checkpoint.tensors.get("t2d")
    if given is not None and given.dim() == 1:
        count, was = torch.arange(len(given)), "d2t was read as offsets"
        twice = "read as offsets from which the draft ids were taken twice"
        for now, ids in (("read as absolute ids", given - count), (twice, given + count)):
            yield Alternative("d2t", was, now, _changed(reading, {"d2t": ids.to(given.dtype)}))
    if t2d is None or t2d.dim() != 1:
        return
    ids = t2d.nonzero()[:, 0]
    offsets = (ids - torch.arange(len(ids))).to(torch.int64 if given is None else given.dtype)
    if given is None or not torch.equal(offsets, given):
        was = "d2t is missing" if given is None else "d2t leads to other tokens than t2d marks"
        yield Alternative("d2t", was, "rebuilt from t2d", _changed(reading, {"d2t": offsets}))


def _places(checkpoint: Checkpoint, target: ModelShape) -> dict[str, list[int]]:
    """Other boundaries by how they are arrived at; no place comes twice."""
    taps = taps_of(checkpoint, target)
    is_boundary = checkpoint.dialect == Dialect.SPECULATORS
    up = "read as outputs of layers" if is_boundary else "each one higher"
    down = "each one lower" if is_boundary else "read as boundaries"
    found = {up: [tap + 1 for tap in taps], down: [tap - 1 for tap in taps]}
    default = list(default_taps(target.layers))
    if len(taps) == 3 and default not in (taps, *found.values()):
        found["at EAGLE's default places"] = default
    return found


def named_layers(checkpoint: Checkpoint, target: ModelShape) -> str:
    """Its layer ids in its dialect's convention, which is named."""
    taps = taps_of(checkpoint, target)
    if checkpoint.config.get("taps") is None:
        return f"no layer ids, so the default boundaries {taps}"
    if checkpoint.dialect == Dialect.SPECULATORS:
        return f"the layer ids {taps} as boundaries"
    return f"the layer ids {[tap - 1 for tap in taps]} as outputs of layers"


def _layers(reading: Reading, target: ModelShape) -> Iterator[Alternative]:
    was = named_layers(reading.checkpoint, target).replace(" as ", " were read as ")
    for now, taps in _places(reading.checkpoint, target).items():
        if taps == sorted(set(taps)) and taps[0] >= 0 and taps[-1] <= target.layers:
            yield Alternative("layer ids", was, now, _changed(reading, taps=taps))


def _flags(reading: Reading) -> Iterator[Alternative]:
    config, tensors = reading.checkpoint.config, reading.checkpoint.tensors
    for flag in FLAGS:
        is_on = bool(config.get(flag))
        norm = _NORMS.get(flag)
        if not is_on and norm and not any(name.startswith(norm) for name in tensors):
            continue
        changes: dict[str, Any] = {flag: not is_on}
        if norm and not is_on:
            changes |= {other: False for other in _NORMS if other != flag and config.get(other)}
        was, now = (f"{flag} was on", "off") if is_on else (f"{flag} was off", "on")
        yield Alternative(flag, was, now, _changed(reading, **changes))


def _ropes(reading: Reading, target: ModelShape) -> Iterator[Alternative]:
    config = reading.checkpoint.config
    try:
        rope = read_rope(config)
    except (ModelError, KeyError, TypeError, ValueError):
        return
    was = f"rope theta was {rope.theta:.0f}"
    for theta in dict.fromkeys((*THETAS, target.rope.theta)):
        if theta != rope.theta:
            now = f"with {theta:.0f}" + (", the target's" if theta == target.rope.theta else "")
            yield Alternative("rope theta", was, now, _changed(reading, **_theta(config, theta)))
    plain = {key: _plain(config[key]) for key in _NESTED if config.get(key)}
    if rope.scaling != "default":
        was = f"the rope was scaled ({rope.scaling}, factor {rope.factor:g})"
        yield Alternative("rope scaling", was, "without scaling", _changed(reading, **plain))
    theirs = _scaling(target.rope, target.latent is not None)
    if theirs and (rope.scaling, rope.factor) != (target.rope.scaling, target.rope.factor):
        was = "the rope was not scaled as the target's"
        key = next((key for key in _NESTED if config.get(key)), "rope_scaling")
        scaled = {**plain, key: {**(plain.get(key) or {}), **theirs}}
        for now, changes in (
            ("with its scaling", scaled),
            ("with its scaling and theta", _theta({**config, **scaled}, target.rope.theta)),
        ):
            yield Alternative("rope scaling", was, now, _changed(reading, **{**scaled, **changes}))


_NESTED = ("rope_parameters", "rope_scaling")


def _theta(config: Config, theta: float) -> dict[str, Any]:
    """The entries of a config that say another theta, wherever it says it."""
    nested = {
        key: {**config[key], "rope_theta": theta}
        for key in _NESTED
        if config.get(key) and "rope_theta" in config[key]
    }
    return nested | ({"rope_theta": theta} if "rope_theta" in config or not nested else {})


def _plain(nested: Config) -> Config | None:
    return {"rope_type": "default", "rope_theta": nested["rope_theta"]} if "rope_theta" in nested else None


def _scaling(rope: Rope, is_latent: bool) -> Config:
    """As a config says it; empty where there is none, or for a YaRN rope that scales scores too (latent attention)."""
    if rope.scaling == "default" or (rope.scaling == "yarn" and is_latent):
        return {}
    found: Config = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling != "linear":
        found["original_max_position_embeddings"] = rope.original_max_positions
    if rope.scaling == "llama3":
        found |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.scaling == "yarn":
        found |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        found["attention_factor"] = rope.table_scale
    return found


def _shifts(reading: Reading) -> Iterator[Alternative]:
    names = {-1: "token t", 0: "token t + 1", 1: "token t + 2"}
    was = f"the target's state at t was paired with {names[reading.shift]}"
    for shift, name in names.items():
        if shift != reading.shift:
            yield Alternative("token shift", was, f"with {name}", Reading(reading.checkpoint, shift))


def _embeddings(reading: Reading, embedding: Tensor) -> Iterator[Alternative]:
    checkpoint = reading.checkpoint
    own = checkpoint.tensors.get(EMBEDDING)
    if own is None or own.shape != embedding.shape:
        return
    theirs = embedding.to(own.device)
    if torch.equal(own.to(theirs.dtype), theirs):
        return
    if checkpoint.dialect == Dialect.SPECULATORS:  # whose engines ask for one in the file
        cured = checkpoint.changed({EMBEDDING: theirs.to(own.dtype)})
    else:
        kept = {name: tensor for name, tensor in checkpoint.tensors.items() if name != EMBEDDING}
        cured = Checkpoint(checkpoint.config, kept, checkpoint.dialect)
    was = "the drafter's own embedding was used"
    yield Alternative("embedding", was, "with the target's", Reading(cured, reading.shift))


def _changed(reading: Reading, tensors: dict[str, Tensor] | None = None, **config: object) -> Reading:
    return Reading(reading.checkpoint.changed(tensors, **config), reading.shift)
