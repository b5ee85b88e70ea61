"""What several rooms' tests share: the real model, and transformers' own model on the same weights."""

from __future__ import annotations

import os

if (
    "PYTEST_XDIST_WORKER" in os.environ
):  # workers share the CPUs; before torch is loaded, and for what they start
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not torch.cuda.is_available():  # before any kernel is compiled: without a GPU Triton interprets them
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    """The CPU kernels are built before the workers start, so that no test's time limit pays for the compiler."""
    if not hasattr(config, "workerinput"):
        from slipstream.kernels.native import native

        native()


@pytest.fixture(autouse=True)
def _threads():
    """Tests that change the number of threads leave it as it was."""
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm2():
    """An engine on SmolLM2-135M-Instruct in float32."""
    import slipstream

    return slipstream.Engine(dtype="float32", max_length=1024, max_batch=4)


@pytest.fixture(scope="session")
def smollm2_bf16():
    """The same in bfloat16."""
    import slipstream

    return slipstream.Engine(dtype="bfloat16", weights="bfloat16", max_length=1024, max_batch=4)


@pytest.fixture(scope="session")
def reference_smollm2():
    """transformers' LlamaForCausalLM with the weights of the same GGUF file, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from slipstream.kernels.linear import QuantisedWeight
    from slipstream.target.gguf_file import GGUFFile
    from slipstream.target.load import _packaged
    from slipstream.target.weights import weight_names

    file = GGUFFile(_packaged())
    shape = file.shape
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate_size,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope.theta},
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    weights = {name: file.fetch(name) for name in weight_names(shape)}
    dense = {
        name: weight.dequantise() if isinstance(weight, QuantisedWeight) else weight
        for name, weight in weights.items()
    }
    missing, unexpected = model.load_state_dict(dense, strict=False)
    assert missing == ["lm_head.weight"]
    assert not unexpected
    model.tie_weights()
    model.generation_config.eos_token_id = None  # tests generate a fixed number of tokens
    return model.eval()
