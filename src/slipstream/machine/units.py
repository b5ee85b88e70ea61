"""Quantities with their unit: "96 GB", "1.6 TB/s", "5.3 us". A bare number is in the unit that the field names."""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import BeforeValidator, Field

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BYTES = {f"{prefix}B": size for prefix, size in _DECIMAL.items()} | {
    f"{prefix}iB": 1024.0**power for power, prefix in enumerate("KMGT", 1)
}
_SCALES = {
    "bytes": _BYTES,
    "us": {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6},
    "bytes/s": {f"{unit}/s": size for unit, size in _BYTES.items()},
    "flop/s": {f"{prefix}FLOP/s": size for prefix, size in _DECIMAL.items()},
}
_QUANTITY = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*([A-Za-z/]+)\s*")


def parse(value: object, unit: str) -> float:
    """The number of `unit` (a key of the table above) in "number unit" or a bare number. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{value!r} is not a quantity")
    if not isinstance(value, str):
        if not math.isfinite(value):
            raise ValueError(f"{value!r} is not a quantity")
        return float(value)
    found, scales = _QUANTITY.fullmatch(value), _SCALES[unit]
    if found is None or found[2] not in scales:
        known = ", ".join(scales)
        raise ValueError(f"{value!r} is not a number with one of the units {known}")
    return float(found[1]) * scales[found[2]]


Bytes = Annotated[int, BeforeValidator(lambda value: round(parse(value, "bytes"))), Field(gt=0)]
Us = Annotated[float, BeforeValidator(lambda value: parse(value, "us"))]
BytesPerS = Annotated[float, BeforeValidator(lambda value: parse(value, "bytes/s")), Field(gt=0)]
FlopPerS = Annotated[float, BeforeValidator(lambda value: parse(value, "flop/s")), Field(gt=0)]


def show_bytes(count: float) -> str:
    """Bytes in a binary unit where that is a small whole number, else in a decimal one."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size and count % size == 0 and count < 1024 * size:
            return f"{count / size:.0f} {unit}"
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.4g} {unit}"
    return f"{count:.0f} bytes"
