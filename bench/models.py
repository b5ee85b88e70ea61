"""Prefill and decode of random models of about 100 million weights, one for each family, against transformers.

    python -m bench.models                    the figures of one run, as JSON

The models are written once, as transformers writes them, under ~/.cache/slipstream/bench.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

import slipstream
from bench.export_hf import CACHE
from bench.peer_workers.protocol import Emit, measure
from bench.theirs import Run, theirs
from slipstream.engine.request import SamplingParams
from slipstream.target.safetensors_files import SafetensorsFolder

VOCABULARY, PROMPT, TOKENS, ROUNDS = 32000, 512, 64, 5
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 512, "max_position_embeddings": 2048, "eos_token_id": None}
QWEN3 = {
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
    "tie_word_embeddings": True,
}
DEEPSEEK = {
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 1536,
    "moe_intermediate_size": 256,
    "n_routed_experts": 32,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "tie_word_embeddings": True,
    "num_nextn_predict_layers": 0,
}


def write(family: str) -> Path:
    """The folder of a family's random model in bfloat16; written once."""
    folder = CACHE / f"random-100m-{family}"
    if folder.exists():
        return folder
    from tokenizers import Tokenizer, models
    from transformers import (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    torch.manual_seed(0)
    made = {
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**COMMON, **QWEN3)),
        "deepseek_v3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**COMMON, **DEEPSEEK)),
    }
    partial = folder.with_name(folder.name + ".partial")
    model = made[family]().to(torch.bfloat16)
    for name, parameter in model.named_parameters():  # transformers leaves the experts as they were allocated
        if "experts" in name or "gate.weight" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.02)
    model.save_pretrained(partial)
    words = {f"t{i}": i for i in range(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="t0").save_pretrained(partial)
    partial.rename(folder)
    return folder


def measure_models() -> dict[str, Any]:
    """By family: time to the first token and decoded tokens a second, ours and transformers', in turn; loading."""
    result: dict[str, Any] = {"prompt": PROMPT, "tokens": TOKENS, "families": {}}
    for family in ("qwen3", "deepseek_v3"):
        folder = write(family)
        start = time.perf_counter()
        engine = slipstream.Engine(str(folder), draft=None, dtype="bfloat16", max_batch=1)
        load_s = time.perf_counter() - start
        first, rates = _in_turn(engine, folder)
        result["families"][family] = {
            "parameters": engine.model.shape.parameters,
            "first_token_ms": {name: statistics.median(values) * 1e3 for name, values in first.items()},
            "tokens_per_s": {name: statistics.median(values) for name, values in rates.items()},
            "load_s": load_s,
        }
    return result | {"loading": measure_loading()}


def _in_turn(
    engine: slipstream.Engine, folder: Path
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)

    def ours(prompt: list[int]) -> Run:
        def run(emit: Emit) -> None:
            for chunk in engine.stream(prompt, params):
                emit(chunk.token_ids)

        return run

    first: dict[str, list[float]] = defaultdict(list)
    rates: dict[str, list[float]] = defaultdict(list)
    draw = torch.Generator().manual_seed(1)
    for round_ in range(ROUNDS + 1):
        prompt = torch.randint(0, VOCABULARY, (PROMPT,), generator=draw).tolist()
        for name, run in (("slipstream", ours(prompt)), ("transformers", theirs(model, prompt, TOKENS))):
            answer = measure(lambda prompt, count, emit, run=run: run(emit), prompt, TOKENS)  # type: ignore[misc]
            if round_:  # the first warms up
                first[name].append(answer["total_s"] - answer["decode_s"])
                rates[name].append((TOKENS - answer["first_tokens"]) / answer["decode_s"])
    return first, rates


def measure_loading(gigabytes: float = 1.0) -> dict[str, Any]:
    """Loading a model of about a gigabyte from the page cache, beside reading its file into memory alone."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = CACHE / "random-1g-llama"
    if not folder.exists():
        layers = int(gigabytes * 1e9 / 2 / 16.8e6)
        config = LlamaConfig(
            **COMMON,
            num_hidden_layers=layers,
            num_attention_heads=16,
            num_key_value_heads=4,
            intermediate_size=1024 * 4,
        )
        config.hidden_size, config.head_dim = 1024, 64
        partial = folder.with_name(folder.name + ".partial")
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(partial)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (partial / name).write_bytes((write("qwen3") / name).read_bytes())
        partial.rename(folder)
    files = sorted(folder.glob("*.safetensors"))
    read, load = [], []
    for round_ in range(4):
        read_s, load_s = _read_seconds(files), _load_seconds(folder)
        if round_:
            read.append(read_s)
            load.append(load_s)
    size = sum(file.stat().st_size for file in files)
    return {
        "bytes": size,
        "read_gb_s": size / statistics.median(read) / 1e9,
        "load_gb_s": size / statistics.median(load) / 1e9,
    }


def _read_seconds(files: list[Path]) -> float:
    start = time.perf_counter()
    held = [path.read_bytes() for path in files]
    took = time.perf_counter() - start
    assert held
    return took


def _load_seconds(folder: Path) -> float:
    from slipstream.collectives.interface import Solo
    from slipstream.target.decoder import Decoder
    from slipstream.target.shard import Shard

    start = time.perf_counter()
    checkpoint = SafetensorsFolder(folder)
    Decoder(Shard.of(checkpoint.shape), checkpoint.fetch, Solo(), torch.bfloat16, "bfloat16", "cpu", 128)
    return time.perf_counter() - start


if __name__ == "__main__":
    torch.set_num_threads(2)
    json.dump(measure_models(), sys.stdout, indent=1)
    print()
