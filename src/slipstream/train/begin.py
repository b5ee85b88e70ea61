"""How a drafter's training begins: from scratch on a target's dimensions, or from a drafter that exists."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.draft.eagle3.checkpoint import Checkpoint
from slipstream.draft.eagle3.config import FLAGS
from slipstream.draft.eagle3.dialects import Dialect
from slipstream.draft.eagle3.shape import Eagle3Shape, default_taps
from slipstream.errors import DataError, ModelError
from slipstream.target.family import Target
from slipstream.target.shape import ModelShape, Rope
from slipstream.train.eagle3_model import Eagle3Module
from slipstream.train.evaluate import module_of
from slipstream.train.samples import Samples, draft_vocabulary


@dataclass(frozen=True)
class Design:
    """What a drafter from scratch looks like, beside its target's dimensions."""

    vocabulary: int = 32000
    layers: int = 1
    attention: str = "grouped"
    """grouped, or latent where the target's is."""
    intermediate_size: int | None = None
    """None: the target's."""
    rope_theta: float = 10000.0
    max_positions: int = 2048
    taps: tuple[int, ...] | None = None
    """Boundaries between the target's layers; None: EAGLE's own choice."""
    flags: tuple[str, ...] = ()
    """Of `config.FLAGS`."""


def design_shape(design: Design, target: ModelShape) -> Eagle3Shape:
    """Raises ModelError for what cannot be built."""
    if unknown := [flag for flag in design.flags if flag not in FLAGS]:
        raise ModelError(f"unknown norm flag {unknown[0]!r}; known are {', '.join(FLAGS)}")
    if design.attention not in ("grouped", "latent"):
        raise ModelError(f"unknown attention {design.attention!r}; known are grouped, latent")
    if design.attention == "latent" and target.latent is None:
        raise ModelError(
            "a drafter with latent attention takes its dimensions from the target, which has none"
        )
    latent = target.latent if design.attention == "latent" else None
    heads = target.heads
    grouped_dim = target.head_dim if target.latent is None else target.latent.value_dim
    decoder = ModelShape(
        family="deepseek_v3" if latent else "llama",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        layers=design.layers,
        heads=heads,
        kv_heads=1 if latent else (target.kv_heads if target.latent is None else heads),
        head_dim=target.head_dim if latent else grouped_dim,
        intermediate_size=design.intermediate_size or target.intermediate_size,
        rms_norm_eps=target.rms_norm_eps,
        rope=Rope(design.rope_theta, interleaved=bool(latent)),
        max_positions=design.max_positions,
        latent=latent,
    )
    if design.vocabulary < 1:
        raise ModelError(f"a drafter cannot have a vocabulary of {design.vocabulary} tokens")
    taps = design.taps or default_taps(target.layers)
    if list(taps) != sorted(set(taps)) or min(taps) < 1:
        raise ModelError(
            f"the boundaries {list(taps)} must ascend and lie above the embedding; a target of {target.layers} layers"
            " may need --taps"
        )
    shape = Eagle3Shape(
        decoder=decoder,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=min(design.vocabulary, target.vocab_size),
        taps=taps,
        tap_count=len(taps),
        **dict.fromkeys(design.flags, True),  # type: ignore[arg-type]
    )
    return shape.paired(target)


def from_scratch(
    design: Design, target: Target, samples: Samples, seed: int, positions: int
) -> tuple[Eagle3Module, float]:
    """A module with random layers, whose output layer begins as the target's rows; and its vocabulary's coverage.

    positions: of the longest sample that it will ever see, and the steps. Raises DataError where the answers would give
    a map that nobody could tell from one that was never set.
    """
    shape = design_shape(design, target.shape)
    d2t, coverage = draft_vocabulary(samples, shape.vocab_size, shape.draft_vocab_size)
    ids = d2t + torch.arange(len(d2t))
    if is_unset(ids, shape.vocab_size):
        raise DataError(
            f"no answer has a token beyond the target's first {len(ids)}, so that the map of the draft vocabulary would"
            " look unset; give more data, or another --vocabulary"
        )
    torch.manual_seed(seed)
    table = _table(target)
    module = Eagle3Module(shape, table, ids, positions)
    rows = output_rows(target, ids.to(target.device))
    with torch.no_grad():
        module.weight("lm_head.weight").copy_(rows)
    return module, coverage


def fine_tune(
    checkpoint: Checkpoint, target: Target, samples: Samples, positions: int
) -> tuple[Eagle3Module, float]:
    """The module of a drafter that exists, its map of tokens bit for bit; and the map's coverage of the data.

    positions: of the longest sample that it will ever see, and the steps. Raises ModelError for a drafter of another
    target, and for a map that was never set.
    """
    shape = checkpoint.shape.paired(target.shape)
    if problems := checkpoint.problems():
        raise ModelError(f"training does not begin on this drafter: {problems[0]}")
    ids = checkpoint.target_ids
    if is_unset(ids, shape.vocab_size):
        raise ModelError(
            f"the drafter's map of tokens is unset: its {len(ids)} draft tokens are simply the target's first ones"
        )
    module = module_of(checkpoint, target, positions)
    counts = torch.bincount(samples.tokens[samples.mask], minlength=shape.vocab_size)
    return module, float(counts[ids].sum() / counts.sum().clamp_min(1))


def is_unset(ids: Tensor, vocabulary: int) -> bool:
    """Whether a map is what a forgotten one looks like: the first tokens of a larger vocabulary (verl-SpeCo #66)."""
    return len(ids) < vocabulary and torch.equal(ids, torch.arange(len(ids)))


def export(
    module: Eagle3Module, weights: dict[str, Tensor], start: Checkpoint | None, dtype: torch.dtype
) -> Checkpoint:
    """The drafter as it is saved. weights: whole tensors by name. start: the one it was fine-tuned from, whose config,
    map and dialect are kept as they are."""
    numbers = {name: tensor.to(dtype).cpu() for name, tensor in weights.items() if name != "d2t"}
    if start is not None:
        named = {key: _name(dtype) for key in ("dtype", "torch_dtype") if key in start.config}
        return start.changed(numbers, **named)
    made = {**numbers, "d2t": weights["d2t"].cpu()} if "d2t" in weights else numbers
    checkpoint = Checkpoint.of(module.shape, made)
    # The usual dialect names but one layer.
    return replace(checkpoint, dialect=Dialect.MODELOPT) if module.shape.decoder.layers > 1 else checkpoint


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _table(target: Target) -> Tensor:
    return target.embed(torch.arange(target.shape.vocab_size, device=target.device))


def output_rows(target: Target, ids: Tensor) -> Tensor:
    """float32 [Vd, H]: the target's output layer at these tokens, read by giving it the unit vectors."""
    size = target.shape.hidden_size
    units = torch.eye(size, dtype=target.dtype, device=target.device).split(64)
    columns = [target.logits(unit)[:, ids] for unit in units]
    return torch.cat(columns).T.contiguous()
