"""Tiny random checkpoints of every family, written by transformers itself."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from slipstream.draft.tree import Tree
from slipstream.engine.state import State

VOCABULARY = 96


SETTINGS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
QWEN3_MOE = {"head_dim": 32, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "num_nextn_predict_layers": 0,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, QWEN3_MOE),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM, DEEPSEEK),
}


def write_llama(folder, **changes):
    """A tiny Llama in `folder`; returns transformers' model."""
    return write_model(folder, "llama", **changes)


def write_model(folder, family, *, seed=0, dtype=torch.float32, shard="5GB", **changes):
    """A model with 3 layers and a byte-ish tokenizer in `folder`; returns transformers' model."""
    torch.manual_seed(seed)
    config, architecture, own = FAMILIES[family]
    model = architecture(config(**(SETTINGS | own | changes))).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
            elif name.endswith(("mlp.gate.weight", "experts.gate_up_proj", "experts.down_proj")):
                parameter.normal_(0.0, model.config.initializer_range)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    model.save_pretrained(folder, max_shard_size=shard)
    letters = [chr(33 + i) for i in range(VOCABULARY)]
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, [], unk_token="!"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="!").save_pretrained(folder)
    return model


def forward(target, tokens: torch.Tensor, dtype=torch.float32, chunk: int | None = None) -> torch.Tensor:
    """Logits [T, V] of a text [T] through the KV cache, in chunks of rows."""
    state = State.allocate(target.kv_layout(), 1, len(tokens), 16, dtype, torch.device("cpu"))
    state.put(0, tokens.tolist(), 0.0, 0, 1.0, 0)
    chunk = chunk or len(tokens)
    pieces = [
        target.logits(target.forward(state.known_rows(0, at, min(at + chunk, len(tokens))), state.kv)[0])[0]
        for at in range(0, len(tokens), chunk)
    ]
    return torch.cat(pieces)


def tree_logits(target, state: State, tree: Tree) -> torch.Tensor:
    """Logits [N + 1, V] of a tree under slot 0's text."""
    slots = torch.zeros(1, dtype=torch.int64)
    rows = state.tree_rows(slots, tree, int(state.text.length[0]) + tree.size)
    return target.logits(target.forward(rows, state.kv)[0])[0]
