"""Every module of this room leaves nothing behind, whatever happened to its ranks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The files of these ranks lie where no other tests' do, and are gone after them."""
    place = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(place))
        patch.setattr(tempfile, "tempdir", str(place))
        yield
        assert os.listdir(place) == []
        assert list(Path("/dev/shm").glob("*slipstream*")) == []
