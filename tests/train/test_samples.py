"""Samples: the container, the dialects, and the mask against prompts as the engine sees them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from slipstream.errors import DataError
from slipstream.target.gguf_file import GGUFFile
from slipstream.target.load import _packaged
from slipstream.target.tokenizer import from_gguf
from slipstream.train.samples import LOOPING, Samples, draft_vocabulary, loops, read_samples

END = 2
"""<|im_end|>"""


@pytest.fixture(scope="module")
def fields():
    return GGUFFile(_packaged()).fields


@pytest.fixture(scope="module")
def tokenizer(fields):
    return from_gguf(fields, (END,))


@pytest.fixture(scope="module")
def bare_tokenizer(fields):
    """The same without a chat template."""
    return from_gguf({**fields, "tokenizer.chat_template": None}, (END,))


@st.composite
def sample_lists(draw):
    """Lists of (tokens, mask), empty samples among them."""
    lengths = draw(st.lists(st.integers(0, 9), max_size=12))
    return [
        (
            draw(st.lists(st.integers(0, 99), min_size=n, max_size=n)),
            draw(st.lists(st.booleans(), min_size=n, max_size=n)),
        )
        for n in lengths
    ]


def packed(samples) -> Samples:
    lengths = torch.tensor([0] + [len(tokens) for tokens, _ in samples])
    return Samples(
        torch.tensor([token for tokens, _ in samples for token in tokens], dtype=torch.int32),
        torch.tensor([each for _, mask in samples for each in mask], dtype=torch.bool),
        lengths.cumsum(0),
    )


def unpacked(samples: Samples):
    return [tuple(part.tolist() for part in samples.sample(i)) for i in range(len(samples))]


def file_of(folder: Path, *lines: object) -> Path:
    path = folder / "data.jsonl"
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines),
        encoding="utf-8",
        errors="surrogatepass",
    )
    return path


@given(sample_lists(), st.data())
@settings(deadline=None)
def test_the_container_is_a_list_of_samples(samples, data):
    made = packed(samples)
    assert unpacked(made) == samples
    assert made.lengths.tolist() == [len(tokens) for tokens, _ in samples]
    if samples:
        index = data.draw(st.lists(st.integers(0, len(samples) - 1), max_size=15))
        chosen = made.select(torch.tensor(index, dtype=torch.int64))
        assert unpacked(chosen) == [samples[i] for i in index]
        keep = data.draw(st.lists(st.booleans(), min_size=len(samples), max_size=len(samples)))
        chosen = made.select(torch.tensor(keep))
        assert unpacked(chosen) == [each for each, kept in zip(samples, keep, strict=True) if kept]
    with pytest.raises(IndexError):
        made.sample(len(samples))


@given(sample_lists())
@settings(deadline=None, max_examples=25)
def test_a_file_keeps_every_sample(samples):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "some.safetensors"
        packed(samples).save(path)
        assert unpacked(Samples.load(path)) == samples
        assert [each.name for each in Path(folder).iterdir()] == [path.name]


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=9), st.data()), min_size=1, max_size=6
    )
)
@settings(deadline=None, max_examples=25)
def test_tokens_of_a_line_are_taken_as_they_are(tokenizer, drawn):
    expected, lines = [], []
    for tokens, data in drawn:
        begin = data.draw(st.integers(0, len(tokens) - 1))
        end = data.draw(st.integers(begin + 1, len(tokens)))
        lines.append({"tokens": tokens, "loss": [[begin, end]], "conversations": "not looked at"})
        expected.append((tokens, [begin <= at < end for at in range(len(tokens))]))
    with tempfile.TemporaryDirectory() as folder:
        samples, report = read_samples(file_of(Path(folder), *lines), tokenizer, 9)
    assert unpacked(samples) == expected
    assert report.tokens == sum(len(tokens) for tokens, _ in expected)
    assert report.loss_tokens == sum(sum(mask) for _, mask in expected)


def test_files_that_hold_no_samples(tmp_path):
    path = tmp_path / "some.safetensors"
    good = {
        "tokens": torch.zeros(4, dtype=torch.int32),
        "mask": torch.ones(4, dtype=torch.bool),
        "starts": torch.tensor([0, 4]),
    }
    with pytest.raises(DataError, match="cannot be read"):
        Samples.load(path)
    path.write_bytes(b"not a file of tensors")
    with pytest.raises(DataError, match="cannot be read"):
        Samples.load(path)
    for changed, named in (
        ({"tokens": torch.zeros(4)}, "holds no samples"),
        ({"extra": torch.zeros(1)}, "holds no samples"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, "damaged"),
        ({"starts": torch.tensor([0, 3])}, "damaged"),
        ({"starts": torch.tensor([0, 5, 3, 4])}, "damaged"),
        ({"starts": torch.tensor([], dtype=torch.int64)}, "damaged"),
    ):
        save_file(good | changed, path)
        with pytest.raises(DataError, match=named):
            Samples.load(path)
    with pytest.raises(DataError, match="cannot be written"):
        Samples(**good).save(tmp_path / "nowhere" / "some.safetensors")


def test_the_mask_of_a_conversation_by_hand(tokenizer, tmp_path):
    """SmolLM2's own template: the spans are those of its text, written down here."""
    line = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello there!"},
            {"role": "user", "content": "Bye"},
            {"role": "assistant", "content": "So long."},
            {"role": "user", "content": "left out"},
        ]
    }
    pieces = [
        (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
            False,
        ),
        ("Hello there!<|im_end|>", True),
        ("\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n", False),
        ("So long.<|im_end|>", True),
    ]
    expected = [(token, marked) for text, marked in pieces for token in tokenizer.encode(text)]
    samples, report = read_samples(file_of(tmp_path, line), tokenizer, 100)
    tokens, mask = samples.sample(0)
    assert list(zip(tokens.tolist(), mask.tolist(), strict=True)) == expected
    assert (report.read, report.kept, report.tokens) == (1, 1, len(expected))
    assert report.loss_tokens == len(tokenizer.encode("Hello there!So long.")) + 2


TEXTS = st.text(
    st.characters(max_codepoint=0x2FF, exclude_categories=["Cs", "Cc"], include_characters="\n"), max_size=12
)


@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3), st.booleans())
@settings(deadline=None, max_examples=60)
def test_every_answer_stands_behind_the_prompt_that_the_engine_sees(
    tokenizer, bare_tokenizer, turns, has_template
):
    """Whatever is said: what comes before each answer is encode_chat's, and each answer is trained on once."""
    tokenizer = tokenizer if has_template else bare_tokenizer
    messages = [
        {"from": who, "value": text}
        for turn in turns
        for who, text in zip(("human", "gpt"), turn, strict=True)
    ]
    chat = [
        {"role": "user" if each["from"] == "human" else "assistant", "content": each["value"]}
        for each in messages
    ]
    prompts = [tokenizer.encode_chat(chat[:at]) for at in range(1, len(chat), 2)]
    with tempfile.TemporaryDirectory() as folder:
        samples, report = read_samples(file_of(Path(folder), {"conversations": messages}), tokenizer, 500)
    found = []
    for tokens, mask in unpacked(samples):
        edges = [at for at in range(len(mask)) if mask[at] != (at > 0 and mask[at - 1])] + [len(mask)]
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        found += [(tokens[:begin], tokens[begin:end]) for begin, end in spans]
    assert [prompt for prompt, _ in found] == prompts
    if has_template:
        assert [answer for _, answer in found] == [[*tokenizer.encode(answer), END] for _, answer in turns]
    assert report.kept == len(samples)


def test_an_answer_that_is_cut_differently_in_the_history_begins_a_new_sample(tokenizer, tmp_path):
    """The template ends a prompt with a line break; with spaces behind it they are one token in the history."""
    messages = [
        {"role": role, "content": text}
        for role, text in (("user", "a"), ("assistant", "    b"), ("user", "c"), ("assistant", "d"))
    ]
    samples, report = read_samples(file_of(tmp_path, {"messages": messages}), tokenizer, 100)
    assert (report.read, report.kept) == (1, 2)
    for i, at in enumerate((1, 3)):
        tokens, mask = samples.sample(i)
        prompt = tokenizer.encode_chat(messages[:at])
        assert tokens.tolist() == prompt + tokenizer.encode(messages[at]["content"]) + [END]
        assert mask.nonzero()[:, 0].tolist() == list(range(len(prompt), len(tokens)))


def test_a_template_that_rewrites_the_history(fields, tmp_path):
    """Each answer then has a sample of its own, behind its own prompt."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.content if loop.last or m.role == 'user' else '-' }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    tokenizer = from_gguf({**fields, "tokenizer.chat_template": template}, (END,))
    messages = [{"role": role, "content": f"{role} {i}"} for i in range(3) for role in ("user", "assistant")]
    samples, report = read_samples(file_of(tmp_path, {"messages": messages}), tokenizer, 100)
    assert (report.read, report.kept) == (1, 3)
    for i, at in enumerate((1, 3, 5)):
        tokens, mask = samples.sample(i)
        answer = [*tokenizer.encode(messages[at]["content"]), END]
        assert tokens.tolist() == tokenizer.encode_chat(messages[:at]) + answer
        assert int(mask.sum()) == len(answer)


def test_the_other_dialects(tokenizer, tmp_path):
    path = file_of(tmp_path, {"text": "All of it."}, "", "  ", {"id": 7, "tokens": [5, 6]})
    samples, report = read_samples([path, path], tokenizer, 100)
    text = tokenizer.encode("All of it.")
    assert unpacked(samples) == 2 * [(text, [True] * len(text)), ([5, 6], [True, True])]
    assert report.read == 4


def test_what_is_left_out_is_counted(tokenizer, tmp_path):
    path = file_of(
        tmp_path,
        {"tokens": [1] * 9},
        {"tokens": [1] * 8, "loss": [[0, 1], [7, 8]]},
        {"tokens": [1] * 4, "loss": []},
        {"messages": [{"role": "user", "content": "Nobody answers."}]},
        {"text": ""},
        {"tokens": [1] * 12, "loss": [[10, 12]]},
    )
    told = []
    samples, report = read_samples(path, tokenizer, 8, lambda done, total: told.append((done, total)))
    assert vars(report) == {
        "read": 6, "kept": 1, "too_long": 2, "without_loss": 3, "tokens": 8, "loss_tokens": 2
    }  # fmt: skip
    assert told[-1] == (path.stat().st_size, path.stat().st_size)
    samples, report = read_samples(path, tokenizer, 8, cut=True)
    assert samples.lengths.tolist() == [8, 8]
    assert (report.too_long, report.without_loss) == (2, 4)
    with pytest.raises(DataError, match=r"nothing is left.* 4 samples are longer than 3"):
        read_samples(path, tokenizer, 3)


USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Yes?"}
BROKEN = [
    ("{not json", "is not JSON"),
    ("[" * 50_000, "is not JSON"),
    ("[1, 2]", "is not a JSON object"),
    ("\udce9", "is not UTF-8"),
    ({"prompt": "x"}, 'has none of "conversations"'),
    ({"messages": []}, "the conversation is empty"),
    ({"conversations": {}}, '"conversations" is not a list'),
    ({"messages": ["x"]}, "message 1 is not a JSON object"),
    ({"messages": [USER, {"content": "x"}]}, 'message 2 has neither "role" nor "from"'),
    ({"messages": [{"role": "tool", "content": "x"}]}, "unknown role 'tool'"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown role"),
    ({"messages": [{"role": "user", "value": "x"}]}, 'message 1 has no "content"'),
    ({"messages": [USER, {"role": "assistant", "content": None}]}, "the content of message 2 is not text"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "the content of message 1 is not text"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "not valid Unicode"),
    ({"messages": [ANSWER]}, "the conversation begins with an answer"),
    ({"text": 5}, '"text" is not text'),
    ({"tokens": "5"}, "not a list of whole numbers"),
    ({"tokens": [True]}, "not a list of whole numbers"),
    ({"tokens": [5, 49152]}, "token 49152 is out of range; the model's go from 0 to 49151"),
    ({"tokens": [-1]}, "token -1 is out of range"),
    ({"tokens": [5], "loss": 1}, '"loss" is not a list'),
    ({"tokens": [5], "loss": [[0]]}, r"which is no \[begin, end\]"),
    ({"tokens": [5], "loss": [[0, 2]]}, "out of range; there are 1 tokens"),
    ({"tokens": [5], "loss": [[1, 0]]}, "out of range"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), BROKEN)
def test_a_broken_line_is_named(tokenizer, tmp_path, line, message):
    path = file_of(tmp_path, {"text": "fine"}, "", line, {"text": "fine"})
    if line == "\udce9":
        path.write_bytes(b'{"text": "fine"}\n\n{"text": "\xe9"}\n')
    with pytest.raises(DataError, match=message) as error:
        read_samples(path, tokenizer, 100)
    assert str(error.value).startswith(f"{path} line 3: ")
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tokenizer, tmp_path):
    for content in ("", "\n\n"):
        (tmp_path / "empty").write_text(content)
        with pytest.raises(DataError, match="empty is empty"):
            read_samples(tmp_path / "empty", tokenizer, 10)
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError, match="cannot be read"):
            read_samples(path, tokenizer, 10)


def test_a_template_that_refuses_or_hides_is_named(fields, tmp_path):
    path = file_of(tmp_path, {"messages": [USER, ANSWER]})
    for template, message in (
        ("{{ raise_exception('no\nsuch roles') }}", "line 1: the model's chat template refuses"),
        ("{{ messages | length }}", "line 1: the chat template cannot be split"),
    ):
        tokenizer = from_gguf({**fields, "tokenizer.chat_template": template}, (END,))
        with pytest.raises(DataError, match=message):
            read_samples(path, tokenizer, 100)


def test_a_template_without_an_end_token_ends_with_the_answer(fields, tmp_path):
    template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    tokenizer = from_gguf({**fields, "tokenizer.chat_template": template}, (END,))
    samples, _ = read_samples(file_of(tmp_path, {"messages": [USER, ANSWER]}), tokenizer, 100)
    tokens, mask = samples.sample(0)
    assert tokens.tolist() == tokenizer.encode("[user] Hi\n[assistant] ") + tokenizer.encode("Yes?")
    assert int(mask.sum()) == len(tokenizer.encode("Yes?"))


@given(sample_lists(), st.integers(1, 100))
@settings(deadline=None)
def test_the_draft_vocabulary_is_of_the_most_frequent_loss_tokens(samples, size):
    d2t, coverage = draft_vocabulary(packed(samples), 100, size)
    ids = (torch.arange(size) + d2t).tolist()
    assert d2t.dtype == torch.int64
    assert ids == sorted(set(ids))
    assert ids[-1] < 100
    said = [token for tokens, mask in samples for token, marked in zip(tokens, mask, strict=True) if marked]
    counts = sorted((said.count(token) for token in range(100)), reverse=True)
    assert sum(said.count(token) for token in ids) == sum(counts[:size])
    assert coverage == pytest.approx(sum(counts[:size]) / max(1, len(said)))


@given(st.lists(st.integers(0, 3), max_size=40))
def test_loops_counts_4_grams_that_came_before(tokens):
    seen: list[list[int]] = []
    repeats = 0
    for at in range(len(tokens) - 3):
        gram = tokens[at : at + 4]
        repeats += gram in seen
        seen.append(gram)
    share = repeats / len(seen) if seen else 0.0
    assert loops(tokens) == pytest.approx(share)
    assert loops(torch.tensor(tokens, dtype=torch.int32)) == pytest.approx(share)


def test_loops_tells_a_loop_from_a_text(tokenizer):
    assert loops(tokenizer.encode("again and again " * 30)) > LOOPING
    assert loops(tokenizer.encode("The quick brown fox jumps over the lazy dog, and then it sleeps.")) < 0.1
