"""What one of several ranks holds of a model (Megatron-LM, arXiv 1909.08053, sections 3 and 4).

| weights | split | then |
|---|---|---|
| q, k, v; latent attention's way up | by heads: outputs | |
| the attention's output layer | by heads: inputs | all-reduce |
| gate, up; of experts, those of every expert | by intermediate: outputs | |
| down | by intermediate: inputs | all-reduce |
| embedding | by token | all-reduce |
| output layer | by token | all-gather |
| norms, routers, latent attention's way down | every rank has them whole | |

Whole groups of heads that share a KV head are dealt, unevenly where they do not divide; with fewer KV heads than ranks
several ranks hold the same one, each with some of its query heads. Every expert is split, instead of dealing whole
experts out: few rows reach few experts, and the rank that holds most of those would be waited for in every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.kernels.linear import GROUP, Weight
from slipstream.target.shape import ModelShape
from slipstream.target.weights import Fetch, Part


def deal(count: int, size: int, unit: int = 1) -> list[range]:
    """`count` things for `size` ranks in runs of whole units, as even as can be, the first ones the longer ones."""
    units = -(-count // unit)
    share, more = divmod(units, size)
    ends = [min(unit * (share * rank + min(rank, more)), count) for rank in range(size + 1)]
    return [range(first, last) for first, last in pairwise(ends)]


@dataclass(frozen=True)
class Shard:
    """The parts of one rank, in elements of the whole model. Make one with `Shard.of`."""

    whole: ModelShape
    rank: int
    size: int
    heads: range
    kv_heads: range
    intermediate: range
    expert: range
    """Of every expert's intermediate size."""
    shared_expert: range
    tokens: range
    """Of the vocabulary."""

    @staticmethod
    def of(shape: ModelShape, rank: int = 0, size: int = 1, *, in_groups: bool = False) -> Shard:
        """in_groups: the layers' inputs are quantised in groups, which stay whole.

        Raises ModelError with the sizes that work where some rank would be left without a part, or with half a group.
        """
        shards = _shards(shape, size, in_groups) if 1 <= size <= shape.heads else None
        if shards is None:
            working = [str(n) for n in range(1, shape.heads + 1) if _shards(shape, n, in_groups)]
            why = f"{shape.heads} attention heads{' and groups of inputs that share a scale' if in_groups else ''}"
            raise ModelError(
                f"the model cannot be split over {size} ranks ({why}); these sizes work: {', '.join(working)}"
            )
        return shards[rank]

    @property
    def shape(self) -> ModelShape:
        """The model that this rank's layers are; its vocabulary is the whole one."""
        whole, experts = self.whole, self.whole.experts
        if experts:
            experts = replace(
                experts,
                intermediate_size=len(self.expert),
                shared_intermediate_size=len(self.shared_expert),
            )
        return replace(
            whole,
            heads=len(self.heads),
            kv_heads=len(self.kv_heads),
            intermediate_size=len(self.intermediate),
            experts=experts,
        )

    def fetch(self, checkpoint: Callable[[str, Part | None], Weight]) -> Fetch:
        """Fetches this rank's part of each of a checkpoint's tensors, and reads no more of it."""
        if self.size == 1:
            return lambda name: checkpoint(name, None)

        def part_of(name: str) -> Weight:
            layer, kind = name.split(".")[-2:]
            split = self._split(name, layer)
            if split is None:
                return checkpoint(name, None)
            dim, own = split
            if kind == "bias" and dim == 1:  # added once to the sum over the ranks
                bias = checkpoint(name, None)
                assert isinstance(bias, Tensor)
                return bias if self.rank == 0 else torch.zeros_like(bias)
            return checkpoint(name, Part(dim, own.start, own.stop))

        return part_of

    def _split(self, name: str, layer: str) -> tuple[int, range] | None:
        """The dimension in which a layer's weight is split, and this rank's range of it; None: it is not."""
        whole, latent = self.whole, self.whole.latent
        value = latent.value_dim if latent else whole.head_dim
        match layer:
            case "embed_tokens" | "lm_head":
                return 0, self.tokens
            case "q_proj" | "q_b_proj":
                return 0, _times(self.heads, whole.head_dim)
            case "k_proj" | "v_proj":
                return 0, _times(self.kv_heads, whole.head_dim)
            case "kv_b_proj" if latent:
                return 0, _times(self.heads, latent.nope_dim + value)
            case "o_proj":
                return 1, _times(self.heads, value)
            case "gate_proj" | "up_proj":
                return 0, self._intermediate(name)
            case "down_proj":
                return 1, self._intermediate(name)
        return None

    def _intermediate(self, name: str) -> range:
        if ".shared_experts." in name:
            return self.shared_expert
        return self.expert if ".experts." in name else self.intermediate


def _times(own: range, size: int) -> range:
    return range(own.start * size, own.stop * size)


def _shards(shape: ModelShape, size: int, in_groups: bool) -> list[Shard] | None:
    """By rank; None where the model cannot be split so."""
    heads, kv_heads = _deal_heads(shape, size)
    value = shape.latent.value_dim if shape.latent else shape.head_dim
    if in_groups and any(own.start * value % GROUP for own in heads):
        return None
    experts, empty = shape.experts, [range(0)] * size
    dense = _deal_inputs(shape.intermediate_size, size, in_groups)
    expert = _deal_inputs(experts.intermediate_size, size, in_groups) if experts else empty
    has_shared = experts is not None and experts.shared_intermediate_size > 0
    shared = _deal_inputs(experts.shared_intermediate_size, size, in_groups) if experts else empty
    tokens = deal(
        shape.vocab_size, size, -(-shape.vocab_size // size)
    )  # one length, but for the last: all-gather
    needed = [tokens, *([expert] if experts else []), *([shared] if has_shared else [])]
    if experts is None or len(experts.layers) < shape.layers:
        needed.append(dense)
    if not all(own for parts in needed for own in parts):
        return None
    return [
        Shard(shape, rank, size, *parts)
        for rank, parts in enumerate(zip(heads, kv_heads, dense, expert, shared, tokens, strict=True))
    ]


def _deal_heads(shape: ModelShape, size: int) -> tuple[list[range], list[range]]:
    """Query heads and KV heads by rank."""
    if shape.latent:
        heads = deal(shape.heads, size)
        return heads, heads
    group = shape.heads // shape.kv_heads
    if size <= shape.kv_heads:
        kv_heads = deal(shape.kv_heads, size)
        return [_times(own, group) for own in kv_heads], kv_heads
    heads, kv_heads = [], []
    for head, ranks in enumerate(deal(size, shape.kv_heads)):
        heads += [range(head * group + own.start, head * group + own.stop) for own in deal(group, len(ranks))]
        kv_heads += [range(head, head + 1)] * len(ranks)
    return heads, kv_heads


def _deal_inputs(count: int, size: int, in_groups: bool) -> list[range]:
    """Whole groups of inputs, which kernels like, where that leaves no rank without any."""
    return deal(count, size, GROUP if in_groups or count >= size * GROUP else 1)
