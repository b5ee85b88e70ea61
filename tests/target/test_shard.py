"""A model split over ranks is the same model; each rank reads and holds its part alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.collectives.interface import Solo
from slipstream.draft.tree import Tree
from slipstream.engine.state import State
from slipstream.errors import ModelError
from slipstream.kernels.linear import dense
from slipstream.target.decoder import Decoder
from slipstream.target.gguf_file import GGUFFile
from slipstream.target.load import _packaged, load
from slipstream.target.named import find_config
from slipstream.target.safetensors_files import SafetensorsFolder
from slipstream.target.shard import Shard, deal
from slipstream.target.weights import Part, weight_names
from tests.target.ranks import on_ranks
from tests.target.test_quantised import rewrite
from tests.target.tiny import VOCABULARY, forward, tree_logits, write_model

VARIANTS = {
    "llama": ("llama", {}),
    "llama, more ranks than KV heads": ("llama", {"num_key_value_heads": 1}),
    "llama, heads that do not divide": (
        "llama",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
    ),
    "llama, biased, tied": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "vocab_size": 95},
    ),
    "qwen3": ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3}),
    "qwen3 moe": (
        "qwen3_moe",
        {"norm_topk_prob": True, "decoder_sparse_step": 2, "moe_intermediate_size": 80},
    ),
    "deepseek": ("deepseek_v3", {}),
    "deepseek, biased, q projected directly": ("deepseek_v3", {"attention_bias": True, "q_lora_rank": None}),
    "kimi": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}),
}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("family", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_logits_are_those_of_one_rank(tmp_path, family, changes, size):
    write_model(tmp_path, family, **changes)
    tokens = torch.randint(0, changes.get("vocab_size", VOCABULARY), (70,))
    expected = forward(load(str(tmp_path), dtype="float32", positions=80).target, tokens)

    def logits(collectives):
        target = load(str(tmp_path), dtype="float32", positions=80, collectives=collectives).target
        return forward(target, tokens)

    every = on_ranks(size, logits)
    assert (every[0] - expected).abs().max() < 1e-3
    assert all(torch.equal(each, every[0]) for each in every)


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen3_moe"])
def test_formats(tmp_path, family, weights):
    """Rounded group by group as without ranks: what is left is the order of sums."""
    write_model(tmp_path, family, intermediate_size=96, moe_intermediate_size=96)
    tokens = torch.randint(0, VOCABULARY, (40,))

    def logits(collectives=None):
        options = {"dtype": "float32", "weights": weights, "positions": 80}
        return forward(load(str(tmp_path), collectives=collectives, **options).target, tokens)

    expected, every = logits(), on_ranks(2, logits)
    similarity = torch.nn.functional.cosine_similarity(every[0], expected, dim=-1)
    assert similarity.min() > 0.995
    assert all(torch.equal(each, every[0]) for each in every)


@pytest.mark.parametrize("quantise", ["fp8", "int4"])
def test_quantised_checkpoints(tmp_path, quantise):
    write_model(tmp_path, "deepseek_v3", intermediate_size=96)
    rewrite(tmp_path, quantise)
    tokens = torch.randint(0, VOCABULARY, (40,))
    options = {"dtype": "float32", "positions": 80}
    expected = forward(load(str(tmp_path), **options).target, tokens)
    every = on_ranks(3, lambda each: forward(load(str(tmp_path), collectives=each, **options).target, tokens))
    assert (every[0] - expected).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen3_moe"])
def test_bits_of_a_row_depend_on_that_row_alone(tmp_path, family, dtype):
    """One row, a chunk, a whole text and a tree: the same bits, on every rank."""
    write_model(tmp_path, family)
    tokens = torch.randint(0, VOCABULARY, (24,))

    def logits(collectives):
        model = load(str(tmp_path), dtype=dtype, positions=80, collectives=collectives)
        texts = [forward(model.target, tokens, model.dtype, chunk) for chunk in (1, 5, 24)]
        state = State.allocate(model.target.kv_layout(), 1, 30, 16, model.dtype, torch.device("cpu"))
        state.put(0, tokens[:10].tolist(), 0.0, 0, 1.0, 0)
        model.target.forward(state.known_rows(0, 0, 9), state.kv)
        drafted = torch.stack([tokens[10:14], tokens[10:14].flip(0)], 1).reshape(1, -1)
        parents = torch.tensor([[-1, -1, 0, 1, 2, 3, 4, 5]]) + 1
        tree = Tree(drafted, torch.ones_like(drafted, dtype=torch.bool), parents, 4)
        return texts, tree_logits(model.target, state, tree)[[0, 1, 3, 5, 7]]

    for texts, path in on_ranks(2, logits):
        assert torch.equal(texts[0], texts[1])
        assert torch.equal(texts[0], texts[2])
        assert torch.equal(path, texts[0][9:14])


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_collectives_of_a_pass_are_those_that_the_shape_lists(tmp_path, family, size):
    write_model(tmp_path, family, vocab_size=95)

    def calls(collectives):
        target = load(str(tmp_path), dtype="bfloat16", positions=32, collectives=collectives).target
        state = State.allocate(target.kv_layout(), 1, 20, 8, torch.bfloat16, torch.device("cpu"))
        state.put(0, list(range(9)), 0.0, 0, 1.0, 0)
        target.logits(target.forward(state.known_rows(0, 0, 5), state.kv)[0])
        return target.shape.collectives(5, size, 2), collectives.calls

    for listed, made in on_ranks(size, calls):
        assert made == Counter((each.kind, each.bytes) for each in listed)


def test_kimi_on_eight_ranks():
    """Each rank holds an eighth of what is split, to the head and the group of 32."""
    shape = find_config("kimi-k2.5").shape
    shards = [Shard.of(shape, rank, 8, in_groups=True) for rank in range(8)]
    assert {len(shard.heads) for shard in shards} == {8}
    assert {len(shard.expert) for shard in shards} == {256}
    assert {len(shard.tokens) for shard in shards} == {163840 // 8}
    assert [shard.heads.start for shard in shards] == list(range(0, 64, 8))
    assert 1 / 8 < shards[0].shape.parameters / shape.parameters < 1 / 7.5


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.1-8b", "qwen3-235b-a22b", "kimi-k2.5"])
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_shards_make_the_whole(name, size):
    shape = find_config(name).shape
    shards = [Shard.of(shape, rank, size) for rank in range(size)]
    for part, count in (
        ("heads", shape.heads),
        ("intermediate", shape.intermediate_size),
        ("expert", shape.experts.intermediate_size if shape.experts else 0),
        ("tokens", shape.vocab_size),
    ):
        assert [i for shard in shards for i in getattr(shard, part)] == list(range(count)), part
    group = 1 if shape.latent else shape.heads // shape.kv_heads
    for shard in shards:
        assert {head // group for head in shard.heads} == set(shard.kv_heads)
        assert len(shard.heads) % len(shard.kv_heads) == 0


@given(st.integers(1, 16), st.integers(1, 8), st.data())
@settings(max_examples=60, deadline=None)
def test_every_size_up_to_the_heads_works(kv_heads, group, data):
    """Each rank's query heads are whole groups over its KV heads, and no head is left out."""
    heads = kv_heads * group
    size = data.draw(st.integers(1, heads))
    shape = replace(find_config("llama-3.1-8b").shape, heads=heads, kv_heads=kv_heads)
    shards = [Shard.of(shape, rank, size) for rank in range(size)]
    assert [head for shard in shards for head in shard.heads] == list(range(heads))
    for shard in shards:
        assert [head // group for head in shard.heads] == sorted(
            list(shard.kv_heads) * (len(shard.heads) // len(shard.kv_heads))
        )


@given(st.integers(0, 500), st.integers(1, 9), st.sampled_from([1, 8, 32]))
def test_deal(count, size, unit):
    parts = deal(count, size, unit)
    assert [i for part in parts for i in part] == list(range(count))
    assert all(part.start % unit == 0 or not part for part in parts)
    assert max(map(len, parts)) - min(map(len, parts)) < 2 * unit


def test_sizes_that_do_not_work_are_refused_with_those_that_do():
    shape = find_config("smollm2-135m").shape
    with pytest.raises(
        ModelError, match=r"over 10 ranks \(9 attention heads\); .* 1, 2, 3, 4, 5, 6, 7, 8, 9$"
    ):
        Shard.of(shape, 0, 10)
    with pytest.raises(ModelError, match="0 ranks"):
        Shard.of(shape, 0, 0)
    odd = replace(shape, head_dim=80, hidden_size=720)  # three heads of 80 are not whole groups of 32
    with pytest.raises(ModelError, match=r"over 3 ranks \(9 attention heads and groups .* work: 1, 2$"):
        Shard.of(odd, 0, 3, in_groups=True)
    assert Shard.of(odd, 0, 2).heads == range(6)


def test_gguf_parts_make_the_whole():
    file = GGUFFile(_packaged())
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        name = f"model.layers.3.{name}.weight"
        for dim, at in ((0, 64), (1, 320), (1, 333)):
            if dim == 1 and name.split(".")[4] in ("q_proj", "k_proj"):
                continue
            size = file.sizes()[name][dim]
            parts = [dense(file.fetch(name, Part(dim, a, b))) for a, b in ((0, at), (at, size))]
            assert torch.equal(torch.cat(parts, dim), dense(file.fetch(name))), name


@pytest.mark.parametrize("family", ["deepseek_v3", "llama"])
def test_a_rank_reads_its_part_alone(tmp_path, family):
    """All that is asked of the checkpoint is this rank's: half of what is split, whole what is not."""
    write_model(tmp_path, family, intermediate_size=128, moe_intermediate_size=64)
    checkpoint = SafetensorsFolder(tmp_path)
    read: Counter[str] = Counter()

    def fetch(name, part):
        weight = checkpoint.fetch(name, part)
        read[name] += weight.numel()
        return weight

    shard = Shard.of(checkpoint.shape, 1, 2)
    collectives = Solo()
    collectives.rank, collectives.size = 1, 2
    Decoder(shard, fetch, collectives, torch.float32, "float32", "cpu", 16)
    sizes = {name: torch.Size(size).numel() for name, size in weight_names(checkpoint.shape).items()}
    whole = {name for name in sizes if read[name] == sizes[name]}
    assert all(read[name] * 2 == sizes[name] for name in sizes if name not in whole)
    assert all("norm" in name or ".gate." in name or "_a_proj" in name for name in whole)
