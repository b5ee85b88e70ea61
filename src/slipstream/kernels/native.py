"""Builds and loads the C++ kernels for CPUs: once per machine, torch version and source, through torch's loader."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from slipstream import knobs

NAME = "slipstream_native"
SOURCES = Path(__file__).parent / "csrc"
FLAGS = ["-O3", "-march=native", "-fopenmp", "-ffp-contract=off", "-Wno-psabi"]
"""torch's loader adds its own `-std`. Contracting a * b + c at the compiler's whim would make bits depend on it."""

_loaded: ModuleType | None = None
_tried = False


def native() -> Any | None:
    """The extension module, built on first use; None when the reference kernels are to run.

    A machine without a compiler gets one warning and the reference kernels: slower, the same contract.
    """
    global _loaded, _tried
    if not _tried:
        _loaded = _load() if knobs.use_native_kernels() else None
        _tried = True
    return _loaded


def _cpu_flags() -> str:
    """What `-march=native` depends on, so that a cache on a shared home folder never serves another CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _key() -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    for fact in (torch.__version__, sys.version, platform.machine(), _cpu_flags(), *FLAGS):
        digest.update(fact.encode())
    return digest.hexdigest()[:16]


def _load() -> ModuleType | None:
    folder = knobs.cache_dir() / "kernels" / _key()
    library = folder / f"{NAME}{sysconfig.get_config_var('SHLIB_SUFFIX') or '.so'}"
    if not library.exists():
        try:
            with _alone(folder):
                if not library.exists():
                    _build(folder, library.name)
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            warnings.warn(
                f"slipstream runs its slow reference kernels: the C++ ones could not be built ({reason})."
                " A C++20 compiler (g++ or clang++) mends it.",
                RuntimeWarning,
                stacklevel=3,
            )
            return None
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process of a machine builds, and the others, the ranks of one engine say, wait for it.

    The lock is the kernel's, so it ends with the process that holds it, however that ends.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(folder: Path, library: str) -> None:
    """Compiles into a private folder and moves it into place, so that a killed build leaves nothing half done."""
    from torch.utils import cpp_extension

    if shutil.which(os.environ.get("CXX", "c++")) is None:
        raise RuntimeError("no C++ compiler found")
    scripts = sysconfig.get_path("scripts")  # where pip put ninja
    os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    print("slipstream: building its CPU kernels, once (about a minute) ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        # Compiled with OpenMP but not linked to it: the symbols then come from the runtime that torch itself
        # carries. A second OpenMP runtime would keep a second pool of spinning threads on the same cores.
        cpp_extension.load(
            name=NAME,
            sources=[str(source) for source in sorted(SOURCES.glob("*.cpp"))],
            extra_cflags=FLAGS,
            build_directory=scratch,
            is_python_module=True,
            verbose=False,
        )
        target = Path(tempfile.mkdtemp(dir=folder.parent))
        shutil.move(str(Path(scratch) / f"{NAME}.so"), target / library)
        try:
            os.replace(target, folder)
        except OSError:  # another machine that shares this folder was first; its build is the same
            shutil.rmtree(target, ignore_errors=True)
    print("slipstream: kernels built.", file=sys.stderr, flush=True)
