"""The tokenizer built from GGUF's metadata."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import ModelError
from slipstream.target.gguf_file import GGUFFile
from slipstream.target.load import _packaged
from slipstream.target.tokenizer import from_gguf


@pytest.fixture(scope="module")
def fields():
    return GGUFFile(_packaged()).fields


@pytest.fixture(scope="module")
def tokenizer(fields):
    return from_gguf(fields, (2,))


def test_digits_are_single_and_words_whole(tokenizer):
    assert [tokenizer.decode([i]) for i in tokenizer.encode("in 2026 there")] == [
        "in",
        " ",
        "2",
        "0",
        "2",
        "6",
        " there",
    ]


def test_chat_template(tokenizer):
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert ids[0] == 1  # <|im_start|>
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.decode(ids).endswith("assistant\n")
    assert "Hi" in tokenizer.decode(ids)


# SmolLM2's vocabulary has no token for 21 bytes, which control characters and the higher planes use.
KNOWN = st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs", "Cc"], exclude_characters="<")


@given(st.text(KNOWN, max_size=60))
@settings(max_examples=200, deadline=None)
def test_round_trip_and_streaming(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) == text


def test_streaming_never_shows_half_a_character(tokenizer):
    text = "naïve 日本語 🎉🎉"
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_other_kinds_are_refused_by_name(fields):
    with pytest.raises(ModelError, match="llama-bpe"):
        from_gguf(fields | {"tokenizer.ggml.pre": "llama-bpe"}, (2,))
