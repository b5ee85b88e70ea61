"""A drafter's config in one form, whatever dialect it came from: flat, as Hugging Face's, with taps as boundaries.

Every key is known: it is used, it must have one value, or it changes nothing. An unknown key is an error, since a flag
that is not obeyed costs acceptance without a word (vLLM issues 38111 and 46488, SGLang issue 32334).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.draft.eagle3.shape import Eagle3Shape
from slipstream.errors import ModelError
from slipstream.target.config import read_layers
from slipstream.target.shape import ModelShape

Config = dict[str, Any]

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_LAYERS = [
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "num_hidden_layers",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_interleave",
]
_OWN = ("family", "taps", "draft_vocab_size", "target_hidden_size", "fc_bias", "later_norm", *FLAGS)
USED = frozenset((*_LAYERS, *_OWN))
"""Keys of the common form that a shape is made from."""
INERT = frozenset(
    [
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "initializer_range",
        "use_cache",
        "transformers_version",
        "model_type",
        "torch_dtype",
        "dtype",
        "attention_dropout",
        "pretraining_tp",
        "max_window_layers",
        "auto_map",
        "_name_or_path",
        "name_or_path",
        "base_model_ep_plan",
        "base_model_tp_plan",
        "base_model_pp_plan",
        "has_no_defaults_at_init",
        "speculators_version",
        "embed_requires_grad",
        "tie_word_embeddings",
        "target_model_type",
        "num_nextn_predict_layers",
        "qk_head_dim",
        "first_k_dense_replace",
        "moe_layer_freq",
        "moe_intermediate_size",
        "n_group",
        "topk_group",
        "topk_method",
        "scoring_func",
        "norm_topk_prob",
        "routed_scaling_factor",
        "num_experts_per_tok",
        "ep_size",
        "aux_loss_alpha",
        "seq_aux",
        "speculators_config",
    ]
)
"""Keys that change nothing here: of the tokenizer, of training, of a mixture of experts that is not there, of a tied
output layer (a drafter's own is always in the file)."""
FIXED: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (),
    "use_sliding_window": (False,),
    "layer_types": (["full_attention"],),
    "partial_rotary_factor": (1.0,),
    "n_routed_experts": (0,),
    "n_shared_experts": (0,),
    "num_experts": (0,),
}
"""Keys that may be absent or null, or have one of these values."""


def check_keys(config: Mapping[str, Any], also: frozenset[str] = frozenset(), where: str = "config") -> None:
    """Raises ModelError for a key that is neither used, nor inert, nor at its one supported value."""
    for key, value in config.items():
        if key in USED or key in INERT or key in also:
            continue
        if key not in FIXED:
            raise ModelError(f"the drafter's {where} has the key {key!r}, which is not known here")
        allowed = FIXED[key]
        uniform = (
            isinstance(value, list) and bool(value) and [value[0]] in list(allowed) and len({*value}) == 1
        )
        if value is not None and value not in allowed and not uniform:
            raise ModelError(f"the drafter asks for {key} {value!r}, which is not supported")


def read_shape(config: Config) -> Eagle3Shape:
    """From the common form. Raises ModelError for what is missing or cannot be."""
    try:
        decoder = read_layers(config["family"], config)
        taps = config.get("taps")
        shape = Eagle3Shape(
            decoder=decoder,
            target_hidden_size=int(config.get("target_hidden_size") or decoder.hidden_size),
            draft_vocab_size=int(config.get("draft_vocab_size") or decoder.vocab_size),
            taps=None if taps is None else tuple(int(tap) for tap in taps),
            tap_count=3 if taps is None else len(taps),
            fc_bias=bool(config.get("fc_bias")),
            later_norm=str(config.get("later_norm", "input_layernorm")),
            **{flag: bool(config.get(flag)) for flag in FLAGS},
        )
    except KeyError as error:
        raise ModelError(f"the drafter's config has no {error.args[0]}") from None
    except (TypeError, ValueError) as error:
        raise ModelError(f"the drafter's config cannot be read: {error}") from None
    if shape.norm_before_fc and shape.fc_norm:
        raise ModelError("the drafter asks for norm_before_fc and fc_norm, which exclude each other")
    if shape.taps is not None and list(shape.taps) != sorted(set(shape.taps)):
        raise ModelError(f"the drafter's layer ids are not ascending: boundaries {list(shape.taps)}")
    if not 0 < shape.draft_vocab_size <= shape.vocab_size:
        raise ModelError(
            f"a draft vocabulary of {shape.draft_vocab_size} is not part of {shape.vocab_size} tokens"
        )
    return shape


def write_shape(shape: Eagle3Shape) -> Config:
    """The common form of a shape that was made here: with a plain or linearly or Llama-3 stretched rope."""
    decoder = shape.decoder
    config: Config = {
        "family": "deepseek_v3" if decoder.latent else "llama",
        "hidden_size": decoder.hidden_size,
        "target_hidden_size": shape.target_hidden_size,
        "num_attention_heads": decoder.heads,
        "intermediate_size": decoder.intermediate_size,
        "vocab_size": decoder.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "num_hidden_layers": decoder.layers,
        "rms_norm_eps": decoder.rms_norm_eps,
        "max_position_embeddings": decoder.max_positions,
        "rope_theta": decoder.rope.theta,
        "rope_scaling": _rope_scaling(decoder),
        "taps": None if shape.taps is None else list(shape.taps),
        **{flag: getattr(shape, flag) for flag in FLAGS},
    }
    if shape.fc_bias:
        config["fc_bias"] = True
    if shape.later_norm != "input_layernorm":
        config["later_norm"] = shape.later_norm
    if part := decoder.latent:
        return config | {
            "q_lora_rank": part.q_rank,
            "kv_lora_rank": part.kv_rank,
            "qk_nope_head_dim": part.nope_dim,
            "qk_rope_head_dim": part.rope_dim,
            "v_head_dim": part.value_dim,
            "rope_interleave": decoder.rope.interleaved,
        }
    return config | {"num_key_value_heads": decoder.kv_heads, "head_dim": decoder.head_dim}


def _rope_scaling(decoder: ModelShape) -> Config | None:
    rope = decoder.rope
    if rope.scaling == "default":
        return None
    if rope.scaling == "yarn":
        raise ModelError("a drafter with a yarn rope cannot be made from scratch; it can be fine-tuned")
    scaling: Config = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "llama3":
        scaling |= {
            "original_max_position_embeddings": rope.original_max_positions,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
    return scaling
