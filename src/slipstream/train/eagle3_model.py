"""The EAGLE-3 network as a torch module, and its training-time test (arXiv 2503.01840, section 3.2).

Step 0 reads the target's states, as the first drafted token does; step k reads the states that step k - 1 gave, as the
k-th further one does. Tokens are the text's own in every step. A query at t sees the keys of step 0 up to t, within its
own sample, and, of the later steps, those at t itself: the drafted path so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from slipstream.draft.eagle3.shape import Eagle3Shape, weight_names
from slipstream.target.rotary import rotary_tables

R = TypeVar("R")
_SCORES = {"cpu": 1 << 27, "cuda": 1 << 30}
"""Attention scores of a step that are held for the backward pass; more are computed in pieces, and once again there."""
_LATENT_EPS = 1e-6
"""Of the norms inside latent attention, as its models are trained."""


class Eagle3Module(nn.Module):
    """Weights by their names in `weight_names`, in float32; the embedding is not trained."""

    def __init__(
        self,
        shape: Eagle3Shape,
        embedding: Tensor,
        ids: Tensor,
        positions: int,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        """embedding: [V, H]. ids: int64 [Vd], draft token to target token. positions: the longest sample and steps.
        tensors: weights to begin with; random ones by default."""
        super().__init__()
        self.shape = shape
        device = embedding.device
        self.weights = nn.ParameterDict()
        for name, size in weight_names(shape).items():
            if name == "d2t":
                continue
            if tensors is not None:
                weight = tensors[name].to(torch.float32, copy=True)
            elif name.endswith("bias"):
                weight = torch.zeros(size)
            else:
                weight = torch.ones(size) if len(size) == 1 else torch.randn(size) * size[-1] ** -0.5
            self.weights[_key(name)] = nn.Parameter(weight.to(device))
        self.ids = nn.Buffer(ids.to(device), persistent=False)
        self.embedding = nn.Buffer(embedding, persistent=False)
        part = shape.decoder.latent
        dim = part.rope_dim if part else shape.decoder.head_dim
        cos, sin = rotary_tables(shape.decoder.rope, dim, positions, str(device))
        self.cos, self.sin = nn.Buffer(cos, persistent=False), nn.Buffer(sin, persistent=False)

    def weight(self, name: str) -> Tensor:
        """A weight by its name in `weight_names`."""
        weight: Tensor = self.weights[_key(name)]
        return weight

    def tensors(self) -> dict[str, Tensor]:
        """The checkpoint's tensors, d2t included where the draft vocabulary is a part; weights are the module's own."""
        found = {name: self.weight(name).detach() for name in weight_names(self.shape) if name != "d2t"}
        if self.shape.draft_vocab_size < self.shape.vocab_size:
            found["d2t"] = self.ids - torch.arange(len(self.ids), device=self.ids.device)
        return found

    def forward(
        self, tokens: Tensor, documents: Tensor, features: Tensor, count: int, use: Callable[[int, Tensor], R]
    ) -> list[R]:
        """What `use` makes of each step's number and normed states [B, T, H]; `logits` turns those into logits.

        tokens, documents: int64 [B, T]; samples that lie side by side differ in their document. features: [B, T, F],
        the target's states at the same places. Step k's row t has read token t + 1 + k and predicts token t + 2 + k;
        rows for which these lie beyond the sample hold anything.
        """
        state = self._fuse(features)
        positions, visible = places(documents), _visible(documents)
        past: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self.shape.decoder.layers)]
        used = []
        for step in range(count):
            embedded = self.embedding[shifted(tokens, step + 1)].to(state.dtype)
            state, normed = self._step(embedded, state, positions + step, visible, past)
            used.append(use(step, normed))
        return used

    def logits(self, normed: Tensor) -> Tensor:
        """[..., H] -> [..., Vd]."""
        return F.linear(normed, self.weight("lm_head.weight"))

    def _fuse(self, features: Tensor) -> Tensor:
        if self.shape.norm_before_fc:
            features = self._norm(features, "input_norm")
        if self.shape.fc_norm:
            parts = features.chunk(self.shape.tap_count, dim=-1)
            features = torch.cat(
                [self._norm(part, f"fc_norm.{tap}") for tap, part in enumerate(parts)], dim=-1
            )
        weight = self.weight("fc.weight")
        return F.linear(
            features.to(weight.dtype), weight, self.weight("fc.bias") if self.shape.fc_bias else None
        )

    def _norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        return F.rms_norm(
            x.float(), x.shape[-1:], self.weight(f"{name}.weight"), eps or self.shape.decoder.rms_norm_eps
        )

    def _step(
        self,
        embedded: Tensor,
        state: Tensor,
        positions: Tensor,
        visible: Tensor,
        past: list[list[tuple[Tensor, Tensor]]],
    ) -> tuple[Tensor, Tensor]:
        normed = self._norm(state, "layers.0.hidden_norm")
        x = torch.cat([self._norm(embedded, "layers.0.input_layernorm"), normed], dim=-1)
        residual = normed if self.shape.norm_before_residual else state
        for layer, keys in enumerate(past):
            at = f"layers.{layer}"
            if layer:
                x = self._norm(residual, f"{at}.{self.shape.later_norm}")
            residual = residual + self._attention(x, at, positions, visible, keys)
            hidden = self._norm(residual, f"{at}.post_attention_layernorm")
            gate, up = (
                F.linear(hidden, self.weight(f"{at}.mlp.{name}_proj.weight")) for name in ("gate", "up")
            )
            residual = residual + F.linear(F.silu(gate) * up, self.weight(f"{at}.mlp.down_proj.weight"))
        normed = self._norm(residual, "norm")
        return (normed if self.shape.norm_output else residual), normed

    def _attention(
        self, x: Tensor, at: str, positions: Tensor, visible: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        make = self._latent if self.shape.decoder.latent else self._grouped
        q, k, v = make(x, f"{at}.self_attn", positions)
        past.append((k, v))
        seen = tuple(past)  # the list grows with later steps, and a piece is computed again after them
        scale, rows = self.shape.decoder.attention_scale, q.shape[2]
        piece = max(1, _SCORES[q.device.type] // (q.shape[0] * q.shape[1] * rows))
        if piece >= rows:
            out = _attend(q, visible, scale, 0, seen)
        else:
            pieces = [
                checkpoint(
                    _attend,
                    q[:, :, i : i + piece],
                    visible[:, i : i + piece],
                    scale,
                    i,
                    seen,
                    use_reentrant=False,
                )
                for i in range(0, rows, piece)
            ]
            out = torch.cat(pieces, dim=2)
        return F.linear(out.transpose(1, 2).flatten(2), self.weight(f"{at}.self_attn.o_proj.weight"))

    def _project(self, x: Tensor, at: str, name: str) -> Tensor:
        return F.linear(x, self.weight(f"{at}.{name}.weight"))

    def _grouped(self, x: Tensor, at: str, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, heads, T, D], KV heads repeated."""
        decoder = self.shape.decoder
        q, k, v = (
            self._project(x, at, f"{name}_proj").unflatten(-1, (-1, decoder.head_dim)).transpose(1, 2)
            for name in ("q", "k", "v")
        )
        group = decoder.heads // decoder.kv_heads
        q, k = self._rotated(q, positions), self._rotated(k, positions)
        return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)

    def _latent(self, x: Tensor, at: str, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same from a latent of each token, as its makers write it (arXiv 2405.04434, 2.1)."""
        decoder = self.shape.decoder
        part = decoder.latent
        assert part is not None
        if part.q_rank is None:
            q = self._project(x, at, "q_proj")
        else:
            low = self._norm(self._project(x, at, "q_a_proj"), f"{at}.q_a_layernorm", _LATENT_EPS)
            q = self._project(low, at, "q_b_proj")
        q = q.unflatten(-1, (decoder.heads, -1)).transpose(1, 2)
        latent, k_rope = self._project(x, at, "kv_a_proj_with_mqa").split(
            [part.kv_rank, part.rope_dim], dim=-1
        )
        latent = self._norm(latent, f"{at}.kv_a_layernorm", _LATENT_EPS)
        both = self._project(latent, at, "kv_b_proj").unflatten(-1, (decoder.heads, -1)).transpose(1, 2)
        k_nope, v = both.split([part.nope_dim, part.value_dim], dim=-1)
        q_nope, q_rope = q.split([part.nope_dim, part.rope_dim], dim=-1)
        k_rope = self._rotated(k_rope[:, None], positions).expand(-1, decoder.heads, -1, -1)
        q = torch.cat([q_nope, self._rotated(q_rope, positions)], dim=-1)
        return q, torch.cat([k_nope, k_rope.to(k_nope.dtype)], dim=-1), v

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, heads, T, D]. Halves come out side by side whichever pairs went in: q and k alike."""
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        if self.shape.decoder.rope.interleaved:
            low, high = x.float()[..., 0::2], x.float()[..., 1::2]
        else:
            low, high = x.float().chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


def _key(name: str) -> str:
    """Parameter names must not hold dots."""
    return name.replace(".", "/")


def _attend(
    q: Tensor, visible: Tensor, scale: float, first: int, past: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Rows first .. of q [B, heads, R, D] over all keys of step 0 and, of later steps, over those at the row itself."""
    rows, (keys, values) = slice(first, first + q.shape[2]), past[0]
    scores = (q @ keys.transpose(-1, -2)).float().masked_fill(~visible[:, None], float("-inf"))
    own = [(q * k[:, :, rows]).sum(-1, keepdim=True).float() for k, _ in past[1:]]
    weights = (torch.cat([scores, *own], dim=-1) * scale).softmax(-1).to(q.dtype)
    length = keys.shape[2]
    out = weights[..., :length] @ values
    for index, (_, v) in enumerate(past[1:]):
        out = out + weights[..., length + index, None] * v[:, :, rows]
    return out


def places(documents: Tensor) -> Tensor:
    """int64 [B, T]: each token's place in its own sample; 0 for padding, which may be longer than any sample."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return (index - torch.where(begins, index, 0).cummax(dim=1).values).where(documents >= 0, 0)


def _visible(documents: Tensor) -> Tensor:
    """bool [B, T, T]: whether the query sees the key: not later, and of the same sample."""
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return causal & (documents[:, :, None] == documents[:, None, :])


def shifted(x: Tensor, count: int) -> Tensor:
    """x [B, T, ...] moved so that row t holds what was at t + count; zeros at the end."""
    if count >= x.shape[1]:
        return torch.zeros_like(x)
    return torch.cat([x[:, count:], torch.zeros_like(x[:, :count])], dim=1)
