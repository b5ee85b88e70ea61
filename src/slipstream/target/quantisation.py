"""The quantised formats that checkpoints of these models ship in, and how each becomes numbers again.

| format | ships with | tensors | value |
|---|---|---|---|
| `fp8` | DeepSeek-V3 | weight: float8_e4m3fn [N, K]; weight_scale_inv: float32, one a block | weight * scale |
| `int4` | Kimi-K2.5 | weight_packed: int32 [N, K / 8]; weight_scale: [N, K / 32] | (nibble - 8) * scale |

`int4` is what compressed-tensors calls pack-quantized: 4 bits, symmetric, groups of 32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.kernels.linear import GROUP, QuantisedWeight


@dataclass(frozen=True)
class Quantisation:
    """How the quantised tensors of a checkpoint are to be read."""

    format: Literal["fp8", "int4"]
    block: tuple[int, int] = (1, GROUP)
    """Outputs and inputs that share one scale."""
    ignored: tuple[str, ...] = ("lm_head",)
    """Layers that are not quantised: names, or `re:` and a regular expression (compressed-tensors' notation)."""

    def bytes_per_weight(self, layer: str, plain: float) -> float:
        """Stored bytes of a weight of this linear layer, its share of the scale included; `plain` if not quantised."""
        for pattern in self.ignored:
            is_regex = pattern.startswith("re:")
            if re.match(pattern[3:], layer) if is_regex else layer == pattern:
                return plain
        return 0.5 + 2 / GROUP if self.format == "int4" else 1 + 4 / (self.block[0] * self.block[1])


def read_quantisation(config: Mapping[str, Any] | None) -> Quantisation | None:
    """From a config's `quantization_config`. Raises ModelError naming whatever is not supported."""
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise ModelError(f"the model's quantization_config is {config!r}, not an object")
    method = config.get("quant_method")
    if method == "fp8":
        block = config.get("weight_block_size")
        if config.get("fmt", "e4m3") != "e4m3" or not isinstance(block, list | tuple) or len(block) != 2:
            raise ModelError(
                "the model's fp8 weights are not e4m3 with block scales, which alone is supported"
            )
        ignored = ("lm_head", *(config.get("modules_to_not_convert") or ()))
        return Quantisation("fp8", (int(block[0]), int(block[1])), ignored)
    if method == "compressed-tensors":
        return _compressed(config)
    raise ModelError(
        f"quantisation {method!r} is not supported; supported are fp8 with block scales and compressed-tensors int4"
    )


def _compressed(config: Mapping[str, Any]) -> Quantisation:
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise ModelError(
            f"compressed-tensors with {len(groups)} config groups is not supported; supported is one"
        )
    weights = groups[0].get("weights") or {}
    wanted = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    if config.get("format", "pack-quantized") != "pack-quantized":
        raise ModelError(
            f"compressed-tensors format {config['format']!r} is not supported; supported is pack-quantized"
        )
    for key, value in wanted.items():
        if weights.get(key) != value:
            raise ModelError(
                f"compressed-tensors weights with {key} {weights.get(key)!r} are not supported, only {value!r}"
            )
    for key in ("input_activations", "output_activations"):
        if groups[0].get(key):
            raise ModelError(f"compressed-tensors with {key.replace('_', ' ')} is not supported")
    if weights.get("actorder"):
        raise ModelError("compressed-tensors with reordered groups (actorder) is not supported")
    return Quantisation("int4", ignored=tuple(str(name) for name in config.get("ignore") or ()))


def fp8_to_float(
    weight: Tensor, scale: Tensor, block: tuple[int, int], first: tuple[int, int] = (0, 0)
) -> Tensor:
    """float8 [N, K] and its block scales to float32; `first` is where the piece begins within the whole weight."""
    rows, columns = (
        (torch.arange(first[dim], first[dim] + weight.shape[dim]) // block[dim]) for dim in (0, 1)
    )
    result = weight.float()
    result *= scale.float()[rows][:, columns]
    return result


def unpack_int4(packed: Tensor, scale: Tensor) -> QuantisedWeight | Tensor:
    """int32 [N, K / 8], eight nibbles each, the lowest first, with scales [N, K / 32].

    Kept bit for bit as q4_1 blocks where float16 holds every scale exactly, else float32 [N, K].
    """
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    q = (packed[..., None] >> shifts & 15).to(torch.uint8).view(packed.shape[0], -1)
    half = scale.half()
    minimum = half * -8
    if torch.equal(half.float(), scale.float()) and torch.isfinite(minimum).all():
        return QuantisedWeight("q4_1", q, half, minimum)
    wide = scale.float().repeat_interleave(GROUP, dim=1)
    return (q.float() - 8) * wide
