"""Text to tokens and back, through transformers' tokenizers and chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.errors import ModelError, RequestError

_CONTROL, _USER_DEFINED = 3, 4
"""GGUF's token types that stand for themselves in a text."""


class Tokenizer:
    """A model's tokenizer."""

    def __init__(self, fast: Any, eos_ids: Sequence[int]) -> None:
        """fast: a transformers fast tokenizer. eos_ids: the tokens that end a text."""
        self._fast = fast
        own = [fast.eos_token_id] if fast.eos_token_id is not None else []
        self.eos_ids: tuple[int, ...] = tuple(eos_ids) or tuple(own)

    @property
    def size(self) -> int:
        """How many tokens it knows; a model's vocabulary may be padded beyond that."""
        return len(self._fast)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._fast.chat_template)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text as it is, without any that a model's convention would add."""
        ids: list[int] = self._fast.encode(text, add_special_tokens=False)
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a conversation and the opening of the answer; without a template, of the bare texts."""
        return self.encode(self.render_chat(messages))

    def render_chat(self, messages: Sequence[Mapping[str, str]], *, answering: bool = True) -> str:
        """The text of a conversation; answering: with the opening of the answer. Without a template, the bare texts.

        Raises RequestError when the template refuses the conversation.
        """
        if not self.has_chat_template:
            return "\n\n".join(message["content"] for message in messages)
        from jinja2 import TemplateError

        try:
            text: str = self._fast.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=answering, tokenize=False
            )
        except TemplateError as error:
            raise RequestError(f"the model's chat template refuses the conversation: {error}") from None
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, those that stand for no text left out."""
        text: str = self._fast.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def stream(self) -> TokenStream:
        """Incremental decoding of one output."""
        return TokenStream(self._fast)


class TokenStream:
    """Turns tokens into text as they come; a character that is not whole yet waits for the next token."""

    def __init__(self, fast: Any) -> None:
        from tokenizers.decoders import DecodeStream

        self._backend = fast.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token: int) -> str:
        """The text that this token completes."""
        return self._stream.step(self._backend, token) or ""


def from_folder(folder: Path, eos_ids: Sequence[int]) -> Tokenizer:
    """The tokenizer that lies beside a checkpoint. Raises ModelError when there is none."""
    from transformers import AutoTokenizer

    try:
        fast = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # it raises many kinds for one reason
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{folder} holds no tokenizer that can be read: {reason}") from None
    return Tokenizer(fast, eos_ids)


def from_gguf(fields: Mapping[str, Any], eos_ids: Sequence[int]) -> Tokenizer:
    """The byte-level BPE that a GGUF file carries. Raises ModelError for other kinds."""
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"the file's tokenizer ({kind!r}, pre-tokenizer {pre!r}) is not supported; supported are gpt2 with"
            f" {', '.join(_PRE_TOKENIZERS)}. Use the model's Hugging Face folder instead"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    backend = Backend(
        models.BPE({token: index for index, token in enumerate(tokens)}, merges, fuse_unk=False)
    )
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, token_type in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
        if token_type in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_special_tokens(special)

    def named(field: str) -> str | None:
        index = fields.get(f"tokenizer.ggml.{field}_token_id")
        return None if index is None else tokens[index]

    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=named("bos"),
        eos_token=named("eos"),
        unk_token=named("unknown"),
        pad_token=named("padding"),
        chat_template=fields.get("tokenizer.chat_template"),
    )
    return Tokenizer(fast, eos_ids)


_PRE_TOKENIZERS = ("smollm", "gpt-2")


def _pre_tokenizer(pre: str) -> Any:
    from tokenizers import pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "gpt-2":
        return byte_level
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
