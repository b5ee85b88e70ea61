"""From a Hugging Face `config.json` to a shape; whatever it asks for that is not supported is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from slipstream.errors import ModelError
from slipstream.kernels.experts import Routing
from slipstream.target.quantisation import Quantisation, read_quantisation
from slipstream.target.shape import Experts, Latent, ModelShape, Rope, WeightBytes, yarn_scale

Config = Mapping[str, Any]


@dataclass(frozen=True)
class ModelConfig:
    """What a config says beyond the shape."""

    shape: ModelShape
    quantisation: Quantisation | None = None
    """How the checkpoint's weights are stored; None is plain."""
    prefixes: tuple[str, ...] = ("",)
    """What may stand before the names of the weights."""
    ignored: tuple[str, ...] = ()
    """Beginnings of the names of weights that are left out on purpose."""
    notes: tuple[str, ...] = ()

    def weight_bytes(self, plain: float = 2.0) -> WeightBytes:
        """Bytes of a weight by place, as the checkpoint stores them; `plain` where it is not quantised."""
        quantisation = self.quantisation
        if quantisation is None:
            return WeightBytes.uniform(plain)
        at = "model.layers.0."
        return WeightBytes(
            attention=quantisation.bytes_per_weight(f"{at}self_attn.o_proj", plain),
            mlp=quantisation.bytes_per_weight(f"{at}mlp.down_proj", plain),
            experts=quantisation.bytes_per_weight(f"{at}mlp.experts.0.down_proj", plain),
            shared_experts=quantisation.bytes_per_weight(f"{at}mlp.shared_experts.down_proj", plain),
            head=quantisation.bytes_per_weight("lm_head", plain),
        )


def read_config(config: Config) -> ModelConfig:
    """Raises ModelError naming what is missing or not supported, before any weight is looked at."""
    architecture = next(iter(config.get("architectures") or ["none named"]))
    try:
        if architecture in _MULTIMODAL:
            return _text_part(architecture, config)
        reader = _ARCHITECTURES.get(architecture)
        if reader is None:
            known = ", ".join([*_ARCHITECTURES, *_MULTIMODAL])
            raise ModelError(f"architecture {architecture} is not supported; supported are {known}")
        if "vision_config" in config:
            raise ModelError(f"{architecture} with a vision tower is not supported")
        _refuse_what_nobody_supports(config)
        shape = reader(config)
        return ModelConfig(
            shape, read_quantisation(config.get("quantization_config")), ignored=_mtp(config, shape)
        )
    except KeyError as error:
        raise ModelError(f"the model's config has no {error.args[0]}") from None
    except (TypeError, ValueError) as error:
        raise ModelError(f"the model's config cannot be read: {error}") from None


def _text_part(architecture: str, config: Config) -> ModelConfig:
    """The language model inside a multimodal one."""
    text = dict(config["text_config"])
    text.setdefault("architectures", ["DeepseekV3ForCausalLM"])
    text.setdefault("quantization_config", config.get("quantization_config"))
    if config.get("eos_token_id") is not None:
        text.setdefault("eos_token_id", config["eos_token_id"])
    found = read_config(text)
    return replace(
        found,
        prefixes=("language_model.", "model.language_model."),
        ignored=(
            *found.ignored,
            "vision_tower.",
            "mm_projector.",
            "model.vision_tower.",
            "model.mm_projector.",
        ),
        notes=(f"{architecture} also reads pictures; only its text part is used here",),
    )


def _refuse_what_nobody_supports(config: Config) -> None:
    if config.get("use_sliding_window", True) and config.get("sliding_window") is not None:
        refuse(config, "sliding_window", None)
    for kind in config.get("layer_types") or []:
        if kind != "full_attention":
            raise ModelError(f"the model asks for {kind!r} layers, which are not supported")
    if config.get("attn_sinks") or config.get("attention_sinks") or config.get("sinks"):
        raise ModelError("the model asks for attention sinks, which are not supported")
    refuse(config, "hidden_act", "silu")


def _mtp(config: Config, shape: ModelShape) -> tuple[str, ...]:
    """Layers for multi-token prediction stand behind the model's own; they are drafters, which this model is not."""
    count = int(config.get("num_nextn_predict_layers") or 0)
    return tuple(f"model.layers.{shape.layers + i}." for i in range(count))


def _common(config: Config) -> dict[str, Any]:
    eos = config.get("eos_token_id")
    return {
        "vocab_size": int(config["vocab_size"]),
        "hidden_size": int(config["hidden_size"]),
        "layers": int(config["num_hidden_layers"]),
        "heads": int(config["num_attention_heads"]),
        "intermediate_size": int(config["intermediate_size"]),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "max_positions": int(config.get("max_position_embeddings", 2048)),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "attention_bias": bool(config.get("attention_bias", False)),
        "eos_ids": tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
    }


def _heads(config: Config) -> dict[str, Any]:
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ModelError(f"{heads} heads cannot share {kv_heads} KV heads evenly")
    return {"kv_heads": kv_heads, "head_dim": int(config.get("head_dim") or config["hidden_size"] // heads)}


def _llama(config: Config) -> ModelShape:
    return ModelShape(
        family="llama",
        **_common(config),
        **_heads(config),
        rope=read_rope(config),
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def _qwen3(config: Config) -> ModelShape:
    return ModelShape(
        family="qwen3", **_common(config), **_heads(config), rope=read_rope(config), qk_norm=True
    )


def _qwen3_moe(config: Config) -> ModelShape:
    layers, step = int(config["num_hidden_layers"]), int(config.get("decoder_sparse_step", 1))
    dense = set(config.get("mlp_only_layers") or [])
    sparse = tuple(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)
    routing = Routing(
        per_token=int(config["num_experts_per_tok"]), normalise=bool(config.get("norm_topk_prob", False))
    )
    experts = Experts(
        count=int(config.get("num_experts") or config["num_local_experts"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        routing=routing,
        layers=sparse,
    )
    return replace(_qwen3(config), experts=_checked(experts))


def _deepseek_v3(config: Config) -> ModelShape:
    latent = Latent(
        q_rank=None if config.get("q_lora_rank") is None else int(config["q_lora_rank"]),
        kv_rank=int(config["kv_lora_rank"]),
        nope_dim=int(config["qk_nope_head_dim"]),
        rope_dim=int(config["qk_rope_head_dim"]),
        value_dim=int(config["v_head_dim"]),
    )
    head_dim = latent.nope_dim + latent.rope_dim
    rope = replace(read_rope(config), interleaved=bool(config.get("rope_interleave", True)))
    found = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    scale = head_dim**-0.5
    if rope.scaling != "default" and found.get("mscale_all_dim"):
        scale *= yarn_scale(rope.factor, float(found["mscale_all_dim"])) ** 2
    return ModelShape(
        family="deepseek_v3",
        **_common(config),
        kv_heads=1,
        head_dim=head_dim,
        rope=rope,
        latent=latent,
        experts=_deepseek_experts(config),
        attention_scale=scale,
    )


def _deepseek_experts(config: Config) -> Experts | None:
    if not config.get("n_routed_experts"):
        return None
    refuse(config, "scoring_func", "sigmoid")
    refuse(config, "topk_method", "noaux_tc")
    layers, first = int(config["num_hidden_layers"]), int(config.get("first_k_dense_replace") or 0)
    frequency = int(config.get("moe_layer_freq", 1))
    size = int(config["moe_intermediate_size"])
    experts = Experts(
        count=int(config["n_routed_experts"]),
        intermediate_size=size,
        routing=Routing(
            per_token=int(config["num_experts_per_tok"]),
            score="sigmoid",
            groups=int(config.get("n_group") or 1),
            top_groups=int(config.get("topk_group") or 1),
            normalise=bool(config.get("norm_topk_prob", True)),
            scale=float(config.get("routed_scaling_factor", 1.0)),
        ),
        layers=tuple(layer for layer in range(first, layers) if layer % frequency == 0),
        shared_intermediate_size=size * int(config.get("n_shared_experts") or 0),
        has_bias=True,
    )
    return _checked(experts)


def _checked(experts: Experts) -> Experts:
    routing = experts.routing
    per_group = experts.count // routing.groups
    if not 1 <= routing.per_token <= experts.count:
        raise ModelError(f"a row cannot choose {routing.per_token} of {experts.count} experts")
    if experts.count % routing.groups or not 1 <= routing.top_groups <= routing.groups:
        raise ModelError(
            f"{experts.count} experts cannot be chosen from {routing.top_groups} of {routing.groups} groups"
        )
    if routing.groups > 1 and (per_group < 2 or per_group * routing.top_groups < routing.per_token):
        raise ModelError(
            f"{routing.top_groups} groups of {per_group} experts are too few for {routing.per_token} of them"
        )
    return experts


def read_rope(config: Config) -> Rope:
    """Its parameters as transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`) write them."""
    found: dict[str, Any] = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(found.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = found.get("rope_type") or found.get("type") or "default"
    if float(found.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
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
            int(found["original_max_position_embeddings"]),
            low_freq_factor=float(found["low_freq_factor"]),
            high_freq_factor=float(found["high_freq_factor"]),
        )
    if kind == "yarn":
        return _yarn(theta, found, config)
    raise ModelError(f"rope scaling {kind!r} is not supported; supported are default, linear, llama3, yarn")


def _yarn(theta: float, found: Config, config: Config) -> Rope:
    factor = float(found["factor"])
    mscale, mscale_all = float(found.get("mscale") or 0), float(found.get("mscale_all_dim") or 0)
    table_scale = yarn_scale(factor)
    if (given := found.get("attention_factor")) is not None:
        table_scale = float(given)
    elif mscale and mscale_all:
        table_scale = yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all)
    original = found.get("original_max_position_embeddings") or config["max_position_embeddings"]
    return Rope(
        theta,
        "yarn",
        factor,
        int(original),
        beta_fast=float(found.get("beta_fast") or 32.0),
        beta_slow=float(found.get("beta_slow") or 1.0),
        truncate=bool(found.get("truncate", True)),
        table_scale=table_scale,
    )


def read_layers(family: str, config: Config) -> ModelShape:
    """The shape that the layers of a family (`llama`, `deepseek_v3`) have by a flat config, whose other keys the caller
    has checked. Raises KeyError, TypeError, ValueError or ModelError."""
    return {"llama": _llama, "deepseek_v3": _deepseek_v3}[family](config)


def refuse(config: Config, key: str, supported: object) -> None:
    """Raises ModelError if the config sets `key` to anything but the supported value."""
    if config.get(key, supported) != supported:
        wanted = "" if supported is None else f"; supported is {supported!r}"
        raise ModelError(f"the model asks for {key} {config[key]!r}, which is not supported{wanted}")


_ARCHITECTURES: dict[str, Callable[[Config], ModelShape]] = {
    "LlamaForCausalLM": _llama,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "KimiK2ForCausalLM": _deepseek_v3,
}
_MULTIMODAL = ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")
