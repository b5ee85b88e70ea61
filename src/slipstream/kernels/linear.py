"""Matrix products with few rows: `y = x W^T + b`, each row's bits independent of every other row (design rule 3).

A weight is packed once into the layout its kernel reads, in one of four formats:

| format | weights | products | floor, bytes a weight |
|---|---|---|---|
| `float32` | float32 | float32 | 4 |
| `bfloat16` | bfloat16 | x rounded to bfloat16, sums in float32 | 2 |
| `q8_0` | int8, one scale per 32 inputs | x to int8 per row and 32 inputs, sums in int32, then float32 | 1.0625 |
| `q4_1` | 4 bits, scale and minimum per 32 inputs | the same | 0.625 (scales in float16) |

`q8_0` and `q4_1` are GGUF's blocks: such a file runs as it is, without another rounding of its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from slipstream.kernels import triton as gpu
from slipstream.kernels.native import native

Format = Literal["float32", "bfloat16", "q8_0", "q4_1"]
FORMATS: tuple[Format, ...] = get_args(Format)
GROUP = 32
"""Inputs that share one scale in the quantised formats."""
PANEL = 32
"""Outputs that the C++ kernels keep together (csrc/linear.h)."""


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight [N, K] as integers, `w[n, k] = q[n, k] * scale[n, k // 32] + minimum[n, k // 32]`.

    q: int8 [N, K] for q8_0 (-127..127), uint8 [N, K] for q4_1 (0..15). scale, minimum: float16 [N, K / 32];
    minimum is None for q8_0.
    """

    format: Literal["q8_0", "q4_1"]
    q: Tensor
    scale: Tensor
    minimum: Tensor | None = None

    def dequantise(self) -> Tensor:
        """The weight as float32 [N, K]."""
        n, k = self.q.shape
        grouped = self.q.view(n, k // GROUP, GROUP).float() * self.scale.float()[..., None]
        if self.minimum is not None:
            grouped = grouped + self.minimum.float()[..., None]
        return grouped.reshape(n, k)


@dataclass(frozen=True)
class PackedWeight:
    """A weight in its kernel's layout. Make one with `pack`; only `linear` reads what is inside.

    Native: `data` is uint8, the panels of csrc/linear.h, scales and minima among them. Otherwise, and for `reference`:
    `data` [N, K] with `scale` and `minimum` as in `QuantisedWeight`.
    """

    format: Format
    out_features: int
    in_features: int
    data: Tensor
    scale: Tensor | None
    minimum: Tensor | None
    bias: Tensor | None
    is_native: bool
    groups: int = 1
    """How many weights [N, K] of one shape lie behind each other: `linear_heads` and the experts use them."""

    @property
    def nbytes(self) -> int:
        """Bytes read when every output is computed once."""
        parts = (self.data, self.scale, self.minimum, self.bias)
        return sum(part.nbytes for part in parts if part is not None)


def quantise(weight: Tensor, format: Literal["q8_0", "q4_1"]) -> QuantisedWeight:
    """Rounds a weight [N, K] (K a multiple of 32) to the nearest value of the format, group by group."""
    n, k = weight.shape
    if k % GROUP:
        raise ValueError(f"{format} needs a multiple of {GROUP} inputs, this weight has {k}")
    groups = weight.float().view(n, k // GROUP, GROUP)
    if format == "q8_0":
        scale = (groups.abs().amax(-1) / 127).half()
        inverse = torch.where(scale > 0, 1 / scale.float(), 0)
        q = (groups * inverse[..., None]).round().clamp(-127, 127).to(torch.int8)
        return QuantisedWeight("q8_0", q.view(n, k), scale)
    low, high = groups.aminmax(dim=-1)
    scale, minimum = ((high - low) / 15).half(), low.half()
    inverse = torch.where(scale > 0, 1 / scale.float(), 0)
    q = ((groups - minimum.float()[..., None]) * inverse[..., None]).round().clamp(0, 15).to(torch.uint8)
    return QuantisedWeight("q4_1", q.view(n, k), scale, minimum)


Weight = Tensor | QuantisedWeight


def pack(weight: Weight | Sequence[Weight], format: Format, bias: Tensor | None = None) -> PackedWeight:
    """Puts a weight [N, K] (with bias [N], kept in float32) into the layout that `linear` reads.

    Several weights with one K stand for their outputs one under the other. A `QuantisedWeight` of the same format is
    taken as it is; in another format it is dequantised first.
    """
    packed = pack_many(1, lambda _: weight, format)
    return replace(packed, bias=bias.float().contiguous() if bias is not None else None)


def pack_many(count: int, fetch: Callable[[int], Weight | Sequence[Weight]], format: Format) -> PackedWeight:
    """Packs `count` weights of one shape, without biases, as `fetch` gives them, one behind the other.

    Natively each part is packed straight to its place: beside the result only one part is in memory at a time.
    """
    parts = _parts(fetch(0))
    n, k = sum(_shape(part)[0] for part in parts), _shape(parts[0])[1]
    if _device(parts[0]).type != "cpu" or (ext := native()) is None:
        first = parts
        return _unpacked(count, lambda i: first if i == 0 else _parts(fetch(i)), format)
    packed = ext.allocate_packed(count, n, k, format)
    for index, place in enumerate(packed.chunk(count)):
        if index > 0:
            parts = _parts(fetch(index))
        _pack_into(ext, place, parts, n, format)
        parts = ()  # not held while the next one is fetched
    return PackedWeight(format, n, k, packed, None, None, None, True, count)


def _pack_into(ext: Any, packed: Tensor, parts: Sequence[Weight], n: int, format: Format) -> None:
    """One weight, its `parts` one under the other, each to its own panels of `packed`."""
    if any(_shape(part)[0] % PANEL for part in parts[:-1]):
        parts = [stacked(parts)]
    panels, begin = -(-n // PANEL), 0
    for part in parts:
        end = begin + -(-_shape(part)[0] // PANEL)
        place = packed[begin * len(packed) // panels : end * len(packed) // panels]
        ext.pack_into(place, *_converted(part, format), format)
        begin = end


def _unpacked(count: int, fetch: Callable[[int], Sequence[Weight]], format: Format) -> PackedWeight:
    """What the reference reads; beyond the CPU, where only dense formats run so far, quantised weights as bfloat16."""
    if format in ("q8_0", "q4_1") and _device(fetch(0)[0]).type != "cpu":
        format = "bfloat16"
    every = [_converted(stacked(fetch(index)), format) for index in range(count)]
    data, scale, minimum = (
        torch.cat([tensor for tensor in tensors if tensor is not None]) if tensors[0] is not None else None
        for tensors in zip(*every, strict=True)
    )
    assert data is not None
    if gpu.runs(data) and format == "bfloat16":
        from slipstream.kernels.triton.linear import prepare

        prepare(len(data) // count, data.shape[1], data.device)
    return PackedWeight(format, len(data) // count, data.shape[1], data, scale, minimum, None, False, count)


def stacked(parts: Sequence[Weight]) -> Weight:
    """Weights that share their input, one under the other; quantised ones stay so when all have one format."""
    if len(parts) == 1:
        return parts[0]
    quantised = [part for part in parts if isinstance(part, QuantisedWeight)]
    if len(quantised) == len(parts) and len({part.format for part in quantised}) == 1:
        minima = [part.minimum for part in quantised if part.minimum is not None]
        return QuantisedWeight(
            quantised[0].format,
            torch.cat([part.q for part in quantised]),
            torch.cat([part.scale for part in quantised]),
            torch.cat(minima) if minima else None,
        )
    return torch.cat([dense(part) for part in parts])


def dense(weight: Weight) -> Tensor:
    """The numbers of a weight."""
    return weight.dequantise() if isinstance(weight, QuantisedWeight) else weight


def _parts(weight: Weight | Sequence[Weight]) -> Sequence[Weight]:
    return [weight] if isinstance(weight, Tensor | QuantisedWeight) else weight


def _device(weight: Weight) -> torch.device:
    return (weight.q if isinstance(weight, QuantisedWeight) else weight).device


def _shape(weight: Weight) -> torch.Size:
    return (weight.q if isinstance(weight, QuantisedWeight) else weight).shape


def _converted(weight: Weight, format: Format) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The numbers of a weight in a format, contiguous, with their scales and minima."""
    if format in ("float32", "bfloat16"):
        dtype = torch.float32 if format == "float32" else torch.bfloat16
        return dense(weight).to(dtype).contiguous(), None, None
    assert format in ("q8_0", "q4_1")
    if not (isinstance(weight, QuantisedWeight) and weight.format == format):
        weight = quantise(dense(weight), format)
    return weight.q.contiguous(), weight.scale.contiguous(), weight.minimum


def group_of(weight: PackedWeight, group: int) -> PackedWeight:
    """One of several weights, as a view."""
    return replace(
        weight,
        data=weight.data.chunk(weight.groups)[group],
        scale=None if weight.scale is None else weight.scale.chunk(weight.groups)[group],
        minimum=None if weight.minimum is None else weight.minimum.chunk(weight.groups)[group],
        groups=1,
    )


def linear_heads(x: Tensor, weight: PackedWeight, out: Tensor | None = None) -> Tensor:
    """x [..., G, K], each of its G heads times the weight of its own: [..., G, N] in x's dtype.

    Written to `out` if there is one. Both may be slices of wider tensors: only the last dimension is contiguous.
    """
    if weight.is_native:
        ext = native()
        assert ext is not None
        y: Tensor = ext.linear_heads(
            x, weight.data, weight.format, weight.groups, weight.out_features, weight.in_features, out
        )
        return y
    return linear_heads_reference(x, weight, out)


def linear_heads_reference(x: Tensor, weight: PackedWeight, out: Tensor | None = None) -> Tensor:
    heads = torch.stack([linear(x[..., g, :], group_of(weight, g)) for g in range(weight.groups)], dim=-2)
    return heads if out is None else out.copy_(heads)


def linear(x: Tensor, weight: PackedWeight, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [..., K] (float32 or bfloat16) times the weight: [..., N] in `out_dtype` (default: x's)."""
    if weight.is_native:
        ext = native()
        assert ext is not None
        y: Tensor = ext.linear(
            x,
            weight.data,
            weight.format,
            weight.bias,
            weight.out_features,
            weight.in_features,
            out_dtype or x.dtype,
        )
        return y
    if gpu.runs(weight.data) and weight.format == "bfloat16":
        from slipstream.kernels.triton.linear import linear as on_gpu

        return on_gpu(x, weight.data, weight.bias, out_dtype)
    if weight.data.device.type != "cpu":
        return _eager(x, weight, out_dtype)
    return reference(x, weight, out_dtype)


def _eager(x: Tensor, weight: PackedWeight, out_dtype: torch.dtype | None) -> Tensor:
    """The device library's own product: fast, but a row's bits depend on how many rows there are."""
    dtype, out_dtype = weight.data.dtype, out_dtype or x.dtype
    if out_dtype == torch.float32 and dtype != torch.float32:  # logits: what was summed in float32 stays so
        rows = torch.mm(x.to(dtype).flatten(0, -2), weight.data.T, out_dtype=torch.float32)
        y = rows.view(*x.shape[:-1], weight.out_features)
        return y if weight.bias is None else y + weight.bias
    bias = None if weight.bias is None else weight.bias.to(dtype)
    return torch.nn.functional.linear(x.to(dtype), weight.data, bias).to(out_dtype)


def reference(x: Tensor, weight: PackedWeight, out_dtype: torch.dtype | None = None) -> Tensor:
    """The contract in plain torch, one row at a time, so that no row's bits depend on how many there are."""
    rows = x.reshape(-1, x.shape[-1])
    y = torch.stack([_row(row, weight) for row in rows]) if len(rows) else x.new_empty(0, weight.out_features)
    return y.to(out_dtype or x.dtype).view(*x.shape[:-1], weight.out_features)


def _row(row: Tensor, weight: PackedWeight) -> Tensor:
    """One row [K] to float32 [N]."""
    if weight.format == "float32":
        y = torch.mv(weight.data, row.float().clone())
    elif weight.format == "bfloat16":
        y = torch.mv(weight.data.float(), row.bfloat16().float())
    else:
        groups = row.float().view(-1, GROUP)
        x_scale = groups.abs().amax(-1) / 127
        tiny = torch.finfo(torch.float32).tiny  # below it 1 / scale would overflow
        x_scale = torch.where(x_scale < tiny, 0, x_scale)
        inverse = torch.where(x_scale > 0, 1 / x_scale, 0)
        x_q = (groups * inverse[:, None]).round()
        assert weight.scale is not None
        w_q = weight.data.float().view(weight.out_features, -1, GROUP)
        dots = torch.einsum(
            "ngk,gk->ng", w_q, x_q
        )  # whole numbers below 2^24: exact in float32, in any order
        y = (dots * weight.scale.float() * x_scale).sum(-1)
        if weight.minimum is not None:
            y = y + (weight.minimum.float() * (x_scale * x_q.sum(-1))).sum(-1)
    return y + weight.bias if weight.bias is not None else y
