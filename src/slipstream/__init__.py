"""slipstream: an engine, a lab and an investigator that make speculative decoding pay."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Threads that wait for each other give the core away after some microseconds instead of a millisecond: beside another
# busy process the kernels are then slower, but still move (docs/log.md). Read by OpenMP when
# torch is imported, so it has no effect if that came first.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine
    from slipstream.engine.request import Chunk, Completion, SamplingParams, Stats
    from slipstream.errors import ModelError, RequestError, SlipstreamError

__version__ = "0.1.0"
__all__ = [
    "Chunk",
    "Completion",
    "Engine",
    "ModelError",
    "RequestError",
    "SamplingParams",
    "SlipstreamError",
    "Stats",
]

_HOMES = {
    "Engine": "engine.engine",
    "Chunk": "engine.request",
    "Completion": "engine.request",
    "SamplingParams": "engine.request",
    "Stats": "engine.request",
    "ModelError": "errors",
    "RequestError": "errors",
    "SlipstreamError": "errors",
}


def __getattr__(name: str) -> Any:
    """Imports on first use: `slipstream --help` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    return getattr(import_module(f"slipstream.{_HOMES[name]}"), name)
