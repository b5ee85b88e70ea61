"""The package as a whole: every module imports, and without a compiler everything still works."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import slipstream
from tests.target.tiny import write_llama

MODULES = [module.name for module in pkgutil.walk_packages(slipstream.__path__, "slipstream.")]


@pytest.mark.parametrize("name", MODULES)
def test_every_module_imports(name: str) -> None:
    importlib.import_module(name)


def test_what_the_package_offers_is_there() -> None:
    assert all(getattr(slipstream, name) for name in slipstream.__all__)


@pytest.mark.parametrize(
    ("environment", "warned"),
    [({"CXX": "/there/is/no/compiler"}, True), ({"SLIPSTREAM_KERNELS": "reference"}, False)],
)
def test_without_compiled_kernels(tmp_path: Path, environment: dict[str, str], warned: bool) -> None:
    """The reference kernels run the same cycle: slower, and speculation still changes nothing."""
    write_llama(tmp_path / "model")
    code = (
        "import slipstream, sys; e = slipstream.Engine(sys.argv[1], max_length=200); "
        "p = slipstream.SamplingParams(max_new_tokens=12, ignore_eos=True); "
        "texts = [e.generate('a b a b a b', p, speculate=s).token_ids for s in (False, True)]; "
        "assert texts[0] == texts[1] and len(texts[0]) == 12"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model")],
        env={**os.environ, "SLIPSTREAM_CACHE": str(tmp_path / "cache"), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert ("slow reference kernels" in done.stderr) == warned
