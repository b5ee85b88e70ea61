"""Conversations by the target: the template of any model, given openings, and what each turn was drawn from."""

from __future__ import annotations

import json

import pytest
import torch

from slipstream.errors import DataError
from slipstream.lab.prompts import load_prompts
from slipstream.target.gguf_file import GGUFFile
from slipstream.target.load import _packaged, load
from slipstream.target.tokenizer import from_gguf
from slipstream.train.conversations import (
    Template,
    draw_openings,
    make_conversations,
    read_openings,
    template_of,
)
from tests.target.tiny import VOCABULARY, forward, write_model


@pytest.fixture(scope="module")
def fields():
    return GGUFFile(_packaged()).fields


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder, "llama")
    return load(str(folder), dtype="float32", positions=256).target


def test_the_template_of_smollm2(fields):
    """The tokens that the shipped head was trained with."""
    tokenizer = from_gguf(fields, (2,))
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert template_of(tokenizer) == Template(
        tokenizer.encode(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"),
        tokenizer.encode("\n<|im_start|>assistant\n"),
        tokenizer.encode("<|im_end|>")[0],
    )


def test_templates_of_other_kinds(fields):
    """Users' turns that end in another token, several end tokens, an end that the template does not write."""
    start, end = 1, 2  # <|im_start|>, <|im_end|>
    marked = (
        "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content | trim }}"
        "{% if m.role != 'user' %}<|im_end|>{% endif %}{% endfor %}"
    )
    opens = "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
    tokenizer = from_gguf({**fields, "tokenizer.chat_template": marked + opens}, (0, end))
    encode = tokenizer.encode
    found = template_of(tokenizer)
    assert found == Template(
        encode("<|im_start|>user: "), encode("assistant: "), end, user_end=start, stops=(0,)
    )
    bare = "{% for m in messages %}# {{ m.content }}\n{% endfor %}"
    found = template_of(from_gguf({**fields, "tokenizer.chat_template": bare}, (end,)))
    assert (found.opening, found.between, found.end) == (encode("# "), [], end)
    assert found.user_end == encode("\n")[0]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('not today') }}", "refuses the conversation: not today"),
        ("{% for m in messages %}a {{ m.content }}{{ m.content }} b{% endfor %}", "each text once"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "nothing before or behind"),
    ],
)
def test_templates_that_cannot_be_taken_apart(fields, template, message):
    with pytest.raises(DataError, match=message):
        template_of(from_gguf({**fields, "tokenizer.chat_template": template}, (2,)))


def test_a_template_without_any_end_token(fields):
    gone = {**fields, "tokenizer.chat_template": "{% for m in messages %}# {{ m.content }}\n{% endfor %}"}
    del gone["tokenizer.ggml.eos_token_id"]
    with pytest.raises(DataError, match="which token ends an answer"):
        template_of(from_gguf(gone, ()))


def made(target, template, count, **changes):
    options = {
        "user_tokens": 10,
        "answer_tokens": 24,
        "user_temperature": 1.0,
        "answer_temperature": torch.tensor([0.0, 1.5]).repeat(count)[:count],
        "seed": 3,
        "device": "cpu",
    }
    return make_conversations(target, template, count, **(options | changes))


TEMPLATE = Template([3, 4], [5, 6], end=1)


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE,
        Template([3], [5, 6], end=1, user_end=7),
        Template([3, 4], [], end=1, user_end=7),
        Template([3, 4], [5], end=1, stops=(30, 31, 32, 33, 34, 35)),
    ],
    ids=["plain", "user_end", "no_between", "stops"],
)
def test_every_conversation_has_the_form_of_the_template(target, template):
    count, user_end = 48, template.end if template.user_end is None else template.user_end
    openings = [[40 + i % 5, 50, user_end][: i % 4] for i in range(count)]
    found = made(target, template, count, openings=openings)
    ends, cut = {template.end, *template.stops}, 0
    for row, begin, end, opening in zip(
        found.tokens.tolist(), found.begin.tolist(), found.end.tolist(), openings, strict=True
    ):
        first = len(template.opening)
        assert row[:first] == template.opening
        user = row[first : begin - len(template.between)]
        assert row[begin - len(template.between) : begin] == template.between
        assert user[: len(opening)] == opening
        assert user[-1] == user_end
        assert len(user) <= 10
        assert not ({user_end, *ends} & set(user[len(opening) : -1]))
        answer = row[begin:end]
        assert 1 <= len(answer) <= 24
        assert not ends & set(answer[:-1])
        if answer[-1] not in ends:
            assert len(answer) == 24
            cut += 1
    assert 0 < cut < count
    again = made(target, template, count, openings=openings)
    assert all(torch.equal(getattr(again, each), getattr(found, each)) for each in ("tokens", "begin", "end"))


def test_greedy_answers_are_the_targets_first_choices(target):
    found = made(target, TEMPLATE, 12, openings=[[40, 41]] * 12)
    checked = 0
    for i in range(0, 12, 2):
        begin, end = int(found.begin[i]), int(found.end[i])
        best = forward(target, found.tokens[i, :end]).argmax(-1)
        assert best[begin - 1 : end - 1].tolist() == found.tokens[i, begin:end].tolist()
        checked += end - begin
    assert checked > 50


def test_openings_that_do_not_fit_are_refused(target):
    with pytest.raises(DataError, match="an opening of 9 tokens leaves no word"):
        made(target, TEMPLATE, 2, openings=[[40] * 9, []])
    with pytest.raises(DataError, match="1 openings came for 2"):
        made(target, TEMPLATE, 2, openings=[[40]])


def test_a_share_of_the_turns_begins_freely():
    openings = [[i] for i in range(VOCABULARY)]
    drawn = draw_openings(openings, 4000, 0.2, torch.Generator().manual_seed(0))
    free = sum(not each for each in drawn) / 4000
    assert 0.17 < free < 0.23  # five standard deviations are 0.03
    assert {tuple(each) for each in drawn} == {(), *(tuple(each) for each in openings)}
    assert drawn == draw_openings(openings, 4000, 0.2, torch.Generator().manual_seed(0))
    assert not any(draw_openings(openings, 50, 1.0, torch.Generator()))


def test_the_shipped_openings(fields):
    """Many, all different, short, and none of the prompts that heads are judged by."""
    openings = read_openings()
    assert len(openings) >= 250
    assert len(set(openings)) == len(openings)
    assert all(each == each.strip() for each in openings)
    tokenizer = from_gguf(fields, (2,))
    assert max(len(tokenizer.encode(each)) for each in openings) <= 16
    judged = json.dumps([each.prompt for each in load_prompts()]).lower()
    long = [each for each in openings if len(each.split()) >= 5]
    assert long
    assert not [each for each in long if each.lower().rstrip(":.?") in judged]
