"""From a conversation to tokens, as the engine would see them, and the spans that the assistant wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.errors import DataError, RequestError
from slipstream.target.tokenizer import Tokenizer
from slipstream.train.dialects import Message


@dataclass
class Spoken:
    """A sample: token ids, and [begin, end) of what the assistant wrote, its end-of-turn token included."""

    tokens: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)

    def follows(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt begins with all of this sample, so that the next answer can stand in it too."""
        return list(prompt[: len(self.tokens)]) == self.tokens

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Grows by a prompt that begins with all of this sample, and its answer."""
        self.tokens = [*prompt, *answer]
        self.spans.append((len(prompt), len(self.tokens)))


def speak(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[Spoken]:
    """The samples of a conversation: one, as a rule.

    Every answer stands after exactly the tokens that the engine would see as its prompt. Where these do not begin with
    the sample so far (a template that rewrites earlier turns, or a text that is cut into other tokens when it stands in
    the history) a new sample begins, with the loss on its own answer. What follows the last answer is left out. Raises
    DataError when the template cannot be split or refuses the conversation.
    """
    samples = [Spoken()]
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if index == 0:
            raise DataError("the conversation begins with an answer")
        try:
            before = tokenizer.render_chat(messages[:index])
            after = tokenizer.render_chat(messages[: index + 1], answering=False)
        except RequestError as error:
            raise DataError(str(error)) from None
        if not after.startswith(before):
            raise DataError(
                f"the chat template cannot be split before message {index + 1}: what it renders with the answer does"
                " not begin with what it renders as the prompt"
            )
        prompt = tokenizer.encode(before)
        if not samples[-1].follows(prompt):
            samples.append(Spoken())
        samples[-1].add(prompt, _answer(tokenizer, after[len(before) :], message["content"]))
    return samples


def _answer(tokenizer: Tokenizer, piece: str, content: str) -> list[int]:
    """The tokens of an answer up to the end of its turn; what the template puts behind that is nobody's answer."""
    ids = tokenizer.encode(piece)
    ends = [index for index, token in enumerate(ids) if token in tokenizer.eos_ids]
    if ends:
        return ids[: ends[-1] + 1]
    said = content.strip()
    at = piece.rfind(said)
    return ids if at < 0 else tokenizer.encode(piece[: at + len(said)])
