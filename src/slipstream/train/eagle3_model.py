"""The EAGLE-3 head as a torch module, and its training-time test (arXiv 2503.01840, section 3.2).

Step 0 reads the target's states, as the first drafted token does; step k reads the states that step k - 1 gave, as the
k-th further one does. Tokens are the text's own in every step. A query at t sees the keys of step 0 up to t and, of the
later steps, those at t itself: the drafted path so far.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.draft.eagle3.checkpoint import weight_names
from slipstream.draft.eagle3.shape import Eagle3Shape
from slipstream.target.rotary import rotary_tables


class Eagle3Module(nn.Module):
    """Weights by their checkpoint names, in float32; the embedding is the target's and is not trained."""

    def __init__(self, shape: Eagle3Shape, embedding: Tensor, d2t: Tensor, positions: int) -> None:
        """embedding: the target's [V, H]. d2t: int64 [Vd], offsets. positions: the longest sample and steps."""
        super().__init__()
        self.shape = shape
        device = embedding.device
        self.weights = nn.ParameterDict()
        for name, size in weight_names(shape).items():
            if name != "d2t":
                is_norm = len(size) == 1
                weight = torch.ones(size) if is_norm else torch.randn(size) * size[-1] ** -0.5
                self.weights[name.replace(".", "/")] = nn.Parameter(weight.to(device))
        self.d2t = nn.Buffer(d2t.to(device))
        self.embedding = nn.Buffer(embedding, persistent=False)
        cos, sin = rotary_tables(shape.rope, shape.head_dim, positions, str(device))
        self.cos, self.sin = nn.Buffer(cos, persistent=False), nn.Buffer(sin, persistent=False)

    def tensors(self) -> dict[str, Tensor]:
        """The checkpoint's tensors; the weights are the module's own."""
        return {name.replace("/", "."): weight.detach() for name, weight in self.weights.items()} | {
            "d2t": self.d2t
        }

    def weight(self, name: str) -> Tensor:
        """A weight by its checkpoint name."""
        weight: Tensor = self.weights[name.replace(".", "/")]
        return weight

    def steps(self, tokens: Tensor, features: Tensor, count: int) -> Iterator[Tensor]:
        """The logits of `count` steps, [B, T, Vd] each.

        tokens: int64 [B, T]. features: [B, T, F], the target's states at the same positions. Step k's row t has read
        token t + 1 + k and predicts token t + 2 + k; rows for which these lie beyond the sample hold anything.
        """
        length = tokens.shape[1]
        fuse = self.weight("fc.weight")
        state = F.linear(features.to(fuse.dtype), fuse)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        for step in range(count):
            embedded = self.embedding[shifted(tokens, step + 1)].to(state.dtype)
            state, normed = self._layer(embedded, state, step, keys, values, causal)
            yield F.linear(normed, self.weight("lm_head.weight"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight(f"{name}.weight"), self.shape.rms_norm_eps)

    def _layer(
        self,
        embedded: Tensor,
        state: Tensor,
        step: int,
        keys: list[Tensor],
        values: list[Tensor],
        causal: Tensor,
    ) -> tuple[Tensor, Tensor]:
        normed = self._norm(state, "midlayer.hidden_norm")
        x = torch.cat([self._norm(embedded, "midlayer.input_layernorm"), normed], dim=-1)
        residual = normed if self.shape.norm_before_residual else state
        residual = residual + self._attention(x, step, keys, values, causal)
        hidden = self._norm(residual, "midlayer.post_attention_layernorm")
        gate, up = (
            F.linear(hidden, self.weight(f"midlayer.mlp.{name}_proj.weight")) for name in ("gate", "up")
        )
        residual = residual + F.linear(F.silu(gate) * up, self.weight("midlayer.mlp.down_proj.weight"))
        normed = self._norm(residual, "norm")
        return (normed if self.shape.norm_output else residual), normed

    def _attention(
        self, x: Tensor, step: int, keys: list[Tensor], values: list[Tensor], causal: Tensor
    ) -> Tensor:
        shape = self.shape
        length = x.shape[1]
        q, k, v = (
            F.linear(x, self.weight(f"midlayer.self_attn.{name}_proj.weight"))
            .unflatten(-1, (-1, shape.head_dim))
            .transpose(1, 2)
            for name in ("q", "k", "v")
        )
        cos, sin = self.cos[step : step + length], self.sin[step : step + length]
        group = shape.heads // shape.kv_heads
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin).repeat_interleave(group, dim=1)
        keys.append(k)
        values.append(v.repeat_interleave(group, dim=1))
        scores = (q @ keys[0].transpose(-1, -2)).float().masked_fill(~causal, float("-inf"))
        own = [(q * later).sum(-1, keepdim=True).float() for later in keys[1:]]
        weights = (torch.cat([scores, *own], dim=-1) * shape.head_dim**-0.5).softmax(-1).to(q.dtype)
        out = weights[..., :length] @ values[0]
        for index, later in enumerate(values[1:]):
            out = out + weights[..., length + index, None] * later
        return F.linear(out.transpose(1, 2).flatten(2), self.weight("midlayer.self_attn.o_proj.weight"))


def shifted(x: Tensor, count: int) -> Tensor:
    """x [B, T, ...] moved so that row t holds what was at t + count; zeros at the end."""
    if count >= x.shape[1]:
        return torch.zeros_like(x)
    return torch.cat([x[:, count:], torch.zeros_like(x[:, :count])], dim=1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)
