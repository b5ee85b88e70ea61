"""What a model is, in numbers: the engine allocates from it and the lab predicts from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.errors import ModelError

RopeScaling = Literal["default", "linear", "llama3"]


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: its base and how it is stretched."""

    theta: float
    scaling: RopeScaling = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


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

    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: Rope
    max_positions: int
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_ids: tuple[int, ...] = ()

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> ModelShape:
        """From a Hugging Face `config.json`. Raises ModelError naming whatever it asks for that is not supported."""
        architecture = next(iter(config.get("architectures") or ["none named"]))
        reader = _ARCHITECTURES.get(architecture)
        if reader is None:
            raise ModelError(
                f"architecture {architecture} is not supported; supported are {', '.join(_ARCHITECTURES)}"
            )
        try:
            return reader(config)
        except KeyError as error:
            raise ModelError(f"the model's config has no {error.args[0]}") from None

    @property
    def parameters(self) -> int:
        """Weights held, a tied embedding counted once."""
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return tables + self.layers * self._layer_weights() + self.hidden_size * (2 * self.layers + 1)

    def flops(self, rows: int, context: int) -> int:
        """Floating-point operations of one pass over `rows` rows that each see `context` keys."""
        products = self.layers * self._layer_weights() + self.vocab_size * self.hidden_size
        return 2 * rows * (products + 2 * self.layers * context * self.heads * self.head_dim)

    def weight_bytes(self, rows: int, bytes_per_weight: float) -> float:
        """Bytes of weights read by one pass; dense models read them all, however many rows there are."""
        read = self.layers * self._layer_weights() + self.vocab_size * self.hidden_size
        return bytes_per_weight * read if rows else 0.0

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of KV that one token holds in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_value

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

    def _layer_weights(self) -> int:
        attention = self.hidden_size * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size


def _llama(config: Mapping[str, Any]) -> ModelShape:
    refuse(config, "quantization_config", None)
    refuse(config, "sliding_window", None)
    refuse(config, "hidden_act", "silu")
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    eos = config.get("eos_token_id")
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ModelError(f"{heads} heads cannot share {kv_heads} KV heads evenly")
    return ModelShape(
        family="llama",
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=int(config.get("head_dim") or hidden // heads),
        intermediate_size=int(config["intermediate_size"]),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config),
        max_positions=int(config.get("max_position_embeddings", 2048)),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
    )


def _rope(config: Mapping[str, Any]) -> Rope:
    """Its parameters as transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`) write them."""
    found = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(found.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = found.get("rope_type") or found.get("type") or "default"
    if float(found.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) != 1.0:
        raise ModelError("a rotary embedding of only part of each head is not supported")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", float(found["factor"]))
    if kind == "llama3":
        return Rope(
            theta,
            "llama3",
            float(found["factor"]),
            float(found["low_freq_factor"]),
            float(found["high_freq_factor"]),
            int(found["original_max_position_embeddings"]),
        )
    raise ModelError(f"rope scaling {kind!r} is not supported; supported are default, linear, llama3")


def refuse(config: Mapping[str, Any], key: str, supported: object) -> None:
    """Raises ModelError if the config sets `key` to anything but the supported value."""
    if config.get(key, supported) != supported:
        wanted = "" if supported is None else f"; supported is {supported!r}"
        value = config[key]
        shown = value.get("quant_method", value) if isinstance(value, dict) else value
        raise ModelError(f"the model asks for {key} {shown!r}, which is not supported{wanted}")


_ARCHITECTURES: dict[str, Callable[[Mapping[str, Any]], ModelShape]] = {"LlamaForCausalLM": _llama}
