"""Named spans: every forward accounts for its own time (design rule 5). Off, a span is one cheap no-op.

    with span("attention"):
        ...

    with recording() as spans:
        run_one_cycle()
    spans.self_us()  # {"attention": 812.4, "mlp": ...}, children not counted twice

The names in use: draft, verify, embed, attention, mlp, moe, all_reduce, norm, lm_head, accept, commit, host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns


class _Off:
    """What `span` returns while nothing records."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


class _Span:
    """One running span of a recorder."""

    __slots__ = ("_name", "_recorder")

    def __init__(self, recorder: Spans, name: str) -> None:
        self._recorder, self._name = recorder, name

    def __enter__(self) -> None:
        self._recorder.events.append((self._name, perf_counter_ns()))

    def __exit__(self, *_: object) -> None:
        self._recorder.events.append((None, perf_counter_ns()))


class Spans:
    """What was recorded: events (name, ns) at a span's start and (None, ns) at its end, properly nested."""

    def __init__(self) -> None:
        self.events: list[tuple[str | None, int]] = []

    def self_us(self) -> dict[str, float]:
        """Microseconds by name, each without what its inner spans took; so they add up to the outermost spans."""
        own_ns: dict[str, int] = defaultdict(int)
        stack: list[str] = []
        last_ns = 0
        for name, at_ns in self.events:
            if stack:
                own_ns[stack[-1]] += at_ns - last_ns
            last_ns = at_ns
            if name is None:
                stack.pop()
            else:
                stack.append(name)
                own_ns[name] += 0
        return {name: ns / 1e3 for name, ns in own_ns.items()}

    def total_us(self) -> float:
        """Microseconds inside the outermost spans."""
        return sum(self.self_us().values())


_OFF = _Off()
_recorder: Spans | None = None


def span(name: str) -> _Off | _Span:
    """A context manager around a part of a cycle."""
    return _OFF if _recorder is None else _Span(_recorder, name)


@contextmanager
def recording() -> Iterator[Spans]:
    """Records every span of this process inside the block. Does not nest."""
    global _recorder
    if _recorder is not None:
        raise RuntimeError("spans are already being recorded")
    _recorder = Spans()
    try:
        yield _recorder
    finally:
        _recorder = None
