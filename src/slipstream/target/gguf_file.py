"""Checkpoints in llama.cpp's GGUF format, read through the `gguf` package; quantised blocks are kept as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.errors import ModelError
from slipstream.kernels.linear import GROUP, QuantisedWeight, Weight
from slipstream.target.shape import ModelShape
from slipstream.target.weights import Part, cut, with_rows

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFFile:
    """An open file. Raises ModelError when it is damaged, incomplete or of an architecture we do not run."""

    def __init__(self, path: Path) -> None:
        import gguf

        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except Exception as error:  # the package raises whatever its parsing runs into
            raise ModelError(f"{path} is not a whole GGUF file ({error}); download it again") from None
        self.fields: dict[str, Any] = {name: field.contents() for name, field in self._reader.fields.items()}
        self._tensors = {_hugging_face_name(tensor.name): tensor for tensor in self._reader.tensors}
        self.shape = ModelShape.from_config(self._config())

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, by Hugging Face name."""
        return {name: tuple(int(n) for n in tensor.shape[::-1]) for name, tensor in self._tensors.items()}

    def fetch(self, name: str, part: Part | None = None) -> Weight:
        """A tensor: float32, or as the file's own integer blocks where it has them; with `part`, only that piece is
        read, and of q and k a piece is one of whole heads.
        """
        import gguf

        tensor = self._tensors[name]
        kind = gguf.GGMLQuantizationType(tensor.tensor_type)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        data, whole = tensor.data, part.widened(block) if part else None
        if part and whole and part.dim == 0:
            data = data[part.start : part.stop]
        elif whole:
            in_bytes = (
                block_bytes // data.itemsize
            )  # of what the reader gives: bytes, or numbers where it knows them
            data = data[:, whole.start // block * in_bytes : whole.stop // block * in_bytes]
        weight = self._numbers(tensor.name, data, kind)
        if ".".join(name.split(".")[3:5]) in ("self_attn.q_proj", "self_attn.k_proj"):
            return with_rows(weight, _rows_in_halves(len(data), len(data) // self.shape.head_dim))
        return cut(weight, part, whole)

    def _numbers(self, name: str, data: Any, kind: Any) -> Weight:
        import gguf

        if kind.name in ("Q4_1", "Q8_0"):
            return _blocks(np.array(data), kind.name)
        try:
            return torch.from_numpy(np.array(gguf.dequantize(data, kind), dtype=np.float32))
        except NotImplementedError:
            raise ModelError(
                f"{self.path}: tensor {name} is in {kind.name}, which is not supported"
            ) from None

    def _config(self) -> dict[str, Any]:
        """The metadata in the words of a Hugging Face config."""
        architecture = self.fields.get("general.architecture")
        if architecture != "llama":
            raise ModelError(
                f"{self.path}: architecture {architecture!r} is not supported; supported is 'llama'"
            )
        try:
            return self._llama_config()
        except KeyError as error:
            raise ModelError(f"{self.path} lacks the field {error.args[0]}") from None

    def _llama_config(self) -> dict[str, Any]:
        get = self.fields
        scaling = get.get("llama.rope.scaling.type", "none")
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": self._tensors["model.embed_tokens.weight"].shape[1]
            if "model.embed_tokens.weight" in self._tensors
            else get["llama.vocab_size"],
            "hidden_size": get["llama.embedding_length"],
            "num_hidden_layers": get["llama.block_count"],
            "num_attention_heads": get["llama.attention.head_count"],
            "num_key_value_heads": get.get("llama.attention.head_count_kv"),
            "head_dim": get.get("llama.attention.key_length"),
            "intermediate_size": get["llama.feed_forward_length"],
            "rms_norm_eps": get["llama.attention.layer_norm_rms_epsilon"],
            "rope_theta": get.get("llama.rope.freq_base", 10000.0),
            "max_position_embeddings": get["llama.context_length"],
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._tensors,
            "eos_token_id": get.get("tokenizer.ggml.eos_token_id"),
        }
        if scaling != "none":
            config["rope_scaling"] = {"rope_type": scaling, "factor": get["llama.rope.scaling.factor"]}
        if "rope_freqs.weight" in self._tensors:
            raise ModelError(f"{self.path} stores its own rotary frequencies, which is not supported")
        return config


def _hugging_face_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        return ".".join(["model.layers", parts[1], _NAMES.get(parts[2], parts[2]), *parts[3:]])
    return ".".join([_NAMES.get(parts[0], parts[0]), *parts[1:]])


def _rows_in_halves(rows: int, heads: int) -> torch.Tensor:
    """llama.cpp interleaves the two rotated halves of each q and k head; this is the order that undoes it."""
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)


def _blocks(data: np.ndarray[Any, np.dtype[np.uint8]], kind: str) -> QuantisedWeight:
    """data: uint8 [N, bytes]; a block is a float16 scale, for Q4_1 a float16 minimum, then 32 values."""
    size = 20 if kind == "Q4_1" else 34
    blocks = torch.from_numpy(data).view(data.shape[0], -1, size)
    halves = blocks[..., : size - (16 if kind == "Q4_1" else 32)].contiguous().view(torch.float16)
    values = blocks[..., halves.shape[-1] * 2 :]
    scale = halves[..., 0].contiguous()
    if kind == "Q8_0":
        return QuantisedWeight("q8_0", values.contiguous().view(torch.int8).reshape(data.shape[0], -1), scale)
    q = torch.cat([values & 15, values >> 4], dim=-1)  # the low nibbles are the first half of the block
    assert q.shape[-1] == GROUP
    return QuantisedWeight("q4_1", q.reshape(data.shape[0], -1), scale, halves[..., 1].contiguous())
