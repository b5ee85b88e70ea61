"""Tiny random Llama checkpoints, written by transformers itself."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from slipstream.draft.tree import Tree
from slipstream.engine.state import State

VOCABULARY = 96


def write_llama(folder, *, seed=0, dtype=torch.float32, shard="5GB", **changes):
    """A model with 3 layers and a byte-ish tokenizer in `folder`; returns transformers' model."""
    torch.manual_seed(seed)
    settings = {
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
    model = LlamaForCausalLM(LlamaConfig(**(settings | changes))).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
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
        target.logits(target.forward(state.known_rows(0, at, min(at + chunk, len(tokens))), state.kv))[0]
        for at in range(0, len(tokens), chunk)
    ]
    return torch.cat(pieces)


def tree_logits(target, state: State, tree: Tree) -> torch.Tensor:
    """Logits [N + 1, V] of a tree under slot 0's text."""
    slots = torch.zeros(1, dtype=torch.int64)
    rows = state.tree_rows(slots, tree, int(state.text.length[0]) + tree.size)
    return target.logits(target.forward(rows, state.kv))[0]
