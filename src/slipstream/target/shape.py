"""What a model is, in numbers: the engine allocates from it and the lab predicts from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.kernels.experts import Routing

RopeScaling = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: its base and how it is stretched."""

    theta: float
    scaling: RopeScaling = "default"
    factor: float = 1.0
    original_max_positions: int = 8192
    low_freq_factor: float = 1.0
    """llama3"""
    high_freq_factor: float = 4.0
    """llama3"""
    beta_fast: float = 32.0
    """yarn: turns within the original context from which on a frequency is kept."""
    beta_slow: float = 1.0
    """yarn: turns up to which it is stretched by the whole factor."""
    truncate: bool = True
    """yarn: the bounds between which frequencies are blended are whole dimensions."""
    table_scale: float = 1.0
    """yarn: multiplies cos and sin (`attention_factor`)."""
    interleaved: bool = False
    """The checkpoint's rotated pairs are (0, 1), (2, 3) ... instead of the two halves of a head."""


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (arXiv 2405.04434): what its projections are called in DeepSeek's configs."""

    q_rank: int | None
    """q_lora_rank; None projects q directly."""
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in some layers."""

    count: int
    intermediate_size: int
    routing: Routing
    layers: tuple[int, ...]
    """The layers that have experts; the others are dense."""
    shared_intermediate_size: int = 0
    """Of all shared experts together; they are one dense MLP beside the experts."""
    has_bias: bool = False
    """The router chooses by score plus a bias of its own (`e_score_correction_bias`)."""


@dataclass(frozen=True)
class WeightBytes:
    """Bytes that one weight takes where it is stored, scales included, by where it is."""

    attention: float
    mlp: float
    """Of dense MLPs."""
    experts: float
    shared_experts: float
    head: float
    """Of the embedding and the output layer."""

    @staticmethod
    def uniform(bytes_per_weight: float) -> WeightBytes:
        """The same everywhere."""
        return WeightBytes(*[bytes_per_weight] * 5)


@dataclass(frozen=True)
class Collective:
    """One collective of a tensor-parallel pass."""

    kind: Literal["all_reduce", "all_gather"]
    bytes: int
    """What one rank contributes."""
    layer: int | None
    """None outside the layers."""
    place: Literal["embed", "attention", "mlp", "logits"]


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a decoder-only model."""

    family: Literal["llama", "qwen3", "deepseek_v3"]
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    """Of q and k; with latent attention its parts without and with rotation together."""
    intermediate_size: int
    """Of the dense layers' MLP."""
    rms_norm_eps: float
    rope: Rope
    max_positions: int
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """q and k are normed head by head before they are rotated."""
    latent: Latent | None = None
    experts: Experts | None = None
    attention_scale: float = 0.0
    """What scores are multiplied by; 0 stands for head_dim ** -0.5."""
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.attention_scale:
            object.__setattr__(self, "attention_scale", self.head_dim**-0.5)

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> ModelShape:
        """From a Hugging Face `config.json`. Raises ModelError naming whatever it asks for that is not supported."""
        from slipstream.target.config import read_config

        return read_config(config).shape

    def has_experts(self, layer: int) -> bool:
        """Whether this layer's MLP is a mixture of experts."""
        return self.experts is not None and layer in self.experts.layers

    @property
    def parameters(self) -> int:
        """Weights held, a tied embedding counted once; norms and biases of the router included, other biases not."""
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        layers = sum(self._attention_weights() + self._mlp_weights(layer) for layer in range(self.layers))
        return tables + layers + self._norm_weights()

    def flops(self, rows: int, context: int) -> int:
        """Floating-point operations of one pass over `rows` rows that each see `context` keys."""
        return sum(self.flops_by_part(rows, context).values())

    def flops_by_part(self, rows: int, context: int) -> dict[str, int]:
        """The same by part: the attention's projections, its scores and values, mlp (of dense layers), moe, lm_head."""
        sparse = set(self.experts.layers) if self.experts else set()
        mlp = {layer: self._mlp_weights(layer, experts=self._per_token()) for layer in range(self.layers)}
        products = {
            "attention": self.layers * self._attention_weights(),
            "scores": self.layers * context * self._attention_products(),
            "mlp": sum(weights for layer, weights in mlp.items() if layer not in sparse),
            "moe": sum(weights for layer, weights in mlp.items() if layer in sparse),
            "lm_head": self.vocab_size * self.hidden_size,
        }
        return {part: 2 * rows * count for part, count in products.items()}

    def weight_bytes(self, rows: int, stored: WeightBytes | float) -> float:
        """Bytes of weights read by one pass: of experts, those that `rows` rows are expected to reach."""
        if not rows:
            return 0.0
        return self._bytes(stored, self.distinct_experts(rows)) + self.vocab_size * self.hidden_size * (
            stored.head if isinstance(stored, WeightBytes) else stored
        )

    def held_bytes(self, stored: WeightBytes | float) -> float:
        """Bytes of all weights; norms and biases, which are few, left aside."""
        head = stored.head if isinstance(stored, WeightBytes) else stored
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self._bytes(stored, self.experts.count if self.experts else 0) + tables * head

    @property
    def active_parameters(self) -> int:
        """Weights that one row is multiplied by, the output layer included and the embedding's table not."""
        return self.flops(1, 0) // 2

    def distinct_experts(self, rows: int) -> float:
        """The expected number of experts that `rows` rows reach, each choosing at random: E (1 - (1 - k / E)^rows)."""
        if self.experts is None:
            return 0.0
        count, chosen = self.experts.count, self.experts.routing.per_token
        return count * (1 - (1 - chosen / count) ** rows)

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of KV that one token holds in all layers."""
        values = (
            self.latent.kv_rank + self.latent.rope_dim if self.latent else 2 * self.kv_heads * self.head_dim
        )
        return self.layers * values * bytes_per_value

    def collectives(self, rows: int, tp: int, bytes_per_value: int) -> list[Collective]:
        """The collectives of one pass over `rows` rows on `tp` ranks, in order."""
        if tp == 1:
            return []
        size = rows * self.hidden_size * bytes_per_value
        found = [Collective("all_reduce", size, None, "embed")]
        for layer in range(self.layers):
            found.append(Collective("all_reduce", size, layer, "attention"))
            found.append(Collective("all_reduce", size, layer, "mlp"))
        logits = rows * -(-self.vocab_size // tp) * 4
        return [*found, Collective("all_gather", logits, None, "logits")]

    def _per_token(self) -> int:
        return self.experts.routing.per_token if self.experts else 0

    def _attention_weights(self) -> int:
        if self.latent is None:
            return self.hidden_size * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        part = self.latent
        q_out = self.heads * self.head_dim
        q = self.hidden_size * q_out if part.q_rank is None else part.q_rank * (self.hidden_size + q_out)
        kv = self.hidden_size * (part.kv_rank + part.rope_dim)
        kv += part.kv_rank * self.heads * (part.nope_dim + part.value_dim)
        return q + kv + self.heads * part.value_dim * self.hidden_size

    def _mlp_weights(self, layer: int, experts: float | None = None) -> int:
        """Of one layer, with so many of its experts (default: all)."""
        if self.experts is None or layer not in self.experts.layers:
            return 3 * self.hidden_size * self.intermediate_size
        reached = self.experts.count if experts is None else experts
        routed = reached * self.experts.intermediate_size + self.experts.shared_intermediate_size
        return round(3 * self.hidden_size * routed) + self.hidden_size * self.experts.count

    def _bytes(self, stored: WeightBytes | float, reached: float) -> float:
        """Bytes of the layers with so many experts each."""
        by = stored if isinstance(stored, WeightBytes) else WeightBytes.uniform(stored)
        total = by.attention * self.layers * self._attention_weights()
        sparse = len(self.experts.layers) if self.experts else 0
        total += by.mlp * 3 * self.hidden_size * self.intermediate_size * (self.layers - sparse)
        if self.experts is not None:
            each = by.experts * 3 * self.hidden_size * self.experts.intermediate_size * reached
            each += by.shared_experts * 3 * self.hidden_size * self.experts.shared_intermediate_size
            total += sparse * (each + 4 * self.hidden_size * self.experts.count)  # the router is float32
        return total

    def _attention_products(self) -> int:
        """Multiply-adds of one row with one key, scores and values; latent attention in its absorbed form."""
        if self.latent is None:
            return 2 * self.heads * self.head_dim
        return self.heads * (2 * self.latent.kv_rank + self.latent.rope_dim)

    def _norm_weights(self) -> int:
        per_layer = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        if self.latent:
            per_layer += self.latent.kv_rank + (self.latent.q_rank or 0)
        biases = (
            self.experts.count * len(self.experts.layers) if self.experts and self.experts.has_bias else 0
        )
        return self.layers * per_layer + self.hidden_size + biases


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """By how much YaRN (arXiv 2309.00071, equation 22) sharpens attention for a context stretched by `factor`."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
