"""Where and with what a figure was measured: a figure without it cannot be compared with another."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any


def provenance(command: list[str] | None = None) -> dict[str, Any]:
    """The machine, the versions, the date (UTC) and the command line."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "slipstream": _version("slipstream"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": ["slipstream", *sys.argv[1:]] if command is None else command,
    }


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's own name, as Linux reports it; elsewhere what Python knows."""
    try:
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
