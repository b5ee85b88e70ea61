"""Machines described as TOML, and the JSON that slipstream writes: one schema, the dataclasses of `machine`.

Quantities may carry their unit ("96 GB"). A TOML file may shorten what a Machine spells out: `devices` may be one table
with a `count`; a link may join `between` two groups of devices, or all pairs `among` one, in place of `a` and `b`, with
`peer` for both ways; a curve may give `points` of [bytes, us], which are joined, in place of segments.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from slipstream.errors import MachineError
from slipstream.machine import units
from slipstream.machine.curve import through
from slipstream.machine.machine import Machine

_FOLDER = Path(__file__).parent / "described"


def names() -> list[str]:
    """The described machines that slipstream carries, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load(name: str | Path) -> Machine:
    """A described machine by name or file. Raises MachineError."""
    if str(name) in names():
        path = _FOLDER / f"{name}.toml"
    else:
        path = Path(name).expanduser()
        if path.suffix != ".toml":
            raise MachineError(
                f"unknown machine {str(name)!r}; known are {', '.join(names())}, or give a .toml file"
            )
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MachineError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MachineError(f"{path} is not TOML: {error}") from None
    found.setdefault("name", path.stem)
    return from_plain(found, str(path))


def from_plain(found: dict[str, Any], where: str) -> Machine:
    """A machine from plain values, checked; `where` names them in the error. Raises MachineError."""
    try:
        return _adapter().validate_python(_expand(found))
    except ValidationError as error:
        raise MachineError(f"{where}: {_first(error)}") from None
    except ValueError as error:
        raise MachineError(f"{where}: {error}") from None


def _adapter() -> TypeAdapter[Machine]:
    global _ADAPTER
    if _ADAPTER is None:
        _ADAPTER = TypeAdapter(Machine)
    return _ADAPTER


_ADAPTER: TypeAdapter[Machine] | None = None


def _expand(found: dict[str, Any]) -> dict[str, Any]:
    """The shortened forms written out. Raises ValueError."""
    devices, links = found.get("devices", []), found.get("links", [])
    if isinstance(devices, dict):
        devices = dict(devices)
        count, nodes = devices.pop("count", None), devices.pop("numa_nodes", None)
        if type(count) is not int or count < 1:
            raise ValueError("devices.count: a whole number of devices is missing")
        if nodes is not None and (not isinstance(nodes, list) or len(nodes) != count):
            raise ValueError(f"devices.numa_nodes: {count} nodes are needed, one a device")
        every = [{**devices, "index": index} for index in range(count)]
        devices = [
            each | ({"numa_node": node}) for each, node in zip(every, nodes or [None] * count, strict=True)
        ]
    if not isinstance(links, list | tuple):
        raise ValueError("links: a list of tables is needed, [[links]]")
    found = {**found, "devices": devices, "links": [each for link in links for each in _pairs(link)]}
    ceilings = found.get("ceilings")
    if isinstance(ceilings, dict) and isinstance(ceilings.get("all_reduce"), list):
        found["ceilings"] = {**ceilings, "all_reduce": [_joined(curve) for curve in ceilings["all_reduce"]]}
    return found


def _joined(curve: Any) -> Any:
    if not isinstance(curve, dict) or "points" not in curve:
        return curve
    rest = {key: value for key, value in curve.items() if key != "points"}
    try:
        points = [(int(units.parse(size, "bytes")), units.parse(us, "us")) for size, us in curve["points"]]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"ceilings.all_reduce: points are pairs of bytes and microseconds: {error}"
        ) from None
    sizes = [size for size, _ in points]
    if not points or "segments" in rest or sizes != sorted(set(sizes)):
        raise ValueError("ceilings.all_reduce: points are in rising sizes, and take the place of segments")
    return {"to_bytes": sizes[-1], **rest, "segments": [asdict(segment) for segment in through(points)]}


def _pairs(link: Any) -> Iterator[Any]:
    groups = [key for key in ("between", "among") if isinstance(link, dict) and key in link]
    if isinstance(link, dict) and "peer" in link:
        link = {"peer_a_to_b": link["peer"], "peer_b_to_a": link["peer"], **link}
        del link["peer"]
    if not groups:
        yield link
        return
    rest = {key: value for key, value in link.items() if key not in ("between", "among")}
    group = link[groups[0]]
    try:
        joined = itertools.product(*group) if groups[0] == "between" else itertools.combinations(group, 2)
        pairs = [tuple(sorted(pair)) for pair in joined]
    except TypeError:
        pairs = []
    if len(groups) > 1 or not pairs or any(len(pair) != 2 for pair in pairs):
        raise ValueError("links: between needs two lists of devices, among needs one")
    for a, b in pairs:
        yield {**rest, "a": a, "b": b}


def _first(error: ValidationError) -> str:
    """What is wrong, in one line: the first fault with its place, and how many more there are."""
    faults = error.errors(include_url=False)
    one = faults[0]
    place = ".".join(str(part) for part in one["loc"])
    if one["type"] == "unexpected_keyword_argument":
        what = "is not a known key"
    elif one["type"] in ("missing", "missing_argument"):
        what = "is missing"
    else:
        what = one["msg"].removeprefix("Value error, ")
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"{place}: {what}{more}" if place else f"{what}{more}"
