"""What an EAGLE-3 drafter is, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slipstream.errors import ModelError
from slipstream.target.shape import ModelShape


@dataclass(frozen=True)
class Eagle3Shape:
    """A decoder whose first layer is twice as wide at its entrance, and whose output is part of the vocabulary."""

    decoder: ModelShape
    """Its layers, its rotary embedding and the target's vocabulary; grouped-query or latent attention."""
    target_hidden_size: int
    draft_vocab_size: int
    taps: tuple[int, ...] | None = None
    """The target's states that it reads: boundaries between layers (0 is the embedding). None: `default_taps`."""
    tap_count: int = 3
    norm_before_residual: bool = False
    """The residual is the normed state instead of the raw one."""
    norm_before_fc: bool = False
    """All states of the target are normed together before they are fused."""
    fc_norm: bool = False
    """Each state of the target is normed by itself before they are fused (EAGLE-3.1)."""
    norm_output: bool = False
    """The normed state goes into the next step instead of the raw one (EAGLE-3.1)."""
    fc_bias: bool = False
    later_norm: str = "input_layernorm"
    """What the norm at the entrance of a second or later layer is called: engines do not agree."""

    @property
    def hidden_size(self) -> int:
        return self.decoder.hidden_size

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self.decoder.vocab_size

    @property
    def max_positions(self) -> int:
        return self.decoder.max_positions

    def paired(self, target: ModelShape) -> Eagle3Shape:
        """The same with its taps named. Raises ModelError when it was made for another target."""
        facts = {
            "hidden size": (self.target_hidden_size, target.hidden_size),
            "vocabulary": (self.vocab_size, target.vocab_size),
        }
        for what, (wanted, found) in facts.items():
            if wanted != found:
                raise ModelError(f"the drafter is for a target of {what} {wanted}, this one's is {found}")
        taps = self.taps if self.taps is not None else default_taps(target.layers)
        if max(taps) > target.layers or min(taps) < 0:
            raise ModelError(
                f"the drafter reads the target at the boundaries {list(taps)}, this one has {target.layers} layers"
            )
        return replace(self, taps=taps)


def default_taps(layers: int) -> tuple[int, int, int]:
    """The states that EAGLE's own trainer reads: entering layers 2, n / 2 and n - 3."""
    return (2, layers // 2, layers - 3)


Names = dict[str, tuple[int, ...]]


def weight_names(shape: Eagle3Shape) -> Names:
    """Every tensor that a drafter must hold, by its name in slipstream (`layers.0. ...`), with its shape."""
    hidden, fused = shape.hidden_size, shape.tap_count * shape.target_hidden_size
    names: Names = {"fc.weight": (hidden, fused)}
    if shape.fc_bias:
        names["fc.bias"] = (hidden,)
    if shape.norm_before_fc:
        names["input_norm.weight"] = (fused,)
    if shape.fc_norm:
        names |= {f"fc_norm.{tap}.weight": (shape.target_hidden_size,) for tap in range(shape.tap_count)}
    for layer in range(shape.decoder.layers):
        names |= {f"layers.{layer}.{name}": size for name, size in _layer_names(shape, layer).items()}
    names |= {"norm.weight": (hidden,), "lm_head.weight": (shape.draft_vocab_size, hidden)}
    if shape.draft_vocab_size < shape.vocab_size:
        names["d2t"] = (shape.draft_vocab_size,)
    return names


def _layer_names(shape: Eagle3Shape, layer: int) -> Names:
    decoder, hidden = shape.decoder, shape.hidden_size
    entrance = ("input_layernorm", "hidden_norm") if layer == 0 else (shape.later_norm,)
    names: Names = {f"{norm}.weight": (hidden,) for norm in (*entrance, "post_attention_layernorm")}
    attention = _attention_names(decoder, 2 * hidden if layer == 0 else hidden)
    names |= {f"self_attn.{name}.weight": size for name, size in attention.items()}
    size = decoder.intermediate_size
    names |= {f"mlp.{name}_proj.weight": (size, hidden) for name in ("gate", "up")}
    names["mlp.down_proj.weight"] = (hidden, size)
    return names


def _attention_names(decoder: ModelShape, inputs: int) -> Names:
    part, hidden, q = decoder.latent, decoder.hidden_size, decoder.heads * decoder.head_dim
    if part is None:
        kv = decoder.kv_heads * decoder.head_dim
        return {"q_proj": (q, inputs), "k_proj": (kv, inputs), "v_proj": (kv, inputs), "o_proj": (hidden, q)}
    names: Names = {"q_proj": (q, inputs)}
    if part.q_rank is not None:
        names = {
            "q_a_proj": (part.q_rank, inputs),
            "q_a_layernorm": (part.q_rank,),
            "q_b_proj": (q, part.q_rank),
        }
    return names | {
        "kv_a_proj_with_mqa": (part.kv_rank + part.rope_dim, inputs),
        "kv_a_layernorm": (part.kv_rank,),
        "kv_b_proj": (decoder.heads * (part.nope_dim + part.value_dim), part.kv_rank),
        "o_proj": (hidden, decoder.heads * part.value_dim),
    }
