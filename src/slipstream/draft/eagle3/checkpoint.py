"""EAGLE-3 drafters on disk, in SpecForge's dialect: a flat config.json beside model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.draft.eagle3.shape import Eagle3Shape
from slipstream.errors import ModelError
from slipstream.target.config import read_rope

ARCHITECTURE = "LlamaForCausalLMEagle3"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_FLAGS = ("norm_before_residual", "norm_output")


def weight_names(shape: Eagle3Shape) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint with its shape."""
    hidden, q, kv = shape.hidden_size, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    at = "midlayer."
    names: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(shape.taps) * shape.target_hidden_size),
        f"{at}self_attn.q_proj.weight": (q, 2 * hidden),
        f"{at}self_attn.k_proj.weight": (kv, 2 * hidden),
        f"{at}self_attn.v_proj.weight": (kv, 2 * hidden),
        f"{at}self_attn.o_proj.weight": (hidden, q),
        f"{at}mlp.gate_proj.weight": (shape.intermediate_size, hidden),
        f"{at}mlp.up_proj.weight": (shape.intermediate_size, hidden),
        f"{at}mlp.down_proj.weight": (hidden, shape.intermediate_size),
        "lm_head.weight": (shape.draft_vocab_size, hidden),
    }
    for norm in (f"{at}input_layernorm", f"{at}hidden_norm", f"{at}post_attention_layernorm", "norm"):
        names[f"{norm}.weight"] = (hidden,)
    names["d2t"] = (shape.draft_vocab_size,)
    return names


def save(folder: Path, shape: Eagle3Shape, tensors: Mapping[str, Tensor]) -> None:
    """Writes a drafter; d2t holds offsets (target id = draft id + d2t), t2d marks the target ids that it can draft."""
    folder.mkdir(parents=True, exist_ok=True)
    d2t = tensors["d2t"]
    t2d = torch.zeros(shape.vocab_size, dtype=torch.bool)
    t2d[torch.arange(len(d2t)) + d2t] = True
    save_file({**tensors, "t2d": t2d}, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": [ARCHITECTURE],
        "hidden_size": shape.hidden_size,
        "target_hidden_size": shape.target_hidden_size,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "num_hidden_layers": 1,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope.theta,
        "max_position_embeddings": shape.max_positions,
        "hidden_act": "silu",
        "dtype": str(tensors["lm_head.weight"].dtype).removeprefix("torch."),
        # The dialect names layers by their outputs: the state entering layer b is the output of layer b - 1.
        "eagle_config": {_LAYER_IDS: [tap - 1 for tap in shape.taps], "use_aux_hidden_state": True},
        **{flag: getattr(shape, flag) for flag in _FLAGS},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def load(folder: Path) -> tuple[Eagle3Shape, dict[str, Tensor]]:
    """Reads a drafter. Raises ModelError for whatever is missing, too much, or of another shape."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    except FileNotFoundError as error:
        raise ModelError(
            f"{folder} is not a drafter: it holds no {Path(error.filename or '').name}"
        ) from None
    except (ValueError, SafetensorError) as error:
        raise ModelError(f"{folder} cannot be read: {error}") from None
    shape = read_shape(config)
    tensors.pop("t2d", None)
    wanted = weight_names(shape)
    missing, extra = [n for n in wanted if n not in tensors], [n for n in tensors if n not in wanted]
    if missing or extra:
        what = (
            f"lacks the tensor {missing[0]}"
            if missing
            else f"holds the tensor {extra[0]}, which is not supported"
        )
        raise ModelError(f"{folder} {what}")
    for name, size in wanted.items():
        if tuple(tensors[name].shape) != size:
            raise ModelError(
                f"{folder}: {name} is {list(tensors[name].shape)}, its config asks for {list(size)}"
            )
    _check_map(folder, shape, tensors["d2t"])
    return shape, tensors


def read_shape(config: Mapping[str, Any]) -> Eagle3Shape:
    """From a config.json. Raises ModelError."""
    architecture = next(iter(config.get("architectures") or ["none named"]))
    if architecture != ARCHITECTURE:
        raise ModelError(f"drafter architecture {architecture} is not supported; supported is {ARCHITECTURE}")
    try:
        if int(config.get("num_hidden_layers", 1)) != 1:
            raise ModelError("a drafter of several layers is not supported")
        ids = (config.get("eagle_config") or {})[_LAYER_IDS]
        heads = int(config["num_attention_heads"])
        return Eagle3Shape(
            hidden_size=int(config["hidden_size"]),
            target_hidden_size=int(config.get("target_hidden_size") or config["hidden_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            intermediate_size=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            draft_vocab_size=int(config["draft_vocab_size"]),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=read_rope(config),
            taps=tuple(int(layer) + 1 for layer in ids),
            max_positions=int(config.get("max_position_embeddings", 2048)),
            **{flag: bool(config.get(flag, False)) for flag in _FLAGS},
        )
    except KeyError as error:
        raise ModelError(f"the drafter's config has no {error.args[0]}") from None


def _check_map(folder: Path, shape: Eagle3Shape, d2t: Tensor) -> None:
    ids = torch.arange(len(d2t)) + d2t
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= shape.vocab_size):
        raise ModelError(f"{folder}: d2t leads out of the target's vocabulary of {shape.vocab_size}")
    if not bool((ids[1:] > ids[:-1]).all()):
        raise ModelError(f"{folder}: d2t is not sorted as offsets are; it may hold absolute ids")
