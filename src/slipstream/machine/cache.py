"""What was measured here, kept for the next run: one JSON file a machine in the user's cache folder.

The file's name is the machine's fingerprint (hardware and wiring). It holds the versions it was measured with: with
others the figures are not used, and a note says so.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from slipstream import knobs
from slipstream.errors import MachineError
from slipstream.machine.machine import Machine
from slipstream.machine.reading import from_plain

_FORMAT = 1
_MEASURE = "slipstream machine --calibrate"


def path_for(machine: Machine) -> Path:
    """Where this machine's calibration is kept."""
    return knobs.cache_dir() / "machine" / f"{machine.fingerprint}.json"


def save(machine: Machine) -> Path:
    """Keeps a machine's ceilings and their sources, replacing the last ones. Raises MachineError."""
    path = path_for(machine)
    kept = {
        "format": _FORMAT,
        "name": machine.name,
        "versions": asdict(machine.versions),
        "sources": {key: asdict(source) for key, source in machine.sources.items()},
        "ceilings": asdict(machine.ceilings),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as file:
            json.dump(kept, file, indent=1)
        os.replace(file.name, path)  # a reader sees the old file or the new one, never half of one
    except OSError as error:
        raise MachineError(f"{path} cannot be written: {error.strerror}") from None
    return path


def with_calibration(machine: Machine) -> Machine:
    """The machine with what was measured on it; a note says why there is none."""
    path = path_for(machine)
    try:
        kept: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return _noted(machine, f"nothing measured here yet: {_MEASURE}")
    except (OSError, ValueError) as error:
        return _noted(machine, f"{path} cannot be read ({error}): {_MEASURE} writes it anew")
    if not isinstance(kept, dict) or kept.get("format") != _FORMAT:
        return _noted(machine, f"{path} is of another version of slipstream: {_MEASURE} writes it anew")
    try:
        found = from_plain(
            {key: kept.get(key) for key in ("name", "sources", "ceilings", "versions")}, str(path)
        )
    except MachineError as error:
        return _noted(machine, f"{error}: {_MEASURE} writes it anew")
    now, then = asdict(machine.versions), asdict(found.versions)
    if changed := [f"{what} {then[what]}" for what in now if now[what] != then[what]]:
        return _noted(machine, f"the last measurements were with {', '.join(changed)}: {_MEASURE} again")
    return replace(machine, sources={**machine.sources, **found.sources}, ceilings=found.ceilings)


def _noted(machine: Machine, note: str) -> Machine:
    return replace(machine, notes=(*machine.notes, note))
