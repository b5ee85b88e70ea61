"""The MLP of a layer: dense, or a mixture of experts with a shared one beside it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from slipstream.kernels.activation import swiglu
from slipstream.kernels.experts import experts, route
from slipstream.kernels.linear import linear, pack
from slipstream.target.shape import ModelShape
from slipstream.target.weights import Loader


class Mlp(Protocol):
    """What a layer does to a row by itself."""

    span: str
    """The name under which its time is recorded."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one row reads."""
        ...

    def __call__(self, hidden: Tensor) -> Tensor:
        """[B, T, H] to the same."""
        ...


class DenseMlp:
    """SwiGLU between two linear layers."""

    span = "mlp"

    def __init__(self, load: Loader, has_bias: bool) -> None:
        self._gate_up = load.linear("gate_proj", "up_proj", has_bias=has_bias)
        self._down = load.linear("down_proj", has_bias=has_bias)

    @property
    def weight_bytes(self) -> int:
        return self._gate_up.nbytes + self._down.nbytes

    def __call__(self, hidden: Tensor) -> Tensor:
        return linear(swiglu(linear(hidden, self._gate_up)), self._down)


class ExpertsMlp:
    """A router, the experts that it chooses, and the shared expert that every row goes through."""

    span = "moe"

    def __init__(self, load: Loader, shape: ModelShape) -> None:
        part = shape.experts
        assert part is not None
        self._routing, self._count = part.routing, part.count
        # The router decides on small differences: float32, as DeepSeek-V3 is trained.
        self._gate = pack(load.dense("gate.weight").float(), "float32")
        self._bias = load.dense("gate.e_score_correction_bias").float() if part.has_bias else None
        self._gate_up = load.many(
            part.count,
            lambda e: [load.weight(f"experts.{e}.{name}_proj.weight") for name in ("gate", "up")],
        )
        self._down = load.many(part.count, lambda e: load.weight(f"experts.{e}.down_proj.weight"))
        shared = part.shared_intermediate_size > 0
        self._shared = DenseMlp(load.below("shared_experts."), False) if shared else None

    @property
    def weight_bytes(self) -> int:
        chosen = (self._gate_up.nbytes + self._down.nbytes) * self._routing.per_token // self._count
        return chosen + self._gate.nbytes + (self._shared.weight_bytes if self._shared else 0)

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = linear(hidden.flatten(0, 1), self._gate, torch.float32)
        chosen, weights = route(logits, self._bias, self._routing)
        mixed = experts(hidden, chosen, weights, self._gate_up, self._down)
        return mixed if self._shared is None else mixed + self._shared(hidden)


def make_mlp(load: Loader, shape: ModelShape, layer: int) -> Mlp:
    """The MLP of a layer."""
    return ExpertsMlp(load, shape) if shape.has_experts(layer) else DenseMlp(load, shape.mlp_bias)
