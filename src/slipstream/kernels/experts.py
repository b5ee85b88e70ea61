"""A mixture of experts for a few rows: which experts a row goes to, and their weighted sum.

A row's experts and its bits depend on that row alone (design rule 3): ties go to the lower expert, and the outputs of
its experts are added in float32 in the order in which they were chosen, rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from slipstream.kernels.activation import swiglu
from slipstream.kernels.linear import PackedWeight, group_of, linear
from slipstream.kernels.native import native


@dataclass(frozen=True)
class Routing:
    """How a router's logits become experts and weights.

    softmax: Qwen's, the probabilities of the chosen ones. sigmoid: DeepSeek-V3's (arXiv 2412.19437, section 2.1.2):
    experts are chosen by score + bias among the `top_groups` groups with the highest sum of their two best, and
    weighed by the score alone.
    """

    per_token: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    top_groups: int = 1
    normalise: bool = True
    """The weights of a row are divided by their sum."""
    scale: float = 1.0
    """Multiplies the weights in the end."""


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """logits float32 [R, E], bias float32 [E] -> experts int64 [R, k], best first, and weights float32 [R, k]."""
    if logits.device.type == "cpu" and (ext := native()) is not None:
        found: tuple[Tensor, Tensor] = ext.route(
            logits,
            bias,
            routing.per_token,
            routing.score == "softmax",
            routing.groups,
            routing.top_groups,
            routing.normalise,
            routing.scale,
        )
        return found
    return route_reference(logits, bias, routing)


def route_reference(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    # Row by row: torch computes an element in another way where a vector of elements ends.
    rows = [row.softmax(-1) if routing.score == "softmax" else row.sigmoid() for row in logits]
    scores = torch.stack(rows) if rows else logits
    choice = scores if bias is None else scores + bias
    if routing.groups > 1:
        grouped = choice.view(len(choice), routing.groups, -1)
        best = grouped.topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _best(best, routing.top_groups), True)
        choice = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    experts = _best(choice, routing.per_token)
    weights = scores.gather(1, experts)
    if routing.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return experts, weights * routing.scale


def _best(values: Tensor, count: int) -> Tensor:
    """The indices of the highest `count` of each row, best first; the lower index wins a tie."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def experts(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: PackedWeight, down: PackedWeight) -> Tensor:
    """x [..., H] through the experts `chosen` (int64 [R, k]) of its R rows, weighed by `weights` (float32 [R, k]).

    gate_up: E weights [2I, H]. down: E weights [H, I]. Returns [..., H] in x's dtype.
    """
    if gate_up.is_native:
        ext = native()
        assert ext is not None
        y: Tensor = ext.experts(
            x, chosen, weights, gate_up.data, down.data, gate_up.format, gate_up.groups, down.in_features
        )
        return y
    return experts_reference(x, chosen, weights, gate_up, down)


def experts_reference(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: PackedWeight, down: PackedWeight
) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    outputs = rows.new_zeros(*chosen.shape, x.shape[-1], dtype=torch.float32)
    for expert in chosen.unique().tolist():
        row, place = (chosen == expert).nonzero(as_tuple=True)
        hidden = swiglu(linear(rows[row], group_of(gate_up, expert)))
        outputs[row, place] = linear(hidden, group_of(down, expert), torch.float32)
    total = torch.zeros_like(outputs[:, 0])
    for place in range(chosen.shape[1]):
        total += outputs[:, place] * weights[:, place, None]
    return total.to(x.dtype).view(x.shape)
