"""Every environment flag of slipstream, in one place. Each is an ablation: off, the result is the same text.

| variable | values | what it does |
|---|---|---|
| `SLIPSTREAM_KERNELS` | `native` (default), `reference` | `reference`: plain torch even where a C++ kernel exists |
| `SLIPSTREAM_DEBUG` | anything | an unexpected error shows its traceback |
| `GOMP_SPINCOUNT` | a number | OpenMP's own: how long threads wait without sleeping; set to 1000 unless it is set |
| `SLIPSTREAM_CACHE` | a folder | where built kernels and measured costs are kept (default `~/.cache/slipstream`) |
| `SLIPSTREAM_LEDGER` | a file | where trials are recorded (default `~/.local/share/slipstream/ledger.sqlite`) |
| `SLIPSTREAM_SHARE_CORES` | `1` | lets several ranks of `tp` share a core: slow, for trying things out |
"""

from __future__ import annotations

import os
from pathlib import Path

from slipstream.errors import SlipstreamError


def use_native_kernels() -> bool:
    """False when `SLIPSTREAM_KERNELS=reference`; any other value than the two known ones is an error."""
    value = os.environ.get("SLIPSTREAM_KERNELS", "native")
    if value not in ("native", "reference"):
        raise SlipstreamError(f"SLIPSTREAM_KERNELS={value}: known values are native, reference")
    return value == "native"


def may_share_cores() -> bool:
    """Whether there may be more ranks than cores."""
    return os.environ.get("SLIPSTREAM_SHARE_CORES") == "1"


def cache_dir() -> Path:
    """The folder for what is costly to make again: built kernels, measured costs."""
    root = os.environ.get("SLIPSTREAM_CACHE")
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream"


def ledger_path() -> Path:
    """The file in which trials are recorded unless another is named."""
    named = os.environ.get("SLIPSTREAM_LEDGER")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "slipstream/ledger.sqlite"
