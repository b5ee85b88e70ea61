"""The shared measurements, which are not part of the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(os.environ.get("SLIPSTREAM_SHARED", Path(__file__).parents[3] / "shared"))


def shared(path: str) -> Path:
    """A file or folder of ../shared (SLIPSTREAM_SHARED says where else); skips without it, but fails in CI."""
    found = ROOT / path
    if not found.exists():
        if os.environ.get("CI"):
            pytest.fail(f"{found} is missing")
        pytest.skip(f"{found} is missing")
    return found
