"""Prompt files: the shipped one, and every way in which another can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.errors import SlipstreamError
from slipstream.lab.prompts import KINDS, Prompt, count_by_kind, load_prompts


def test_shipped_set_has_every_kind_often_enough() -> None:
    prompts = load_prompts()
    counts = count_by_kind(prompts)
    assert len(prompts) >= 28
    assert set(counts) == set(KINDS)
    assert min(counts.values()) >= 7
    assert len({prompt.prompt for prompt in prompts}) == len(prompts)


def test_a_short_run_sees_every_kind_first() -> None:
    assert {prompt.kind for prompt in load_prompts()[: len(KINDS)]} == set(KINDS)


def test_long_kinds_carry_their_text() -> None:
    for prompt in load_prompts():
        words = len(prompt.prompt.split())
        assert words <= 330  # about 450 tokens
        if prompt.kind == "summarise":
            assert words >= 150


def test_text_file_is_one_chat_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_text("first\n\n  second \n", encoding="utf-8")
    assert load_prompts(path) == [Prompt("chat", "first"), Prompt("chat", "second")]


def test_line_separators_inside_json_do_not_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"kind": "chat", "prompt": "a\u2028b"}\r\n', encoding="utf-8")
    assert load_prompts(path) == [Prompt("chat", "a\u2028b")]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("not json", "not JSON"),
        ("[1]", "not a JSON object"),
        ("[" * 100_000, "line 2"),
        ('{"kind": "chat"}', "prompt missing"),
        ("{}", "kind and prompt missing"),
        ('{"kind": "poem", "prompt": "x"}', "unknown kind 'poem'; known are chat, code, summarise, edit"),
        ('{"kind": ["chat"], "prompt": "x"}', "unknown kind"),
        ('{"kind": "chat", "prompt": ""}', "not empty"),
        ('{"kind": "chat", "prompt": 3}', "must be a text"),
        ('{"kind": "chat", "prompt": "x", "weight": 2}', "unknown field 'weight'"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"kind": "chat", "prompt": "fine"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(SlipstreamError) as error:
        load_prompts(path)
    assert f"{path}, line 2" in str(error.value)
    assert what in str(error.value)


def test_wrong_encoding_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_bytes(b'{"kind": "chat", "prompt": "fine"}\n{"kind": "chat", "prompt": "\xff"}\n')
    with pytest.raises(SlipstreamError, match=r"line 2: not UTF-8 text \(byte 0xff\)"):
        load_prompts(path)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(SlipstreamError, match="holds no prompt"):
        load_prompts(path)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match="No such file"):
        load_prompts(tmp_path / "none.jsonl")
    with pytest.raises(SlipstreamError, match="is a folder"):
        load_prompts(tmp_path)
