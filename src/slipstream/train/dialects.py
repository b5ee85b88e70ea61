"""The dialects of training data: one JSON object a line, read into one form, with what is wrong by line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.errors import DataError

Message = dict[str, str]
"""{"role": "system", "user" or "assistant", "content": a text}."""
_ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}


@dataclass(frozen=True)
class Line:
    """One line: tokens where it has some, else messages, else a text."""

    place: str
    """FILE line N, as errors name it."""
    end: int
    """The byte of the file after it."""
    id: str | None = None
    messages: list[Message] = field(default_factory=list)
    text: str | None = None
    tokens: list[int] | None = None
    loss: list[tuple[int, int]] = field(default_factory=list)
    """[begin, end) of the tokens that the loss is taken on."""

    def fail(self, what: str) -> DataError:
        """The error that says what is wrong with this line."""
        return DataError(f"{self.place}: {what}")


def read_lines(path: Path, *, prompts: bool = False) -> Iterator[Line]:
    """The lines of a file, blank ones left out.

    prompts: only the messages matter, and {"prompt": ...} is a user's message too. Raises DataError for a file that
    cannot be read or holds nothing, and for the first line that is broken.
    """
    end, found = 0, False
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                end += len(raw)
                if raw.strip():
                    found = True
                    yield _parse(raw, f"{path} line {number}", end, prompts)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    if not found:
        raise DataError(f"{path} is empty")


def _parse(raw: bytes, place: str, end: int, prompts: bool) -> Line:
    line = Line(place, end)
    try:
        found: Any = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise line.fail("is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise line.fail(f"is not JSON ({str(error).split(':')[0]})") from None
    if not isinstance(found, dict):
        raise line.fail("is not a JSON object")
    own = found.get("id")
    name = None if own is None else str(own)
    if "tokens" in found and not prompts:
        tokens = _ids(found["tokens"], line)
        spans = found.get("loss", [[0, len(tokens)]])
        return Line(place, end, name, tokens=tokens, loss=_spans(spans, len(tokens), line))
    for key in ("conversations", "messages"):
        if key in found:
            return Line(place, end, name, messages=_messages(found[key], key, line))
    if prompts and "prompt" in found:
        content = _text(found["prompt"], '"prompt"', line)
        return Line(place, end, name, messages=[{"role": "user", "content": content}])
    if "text" in found and not prompts:
        return Line(place, end, name, text=_text(found["text"], '"text"', line))
    known = (
        '"conversations", "messages" or "prompt"'
        if prompts
        else '"conversations", "messages", "text" or "tokens"'
    )
    raise line.fail(f"has none of {known}")


def _messages(found: Any, key: str, line: Line) -> list[Message]:
    if not isinstance(found, list):
        raise line.fail(f'"{key}" is not a list')
    if not found:
        raise line.fail("the conversation is empty")
    return [_message(each, number, line) for number, each in enumerate(found, 1)]


def _message(found: Any, number: int, line: Line) -> Message:
    where = f"message {number}"
    if not isinstance(found, dict):
        raise line.fail(f"{where} is not a JSON object")
    pair = next(
        ((role, text) for role, text in (("role", "content"), ("from", "value")) if role in found), None
    )
    if pair is None:
        raise line.fail(f'{where} has neither "role" nor "from"')
    role = found[pair[0]]
    if not isinstance(role, str) or role not in _ROLES:
        raise line.fail(f"{where} has the unknown role {role!r}; known are {', '.join(_ROLES)}")
    if pair[1] not in found:
        raise line.fail(f'{where} has no "{pair[1]}"')
    return {"role": _ROLES[role], "content": _text(found[pair[1]], f"the content of {where}", line)}


def _text(found: Any, what: str, line: Line) -> str:
    if not isinstance(found, str):
        raise line.fail(f"{what} is not text")
    try:
        found.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can write and no tokenizer can read
        raise line.fail(f"{what} is not valid Unicode text") from None
    return found


def _ids(found: Any, line: Line) -> list[int]:
    if not isinstance(found, list) or any(type(each) is not int for each in found):
        raise line.fail('"tokens" is not a list of whole numbers')
    return found


def _spans(found: Any, count: int, line: Line) -> list[tuple[int, int]]:
    if not isinstance(found, list):
        raise line.fail('"loss" is not a list')
    spans = []
    for each in found:
        if not isinstance(each, list) or len(each) != 2 or any(type(end) is not int for end in each):
            raise line.fail(f'"loss" holds {json.dumps(each)[:40]}, which is no [begin, end]')
        if not 0 <= each[0] <= each[1] <= count:
            raise line.fail(f"the span {each} of the loss is out of range; there are {count} tokens")
        spans.append((each[0], each[1]))
    return spans
