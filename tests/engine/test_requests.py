"""What is asked of the engine is checked before anything runs; a request's figures are its own."""

from __future__ import annotations

import time

import pytest
import torch

import slipstream
from slipstream.draft.ngram import NGramDrafter
from slipstream.engine.controller import Controller, CostModel
from slipstream.engine.request import SamplingParams
from slipstream.errors import RequestError, SlipstreamError
from tests.target.tiny import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_model(path, "llama")
    return path


@pytest.fixture(scope="module")
def engine(folder):
    return slipstream.Engine(str(folder), dtype="float32", max_length=200, max_batch=2)


def test_a_stop_text_is_not_taken_letter_by_letter():
    assert SamplingParams(stop="END").stop == ("END",)


@pytest.mark.parametrize(
    "wrong", [{"max_new_tokens": 3.5}, {"top_k": 10**20}, {"top_k": 1.0}, {"seed": 2**70}, {"seed": "x"}]
)
def test_numbers_that_cannot_be(wrong):
    with pytest.raises(RequestError, match=next(iter(wrong))):
        SamplingParams(**wrong)


@pytest.mark.parametrize("temperature", [1e-5, 1e-38, 5e-324])
def test_hardly_any_temperature_is_none(engine, temperature):
    greedy, cold = (
        engine.generate("a b c", SamplingParams(max_new_tokens=30, temperature=t, ignore_eos=True), raw=True)
        for t in (0.0, temperature)
    )
    assert cold.token_ids == greedy.token_ids


def test_texts_that_are_none(engine):
    with pytest.raises(RequestError, match="Unicode"):
        engine.generate("\udcff hi")
    with pytest.raises(RequestError, match="token ids"):
        engine.generate([1.5, 2])
    ids = torch.tensor([5, 6, 7])
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    assert engine.generate(ids.numpy(), params).token_ids == engine.generate([5, 6, 7], params).token_ids


def test_a_stream_checks_its_request_at_once(engine):
    with pytest.raises(RequestError, match="empty"):
        engine.stream("")


def test_limits_are_checked_before_a_weight_is_read(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(SlipstreamError, match="goes up to 256"):
        slipstream.Engine(str(tmp_path), max_length=10**10)
    with pytest.raises(SlipstreamError, match="CPUs"):
        slipstream.Engine(str(folder), threads=100_000)


@pytest.mark.parametrize("options", [{"max_drafted": 10}, {"max_drafted": 4}, {"max_suffix": 20}])
def test_drafters_of_other_sizes(folder, options):
    """Their drafts may be longer than the largest tree in use, and their outlooks more than there are classes."""
    engine = slipstream.Engine(str(folder), draft=NGramDrafter(**options), dtype="float32", max_length=200)
    steep = CostModel(
        {1: 100.0, 11: 100_000.0}
    )  # never worth it, so every draft is scored without being verified
    engine._controller = engine._scheduler.controller = Controller(steep, engine.drafter.max_drafted, True)
    params = SamplingParams(max_new_tokens=150, ignore_eos=True)
    plain = engine.generate([5, 6, 7] * 8, params, speculate=False)
    assert engine.generate([5, 6, 7] * 8, params).token_ids == plain.token_ids


def test_time_that_a_reader_takes_is_not_the_engines(engine):
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    chunks = []
    for chunk in engine.stream([5, 6, 7], params, speculate=False):
        chunks.append(chunk)
        time.sleep(0.02)
    assert chunks[-1].stats is not None
    assert chunks[-1].stats.decode_s < 8 * 0.02
