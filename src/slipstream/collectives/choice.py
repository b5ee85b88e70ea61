"""Which backends there are, and which of them a group of ranks uses."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.collectives.gloo import Gloo, OrderedGloo
from slipstream.collectives.interface import Collectives, Solo
from slipstream.collectives.meeting import Meeting
from slipstream.errors import SlipstreamError

BACKENDS: dict[str, Callable[[Meeting], Collectives]] = {
    backend.name: backend for backend in (Gloo, OrderedGloo)
}


def connect(meeting: Meeting, backend: str = "auto") -> Collectives:
    """The collectives of this group; every rank calls it with the same name (see `BACKENDS`), or auto.

    SlipstreamError where the name is not known or the backend cannot run here: its own reason is in the line.
    """
    if meeting.size == 1:
        return Solo()
    meeting.agree("the backend", backend)
    if backend == "auto":
        backend = OrderedGloo.name
    if backend not in BACKENDS:
        raise SlipstreamError(f"there is no backend {backend!r}; there are auto, {', '.join(BACKENDS)}")
    return BACKENDS[backend](meeting)
