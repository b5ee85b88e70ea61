"""What cannot be loaded is refused in one line that says what to do; nothing is unpickled."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import slipstream
from slipstream.errors import ModelError
from slipstream.target.load import _packaged, load
from tests.target.tiny import write_llama


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


@pytest.fixture
def copy(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "model")
    return tmp_path / "model"


def refusal(model, **options) -> str:
    with pytest.raises(ModelError) as caught:
        load(str(model), positions=64, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_unknown_names():
    assert "smollm2-135m" in refusal("gpt-17")
    assert "there is no" in refusal("./nowhere")
    assert "there is no" in refusal("model.gguf")
    assert "no model was named" in refusal("")


def test_unknown_dtypes(copy):
    assert "float16" in refusal(copy, dtype="float16")
    assert "int3" in refusal(copy, weights="int3")


def test_a_hub_id_without_network_says_what_to_do():
    message = refusal("nobody/nothing")
    assert "hf download nobody/nothing" in message


def test_a_folder_without_config(tmp_path):
    assert "config.json" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
    ],
)
def test_what_is_not_supported_is_named_before_a_weight_is_read(copy, changes, named):
    edit_config(copy, **changes)
    (copy / "model.safetensors").unlink()  # reading it would be another error
    assert named in refusal(copy)


def test_a_config_that_lacks_a_field(copy):
    config = json.loads((copy / "config.json").read_text())
    del config["num_hidden_layers"]
    (copy / "config.json").write_text(json.dumps(config))
    assert "num_hidden_layers" in refusal(copy)
    (copy / "config.json").write_text("{not json")
    assert "cannot be read" in refusal(copy)


def test_weights_that_do_not_fit_the_config(copy):
    edit_config(copy, num_hidden_layers=4)
    assert "model.layers.3" in refusal(copy)
    edit_config(copy, num_hidden_layers=2)
    assert "not supported" in refusal(copy)
    edit_config(copy, num_hidden_layers=3, intermediate_size=128)
    assert "[96, 64]" in refusal(copy)


def test_truncated_and_missing_files(copy):
    path = copy / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "model.safetensors" in refusal(copy)
    path.write_bytes(b"")
    assert "model.safetensors" in refusal(copy)
    path.unlink()
    assert "no model.safetensors" in refusal(copy)


def test_a_missing_shard_and_a_path_out_of_the_folder(tmp_path):
    write_llama(tmp_path, shard="40KB")
    index = tmp_path / "model.safetensors.index.json"
    next(iter(sorted(tmp_path.glob("model-*.safetensors")))).unlink()
    assert "which its index names" in refusal(tmp_path)
    index.write_text(json.dumps({"weight_map": {"x": "../secret.safetensors"}}))
    assert "outside its own folder" in refusal(tmp_path)


def test_pickles_are_refused(copy):
    (copy / "model.safetensors").unlink()
    torch.save({}, copy / "pytorch_model.bin")
    assert "save_pretrained" in refusal(copy)


def test_a_missing_tokenizer(copy):
    for path in copy.glob("*tokenizer*"):
        path.unlink()
    assert "tokenizer" in refusal(copy)


def test_truncated_gguf(tmp_path):
    whole = _packaged().read_bytes()
    for size in (0, 3, 1000, 2_000_000, len(whole) // 2):
        path = tmp_path / "half.gguf"
        path.write_bytes(whole[:size])
        assert "GGUF" in refusal(path)
    path.write_bytes(b"not a model at all")
    assert "GGUF" in refusal(path)


def test_quantised_weights_need_whole_groups(tmp_path):
    write_llama(tmp_path, hidden_size=48, num_attention_heads=3, num_key_value_heads=3)
    assert "multiples of 32" in refusal(tmp_path, weights="int8")


def test_a_longer_limit_than_the_models(checkpoint):
    with pytest.raises(slipstream.SlipstreamError, match="256"):
        slipstream.Engine(str(checkpoint), max_length=257)


def test_a_gguf_files_blocks_are_kept(smollm2):
    """Its 4-bit weights dequantise to exactly what the gguf package makes of them."""
    import gguf

    from slipstream.target.gguf_file import GGUFFile, _rows_in_halves

    file = GGUFFile(_packaged())
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(_packaged()).tensors}
    for name, theirs, heads in (
        ("model.layers.3.mlp.down_proj.weight", "blk.3.ffn_down.weight", 0),
        ("model.layers.7.self_attn.q_proj.weight", "blk.7.attn_q.weight", 9),
        ("model.embed_tokens.weight", "token_embd.weight", 0),
    ):
        expected = torch.tensor(gguf.dequantize(reader[theirs].data, reader[theirs].tensor_type))
        if heads:
            expected = expected[_rows_in_halves(len(expected), heads)]
        assert torch.equal(file.fetch(name).dequantise(), expected)


_PEAK = """
import sys, threading, time, torch
from slipstream.kernels.native import native
from pathlib import Path
from slipstream.collectives.interface import Solo
from slipstream.target.decoder import Decoder
from slipstream.target.shard import Shard
from slipstream.target.safetensors_files import SafetensorsFolder
native()

def held():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

before, peak, done = held(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, held())
        time.sleep(0.001)
watcher = threading.Thread(target=watch)
watcher.start()
checkpoint = SafetensorsFolder(Path(sys.argv[1]))
target = Decoder(Shard.of(checkpoint.shape), checkpoint.fetch, Solo(), torch.bfloat16, "bfloat16", "cpu", 64)
done = True
watcher.join()
print(max(peak, held()) - before, target.weight_bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_loading_needs_the_model_and_one_tensor(tmp_path):
    """Anonymous memory, the most at any time: the packed weights, the embedding, and room for one more tensor."""
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 12}
    write_llama(tmp_path, dtype=torch.bfloat16, num_key_value_heads=4, initializer_range=0.02, **sizes)
    done = subprocess.run([sys.executable, "-c", _PEAK, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak, weights = map(int, done.stdout.split())
    assert weights > 120e6
    largest, slack = 3072 * 768 * 2, 8e6
    assert peak < weights + largest + slack
