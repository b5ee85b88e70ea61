"""Every family's forward against transformers' own, and its bits in any company."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

import slipstream
from slipstream.draft.tree import Tree
from slipstream.engine.state import State
from slipstream.target.load import load
from tests.target.tiny import FAMILIES, VOCABULARY, forward, tree_logits, write_llama, write_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
DEEPSEEK_YARN = YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}
VARIANTS = {
    "plain": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "one kv head": ("llama", {"num_key_value_heads": 1}),
    "no sharing": ("llama", {"num_key_value_heads": 4}),
    "own head_dim": ("llama", {"head_dim": 32}),
    "linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
    ),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "yarn rope": ("llama", {"rope_parameters": YARN}),
    "yarn rope, bounds not rounded": (
        "llama",
        {"rope_parameters": YARN | {"truncate": False, "attention_factor": 1.3}},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 tied, biased": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3 yarn": ("qwen3", {"rope_parameters": YARN}),
    "qwen3 moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3 moe, weights as they are": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3 moe, some layers dense": ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen3 moe, every other layer": ("qwen3_moe", {"decoder_sparse_step": 2, "norm_topk_prob": True}),
    "deepseek": ("deepseek_v3", {}),
    "deepseek yarn": ("deepseek_v3", {"rope_parameters": DEEPSEEK_YARN}),
    "deepseek yarn, equal mscales": (
        "deepseek_v3",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek, halves rotated": ("deepseek_v3", {"rope_interleave": False}),
    "deepseek, q projected directly": ("deepseek_v3", {"q_lora_rank": None}),
    "deepseek biased": ("deepseek_v3", {"attention_bias": True}),
    "deepseek tied, another eps": ("deepseek_v3", {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "deepseek, weights as they are": ("deepseek_v3", {"norm_topk_prob": False, "routed_scaling_factor": 1.5}),
    "kimi": (
        "deepseek_v3",
        {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 2.827},
    ),
    "deepseek, all dense": ("deepseek_v3", {"first_k_dense_replace": 3}),
}


@pytest.mark.parametrize(("family", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_logits_equal_transformers(tmp_path, family, changes):
    reference = write_model(tmp_path, family, **changes)
    target = load(str(tmp_path), dtype="float32", positions=160).target
    tokens = torch.randint(0, VOCABULARY, (130,))
    with torch.no_grad():
        expected = reference(tokens[None]).logits[0]
    assert expected.std() > 0.1
    assert (forward(target, tokens) - expected).abs().max() < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_64_greedy_tokens_equal_transformers(tmp_path, family):
    reference = write_model(tmp_path, family)
    reference.generation_config.eos_token_id = None
    engine = slipstream.Engine(str(tmp_path), dtype="float32", max_length=120)
    prompt = "a b c d a b c"
    ids = torch.tensor([engine.tokens_of(prompt)])
    with torch.no_grad():
        expected = reference.generate(ids, max_new_tokens=64, do_sample=False)[0, ids.shape[1] :].tolist()
    params = slipstream.SamplingParams(max_new_tokens=64, ignore_eos=True)
    for speculate in (False, True):
        assert engine.generate(prompt, params, speculate=speculate).token_ids == expected


def test_several_shards_and_other_dtypes_in_the_file(tmp_path):
    write_llama(tmp_path, shard="40KB", dtype=torch.bfloat16)
    reference = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    target = load(str(tmp_path), dtype="float32", positions=160).target
    tokens = torch.randint(0, VOCABULARY, (40,))
    with torch.no_grad():
        expected = reference(tokens[None]).logits[0]
    assert (forward(target, tokens) - expected).abs().max() < 1e-3


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
def test_rounded_weights_stay_near(tmp_path, weights):
    write_llama(tmp_path, initializer_range=0.1)
    exact = load(str(tmp_path), dtype="float32", positions=160).target
    rounded = load(str(tmp_path), dtype="float32", weights=weights, positions=160).target
    tokens = torch.randint(0, VOCABULARY, (60,))
    a, b = forward(exact, tokens), forward(rounded, tokens)
    similarity = torch.nn.functional.cosine_similarity(a, b, dim=-1).min()
    assert similarity > {"bfloat16": 0.999, "int8": 0.998, "int4": 0.9}[weights]


FORMATS = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("float32", "int4")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "weights"), FORMATS)
def test_a_rows_bits_depend_on_that_row_alone(tmp_path, dtype, weights, family):
    """Prefilled whole or in pieces, alone or as one of 32 rows, on a chain or deep in a tree."""
    write_model(tmp_path, family)
    model = load(str(tmp_path), dtype=dtype, weights=weights, positions=200)
    target = model.target
    tokens = torch.randint(0, VOCABULARY, (100,))
    one_by_one = forward(target, tokens, model.dtype, chunk=1)
    for chunk in (2, 3, 4, 7, 8, 16, 32, 100):
        assert torch.equal(forward(target, tokens, model.dtype, chunk), one_by_one)
    state = State.allocate(target.kv_layout(), 1, 120, 40, model.dtype, torch.device("cpu"))
    state.put(0, tokens[:61].tolist(), 0.0, 0, 1.0, 0)
    target.forward(state.known_rows(0, 0, 60), state.kv)
    # Every other node goes on along the text, the rest is noise beside it.
    size, parents, nodes, last = 31, [], [], 0
    for node in range(size):
        parents.append(last)
        is_true = node % 2 == 1
        nodes.append(int(tokens[61 + node // 2]) if is_true else (node * 7) % VOCABULARY)
        last = node + 1 if is_true else last
    tree = Tree(torch.tensor([nodes]), torch.ones(1, size).bool(), torch.tensor([parents]), size)
    logits = tree_logits(target, state, tree)
    assert torch.equal(logits[0], one_by_one[60])
    for node in range(1, size, 2):
        assert torch.equal(logits[node + 1], one_by_one[61 + node // 2])


def test_smollm2_logits_equal_transformers(smollm2, reference_smollm2):
    for text in (
        "The capital of France is Paris, and 12345 is a number.",
        "def f(x):\n    return x + 1\n" * 12,
    ):
        tokens = torch.tensor(smollm2.tokens_of(text))
        with torch.no_grad():
            expected = reference_smollm2(tokens[None]).logits[0]
        assert (forward(smollm2.model.target, tokens) - expected).abs().max() < 1e-3
