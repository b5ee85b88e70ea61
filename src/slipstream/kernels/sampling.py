"""From logits to one token a row: greedy, or a draw whose noise is keyed by (request seed, position).

Keyed noise makes a sampled text a function of the request alone: the token at a position is the same whether it is
reached by plain decoding, inside a tree, or in a batch (design rule 3). The draw is Gumbel-max (argmax of
logit / temperature + Gumbel noise), the noise from the counter-based generator "squares" (Widynski 2020, arXiv
2004.06278) at counter `position * 2^32 + token id`, with a key mixed from the seed by SplitMix64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels import triton as gpu
from slipstream.kernels.native import native

_MASK32 = 0xFFFFFFFF


def argmax(logits: Tensor) -> Tensor:
    """logits float32 [R, V] -> int64 [R]; a tie goes to the lowest id. A NaN is never chosen; a row of NaN gives 0."""
    if logits.device.type == "cpu" and (ext := native()) is not None:
        ids: Tensor = ext.argmax(logits)
        return ids
    if gpu.runs(logits):
        from slipstream.kernels.triton import rows

        return rows.argmax(logits)
    return argmax_reference(logits)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    """One token a row, int64 [R], for logits float32 [R, V].

    temperature: float32 [R], 0 is greedy. top_k: int64 [R], 0 keeps all. top_p: float32 [R], 1 keeps all. Tokens are
    ranked by logit, the lowest id first in a tie; top-k keeps the first k, then top-p keeps the shortest prefix whose
    probability (renormalised over the kept k) reaches p. seed, position: int64 [R]; position is that of the
    token being drawn.
    """
    if logits.device.type == "cpu" and (ext := native()) is not None:
        ids: Tensor = ext.sample(logits, temperature, top_k, top_p, seed, position)
        return ids
    return sample_reference(logits, temperature, top_k, top_p, seed, position)


def argmax_reference(logits: Tensor) -> Tensor:
    ids = torch.arange(logits.shape[-1], device=logits.device)
    top = torch.where(logits.isnan(), float("-inf"), logits).amax(-1, keepdim=True)
    first = torch.where(logits == top, ids, logits.shape[-1]).amin(-1)
    return torch.where(first < logits.shape[-1], first, 0)


def filtered_logits(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """logits / temperature [R, V] with what top-k and top-p exclude, and NaN, at -inf; temperature 0 counts as 1."""
    scaled = logits / torch.where(temperature > 0, temperature, 1)[:, None]
    scaled = torch.where(scaled.isnan(), float("-inf"), scaled)
    ranked, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    keep = rank < torch.where(top_k > 0, top_k, logits.shape[-1])[:, None]
    probability = torch.softmax(torch.where(keep, ranked, float("-inf")).double(), dim=-1)
    before = probability.cumsum(-1) - probability
    keep &= (before < top_p[:, None].double()) | (rank == 0)
    return torch.full_like(scaled, float("-inf")).scatter(-1, order, torch.where(keep, ranked, float("-inf")))


def sample_reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    noise = gumbel(seed, position, logits.shape[-1])
    drawn = argmax_reference(filtered_logits(logits, temperature, top_k, top_p) + noise)
    return torch.where(temperature > 0, drawn, argmax_reference(logits))


def uniform(seed: Tensor, position: Tensor, count: int) -> Tensor:
    """float32 [R, count] in (0, 1), a function of (seed, position, column) alone."""
    key = _splitmix64(seed)[:, None] | 1
    counter = (position[:, None] << 32) + torch.arange(count, device=seed.device)
    x = y = counter * key
    z = y + key
    x = _rotate32(x * x + y)
    x = _rotate32(x * x + z)
    x = _rotate32(x * x + y)
    bits = ((x * x + z) >> 41) & 0x7FFFFF  # the top 23 bits: with 24, adding a half would round some up to 1
    return (bits.float() + 0.5) * 2.0**-23


def gumbel(seed: Tensor, position: Tensor, count: int) -> Tensor:
    """Standard Gumbel noise, float32 [R, count]."""
    return -torch.log(-torch.log(uniform(seed, position, count)))


def _rotate32(x: Tensor) -> Tensor:
    """Swaps the halves of 64 bits; int64 arithmetic wraps, only the right shift needs a mask."""
    return ((x >> 32) & _MASK32) | (x << 32)


def _splitmix64(seed: Tensor) -> Tensor:
    def signed(value: int) -> int:
        return value - 2**64 if value >= 2**63 else value

    def shift(x: Tensor, bits: int) -> Tensor:
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    x = seed + signed(0x9E3779B97F4A7C15)
    x = (x ^ shift(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shift(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ shift(x, 31)
