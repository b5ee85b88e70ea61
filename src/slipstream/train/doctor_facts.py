"""What can be checked about a drafter and its target without running it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from slipstream.draft.eagle3.checkpoint import Checkpoint
from slipstream.draft.eagle3.config import FLAGS
from slipstream.draft.eagle3.shape import default_taps, weight_names
from slipstream.errors import ModelError
from slipstream.target.shape import ModelShape
from slipstream.train.doctor_readings import named_layers, taps_of
from slipstream.train.doctor_trials import EMBEDDING

COVERED = 0.9
"""The share of the target's own words that a draft vocabulary should have: what lies outside is never guessed, so that
it bounds acceptance. A vocabulary that was counted on the target's answers covers 95 % and more."""

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Fact:
    """One thing that was checked."""

    name: str
    status: Status
    """`warn`: it may be meant. `fail`: it cannot be right."""
    found: str


def facts_of(checkpoint: Checkpoint, target: ModelShape, embedding: Tensor) -> list[Fact]:
    """Everything that can be checked by looking. embedding: [V, Ht], the target's."""
    try:
        shape = checkpoint.shape
    except ModelError as error:
        return [Fact("config", "fail", str(error))]
    pairs = {
        "hidden size": (shape.target_hidden_size, target.hidden_size),
        "vocabulary size": (shape.vocab_size, target.vocab_size),
    }
    facts = [
        Fact(
            name,
            "ok" if drafter == theirs else "fail",
            f"{drafter}, as the target's"
            if drafter == theirs
            else f"{drafter}, but the target's is {theirs}: it is another model's drafter",
        )
        for name, (drafter, theirs) in pairs.items()
    ]
    facts += _tensors(checkpoint)
    facts += _maps(checkpoint)
    facts.append(_layers(checkpoint, target))
    facts += _ropes(checkpoint, target)
    facts.append(_flags(checkpoint))
    facts.append(_embedding(checkpoint, embedding))
    return facts


def coverage(checkpoint: Checkpoint, said: Tensor) -> Fact:
    """said: int64 [N], the target's choices in its own answers."""
    share = float(torch.isin(said.cpu(), checkpoint.target_ids).double().mean())
    size = len(checkpoint.target_ids)
    found = f"{share:.1%} of the target's own answers, with {size:,} draft tokens"
    return Fact("coverage", "ok" if share >= COVERED else "warn", found)


def _tensors(checkpoint: Checkpoint) -> Iterator[Fact]:
    wanted = weight_names(checkpoint.shape)
    sizes = {**wanted, "t2d": (checkpoint.shape.vocab_size,)}
    missing = [name for name in wanted if name not in checkpoint.tensors]
    extra = [name for name in checkpoint.tensors if name not in sizes and name != EMBEDDING]
    wrong = [
        f"{name} is {list(tensor.shape)} instead of {list(sizes[name])}"
        for name, tensor in checkpoint.tensors.items()
        if name in sizes and tuple(tensor.shape) != sizes[name]
    ]
    problems = [f"{name} is missing" for name in missing]
    problems += [f"{name} belongs to no flag that is on" for name in extra] + wrong
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        yield Fact("tensors", "fail", problems[0] + more)
    else:
        count = sum(tensor.numel() for tensor in checkpoint.tensors.values())
        yield Fact("tensors", "ok", f"all there, {count:,} values in the dialect of {checkpoint.dialect}")


def _maps(checkpoint: Checkpoint) -> Iterator[Fact]:
    shape, given = checkpoint.shape, checkpoint.tensors.get("d2t")
    if given is None:
        if shape.draft_vocab_size == shape.vocab_size:
            yield Fact("d2t", "ok", "none, and none needed: it drafts the whole vocabulary")
        return  # a missing one is among the tensors
    if given.shape != (shape.draft_vocab_size,):
        return
    ids, vocabulary = checkpoint.target_ids, shape.vocab_size
    falls = (ids[1:] <= ids[:-1]).nonzero()[:, 0].tolist()
    yield Fact(
        "d2t sorted",
        "fail" if falls else "ok",
        f"the tokens do not ascend, first at draft token {falls[0] + 1}" if falls else "the tokens ascend",
    )
    outside = int(((ids < 0) | (ids >= vocabulary)).sum())
    yield Fact(
        "d2t in range",
        "fail" if outside else "ok",
        f"{outside:,} draft tokens lead out of the target's {vocabulary:,}"
        if outside
        else f"all lead into the target's {vocabulary:,} tokens",
    )
    yield _kind(given.long(), vocabulary, not falls and not outside)
    t2d = checkpoint.tensors.get("t2d")
    if t2d is None:
        yield Fact("t2d", "ok", "none; it follows from d2t")
    elif t2d.shape == (vocabulary,):
        wrong = int((t2d.bool() != checkpoint.marked()).sum())
        found = f"differs from d2t at {wrong:,} tokens" if wrong else "marks the tokens that d2t leads to"
        yield Fact("t2d", "fail" if wrong else "ok", found)


def _kind(given: Tensor, vocabulary: int, fits_offsets: bool) -> Fact:
    """Offsets never fall, begin at 0 or more and repeat; absolute ids rise at every step."""
    is_absolute = (
        len(given) > 0
        and bool((given[1:] > given[:-1]).all())
        and int(given[0]) >= 0
        and int(given[-1]) < vocabulary
    )
    if fits_offsets and not is_absolute:
        return Fact("d2t kind", "ok", "offsets: as absolute ids they would repeat")
    if fits_offsets:
        return Fact("d2t kind", "warn", "may be offsets or absolute ids; it is read as offsets")
    kind = "looks like absolute ids" if is_absolute else "fits neither offsets nor absolute ids"
    return Fact("d2t kind", "fail", f"{kind}, and is read as offsets")


def _layers(checkpoint: Checkpoint, target: ModelShape) -> Fact:
    taps = taps_of(checkpoint, target)
    found = f"{named_layers(checkpoint, target)}: the states entering layers {', '.join(map(str, taps))}"
    if min(taps) < 0 or max(taps) > target.layers:
        return Fact("layer ids", "fail", f"{found}, but the target has {target.layers} layers")
    if taps == list(default_taps(target.layers)):
        return Fact("layer ids", "ok", f"{found}, EAGLE's default")
    return Fact("layer ids", "warn", f"{found}; EAGLE's default would be {list(default_taps(target.layers))}")


def _ropes(checkpoint: Checkpoint, target: ModelShape) -> Iterator[Fact]:
    own, theirs, config = checkpoint.shape.decoder.rope, target.rope, checkpoint.config
    nested = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    same = "as the target's" if own.theta == theirs.theta else f"the target's is {theirs.theta:.0f}"
    if "rope_theta" in config or "rope_theta" in nested:
        yield Fact("rope theta", "ok", f"{own.theta:.0f}, {same}")
    else:
        yield Fact("rope theta", "warn", f"not in the config, so {own.theta:.0f}; {same}")
    scaling, wanted = (
        "none" if rope.scaling == "default" else f"{rope.scaling}, factor {rope.factor:g}"
        for rope in (own, theirs)
    )
    same = "as the target's" if scaling == wanted else f"the target's is {wanted}"
    yield Fact("rope scaling", "ok", f"{scaling}; {same}")


def _flags(checkpoint: Checkpoint) -> Fact:
    shape = checkpoint.shape
    on = [flag for flag in FLAGS if getattr(shape, flag)]
    silent = [flag for flag in FLAGS if flag not in checkpoint.config]
    found = f"on: {', '.join(on) or 'none'}"
    return Fact("norm flags", "ok", found + (f"; not in the config: {', '.join(silent)}" if silent else ""))


def _embedding(checkpoint: Checkpoint, embedding: Tensor) -> Fact:
    own, wanted = checkpoint.tensors.get(EMBEDDING), checkpoint.shape.hidden_size
    if own is None:
        if wanted == embedding.shape[1]:
            return Fact("embedding", "ok", "none of its own: the target's")
        return Fact(
            "embedding", "fail", f"none of its own, and the target's has {embedding.shape[1]} elements"
        )
    if own.shape != embedding.shape:
        is_fit = own.shape == (checkpoint.shape.vocab_size, wanted)
        return Fact("embedding", "warn" if is_fit else "fail", f"its own, {list(own.shape)}")
    wrong = int((own.to(embedding) != embedding).any(dim=1).sum())
    if wrong:
        return Fact("embedding", "warn", f"its own differs from the target's in {wrong:,} rows")
    return Fact("embedding", "ok", "equal to the target's")
