"""How EAGLE, SpecForge, speculators and ModelOpt write a drafter: file, names of tensors, config, layer ids.

| | EAGLE | SpecForge | speculators | ModelOpt |
|---|---|---|---|---|
| file | pytorch_model.bin | model.safetensors | model.safetensors | model.safetensors |
| first layer | `midlayer.` | `midlayer.` | `layers.0.` | `layers.0.` |
| layer ids | none | of outputs | boundaries | of outputs |
| t2d | yes | yes | yes | no |

The state that enters layer b (the boundary b) is the output of layer b - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from slipstream.draft.eagle3.config import FLAGS, INERT, Config, check_keys
from slipstream.draft.eagle3.shape import default_taps
from slipstream.errors import ModelError


class Dialect(StrEnum):
    """Whose conventions a drafter is written in."""

    EAGLE = "eagle"
    SPECFORGE = "specforge"
    SPECULATORS = "speculators"
    MODELOPT = "modelopt"


@dataclass(frozen=True)
class Conventions:
    """What differs besides the config."""

    first_layer: str
    has_t2d: bool
    weights: str = "model.safetensors"


CONVENTIONS = {
    Dialect.EAGLE: Conventions("midlayer.", True, "pytorch_model.bin"),
    Dialect.SPECFORGE: Conventions("midlayer.", True),
    Dialect.SPECULATORS: Conventions("layers.0.", True),
    Dialect.MODELOPT: Conventions("layers.0.", False),
}
_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3LlamaForCausalLM": "llama",
    "Eagle3DeepseekV2ForCausalLM": "deepseek_v3",
    "Eagle3DeepseekV3ForCausalLM": "deepseek_v3",
}
_IDS = "eagle_aux_hidden_state_layer_ids"
_EAGLE_CONFIG: Mapping[str, object] = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 0,
    "has_lm_head": True,
}
"""What `eagle_config` may say beside layer ids and flags: the only architecture there is here."""
_ALIASES = {f"aux_norm_{name}.": f"fc_norm.{tap}." for tap, name in enumerate(("low", "mid", "high"))}


def dialect_of(config: Mapping[str, Any], names: Mapping[str, object], weights: str) -> Dialect:
    """From what a folder holds: its config, its tensors' names, and the file that they were in."""
    if "transformer_layer_config" in config or "speculators_model_type" in config:
        return Dialect.SPECULATORS
    if weights.endswith(".bin") or _architecture(config) == "LlamaForCausalLM":
        return Dialect.EAGLE
    return Dialect.SPECFORGE if any(name.startswith("midlayer.") for name in names) else Dialect.MODELOPT


def common_name(name: str) -> str:
    """A tensor's name in slipstream."""
    for alias, known in _ALIASES.items():
        if name.startswith(alias):
            return known + name.removeprefix(alias)
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def dialect_name(name: str, dialect: Dialect) -> str:
    """A tensor's name in a dialect. Raises ModelError where it has none."""
    first = CONVENTIONS[dialect].first_layer
    if name.startswith("layers.0."):
        return first + name.removeprefix("layers.0.")
    if name.startswith("layers.") and first == "midlayer.":
        raise ModelError(f"the dialect of {dialect} has one layer, this drafter has several")
    return name


def read_config(raw: Config, dialect: Dialect) -> Config:
    """The common form (`config.py`) of a dialect's config.json. Raises ModelError for any key that is not known."""
    if dialect == Dialect.SPECULATORS:
        return _from_speculators(raw)
    architecture = _architecture(raw)
    if architecture not in _FAMILIES:
        raise ModelError(
            f"drafter architecture {architecture} is not supported; supported are {', '.join(_FAMILIES)}"
        )
    check_keys(raw, frozenset({"architectures", "eagle_config", _IDS}))
    config = {key: value for key, value in raw.items() if key not in ("architectures", "eagle_config", _IDS)}
    inner: Config = dict(raw.get("eagle_config") or {})
    ids = _agreed(_IDS, inner.pop(_IDS, None), raw.get(_IDS))
    for flag in FLAGS:
        if (value := _agreed(flag, inner.pop(flag, None), raw.get(flag))) is not None:
            config[flag] = value
    for key, value in inner.items():
        if key not in _EAGLE_CONFIG:
            raise ModelError(f"the drafter's eagle_config has the key {key!r}, which is not known here")
        if value is not None and value != _EAGLE_CONFIG[key]:
            raise ModelError(f"the drafter asks for {key} {value!r}, which is not supported")
    config["family"] = _FAMILIES[architecture]
    config["taps"] = [int(layer) + 1 for layer in ids] if ids else None
    return config


def write_config(config: Config, dialect: Dialect, target_layers: int | None) -> Config:
    """A dialect's config.json from the common form.

    target_layers: of the target, where the dialect has no place for layer ids and needs them to be the default ones.
    Raises ModelError for what the dialect cannot say.
    """
    if dialect == Dialect.SPECULATORS:
        return _to_speculators(config)
    flat = {
        key: value for key, value in config.items() if key not in ("family", "taps", "later_norm", *FLAGS)
    }
    flags = {flag: bool(config.get(flag)) for flag in FLAGS if flag in config}
    taps, family = config.get("taps"), config["family"]
    if dialect == Dialect.EAGLE:
        if family != "llama" or any(flags.values()):
            raise ModelError("EAGLE's dialect has no latent attention and none of the norm flags")
        if taps is not None and target_layers is None:
            raise ModelError(
                "EAGLE's dialect has no layer ids; name the target, so that they can be compared"
            )
        if taps is not None and list(default_taps(target_layers or 0)) != list(taps):
            raise ModelError(
                f"EAGLE's dialect has no place for the boundaries {taps}: they are not the default"
            )
        return {"architectures": ["LlamaForCausalLM"], **flat}
    architecture = "LlamaForCausalLMEagle3" if family == "llama" else "Eagle3DeepseekV2ForCausalLM"
    inner: Config = {"use_aux_hidden_state": True}
    if taps is not None:
        if min(taps) < 1:
            raise ModelError(
                f"the dialect of {dialect} names layers by their outputs, so it cannot read the embedding"
            )
        inner[_IDS] = [tap - 1 for tap in taps]
    if dialect == Dialect.MODELOPT:
        inner |= {
            key: value for key, value in _EAGLE_CONFIG.items() if key != "parallel_draft_heads_num_layers"
        }
    return {"architectures": [architecture], **flat, **flags, "eagle_config": inner}


def _architecture(config: Mapping[str, Any]) -> str:
    return str(next(iter(config.get("architectures") or ["none named"])))


def _agreed(key: str, inner: object, outer: Any) -> Any:
    if inner is not None and outer is not None and inner != outer:
        raise ModelError(f"the drafter's config says {key} twice, and not the same: {outer!r} and {inner!r}")
    return outer if inner is None else inner


_NESTED = "transformer_layer_config"
_OUTER = ("draft_vocab_size", "target_hidden_size", "fc_bias", "later_norm", *FLAGS)


def _from_speculators(raw: Config) -> Config:
    if raw.get("speculators_model_type", "eagle3") != "eagle3":
        raise ModelError(
            f"a drafter of the type {raw['speculators_model_type']!r} is not supported; eagle3 is"
        )
    check_keys(raw, frozenset({"architectures", _NESTED, _IDS, "speculators_model_type"}))
    layer: Config = dict(raw.get(_NESTED) or {})
    if (kind := layer.get("model_type", "llama")) not in ("llama", "deepseek_v3"):
        raise ModelError(
            f"a drafter whose layers are {kind!r} is not supported; supported are llama and deepseek_v3"
        )
    check_keys(layer, frozenset({"architectures"}), _NESTED)
    layer.pop("architectures", None)
    outer = {k: v for k, v in raw.items() if k in _OUTER or (k in INERT and k not in layer)}
    ids = raw.get(_IDS)
    return layer | outer | {"family": kind, "taps": list(ids) if ids else None}


def _to_speculators(config: Config) -> Config:
    own = (*_OUTER, "family", "taps", "speculators_config", "speculators_version", "auto_map", "dtype")
    layer = {key: value for key, value in config.items() if key not in own}
    verifier: Config = {"architectures": [], "name_or_path": config.get("_name_or_path")}
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": 3,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    described = config.get("speculators_config") or {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [greedy],
        "verifier": verifier,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        **{key: config[key] for key in ("speculators_version", "auto_map", "dtype") if key in config},
        **{key: config[key] for key in _OUTER if key in config and key != "later_norm"},
        _IDS: config.get("taps"),
        "speculators_config": described,
        _NESTED: {**layer, "model_type": config["family"]},
    }
