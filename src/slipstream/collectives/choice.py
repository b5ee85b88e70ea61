"""Which backends there are, and which of them a group of ranks uses."""

from __future__ import annotations

from slipstream.collectives.gloo import Gloo, OrderedGloo
from slipstream.collectives.interface import Backend, Collectives, Solo
from slipstream.collectives.meeting import Meeting
from slipstream.collectives.shm import Shm
from slipstream.errors import SlipstreamError

BACKENDS: dict[str, type[Backend]] = {backend.name: backend for backend in (Gloo, OrderedGloo, Shm)}


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
    if reason := BACKENDS[backend].unavailable(meeting):
        raise SlipstreamError(f"the backend {backend} cannot run here: {reason}")
    return BACKENDS[backend](meeting)
