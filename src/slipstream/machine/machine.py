"""What box this is: its devices, links, NUMA nodes and ceilings; every figure says where it comes from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import ConfigDict, Field

from slipstream.errors import MachineError
from slipstream.machine import units
from slipstream.machine.curve import AllReduceCurve

PathKind = Literal["NVL", "PIX", "PXB", "PHB", "NODE", "SYS"]
PATH_MEANS: Mapping[PathKind, str] = {
    "NVL": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "a PCIe host bridge",
    "NODE": "several PCIe host bridges of one NUMA node",
    "SYS": "the interconnect between NUMA nodes",
}
_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Source:
    """Where a figure comes from: measured by slipstream, cited from somebody who measured or built it, or assumed."""

    __pydantic_config__ = _STRICT

    kind: Literal["measured", "cited", "assumed"]
    text: str


class Figure(NamedTuple):
    """A number and where it comes from."""

    value: float
    source: Source


@dataclass(frozen=True)
class Device:
    """A GPU. Generation and width are the PCIe link's, as the slot and the card allow (an idle card lowers them)."""

    __pydantic_config__ = _STRICT

    index: int
    name: str = "GPU"
    memory_bytes: units.Bytes | None = None
    compute_capability: tuple[int, int] | None = None
    numa_node: int | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    bus_id: str | None = None


@dataclass(frozen=True)
class Link:
    """The path between devices a < b. `peer` is whether each can read and write the other's memory (None: unknown)."""

    __pydantic_config__ = _STRICT

    a: int
    b: int
    path: PathKind | None
    nvlinks: int = 0
    peer_a_to_b: bool | None = None
    peer_b_to_a: bool | None = None

    @property
    def peer(self) -> bool | None:
        """Both ways; None when one is unknown and the other not refused."""
        ways = (self.peer_a_to_b, self.peer_b_to_a)
        return False if False in ways else None if None in ways else True

    @property
    def label(self) -> str:
        """As `nvidia-smi topo -m` writes it: NV18, PIX, SYS."""
        return f"NV{self.nvlinks or '#'}" if self.path == "NVL" else self.path or "?"


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node: the numbers of its logical CPUs as Linux writes them ("0-15,32-47"), and its memory."""

    __pydantic_config__ = _STRICT

    index: int
    cpus: str
    memory_bytes: units.Bytes | None = None


@dataclass(frozen=True)
class Cpu:
    """The processors. `threads` counts logical CPUs; a cache's size is one instance's ("L2": 1048576)."""

    __pydantic_config__ = _STRICT

    name: str = "unknown"
    sockets: int | None = None
    cores: int | None = None
    threads: int | None = None
    memory_bytes: units.Bytes | None = None
    caches_bytes: Mapping[str, units.Bytes] = field(default_factory=dict)
    numa: tuple[NumaNode, ...] = ()


@dataclass(frozen=True)
class Versions:
    """What a measurement depends on beside the hardware."""

    __pydantic_config__ = _STRICT

    driver: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    torch: str | None = None


@dataclass(frozen=True)
class MemoryRead:
    """Bytes read a second: by one GPU, or by all of so many CPU threads together."""

    __pydantic_config__ = _STRICT

    bytes_per_s: units.BytesPerS
    source: str
    threads: int | None = None


@dataclass(frozen=True)
class MatrixRate:
    """Floating-point operations a second of a large matrix product: one GPU's, or all of so many CPU threads'."""

    __pydantic_config__ = _STRICT

    dtype: str
    flop_per_s: units.FlopPerS
    source: str
    threads: int | None = None


_Rate = TypeVar("_Rate", MemoryRead, MatrixRate)


@dataclass(frozen=True)
class Launch:
    """What one small operation costs the host (eager) or adds to a graph's replay (captured), microseconds."""

    __pydantic_config__ = _STRICT

    captured: bool
    us: Annotated[units.Us, Field(ge=0)]
    source: str


@dataclass(frozen=True)
class Ceilings:
    """What the box can do at best. Entries are in order of preference."""

    __pydantic_config__ = _STRICT

    memory_read: tuple[MemoryRead, ...] = ()
    matrix: tuple[MatrixRate, ...] = ()
    launch: tuple[Launch, ...] = ()
    all_reduce: tuple[AllReduceCurve, ...] = ()


@dataclass(frozen=True)
class Machine:
    """A box: real (`here`), drawn by nvidia-smi (`from_topology`) or described in a TOML file (`load`)."""

    __pydantic_config__ = _STRICT

    name: str
    about: str = ""
    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    cpu: Cpu = field(default_factory=Cpu)
    versions: Versions = field(default_factory=Versions)
    sources: Mapping[str, Source] = field(default_factory=dict)
    ceilings: Ceilings = field(default_factory=Ceilings)
    notes: tuple[str, ...] = ()

    @classmethod
    def here(cls) -> Machine:
        """This machine, with what `slipstream machine --calibrate` measured on it."""
        from slipstream.machine.probe import probe

        return probe()

    @classmethod
    def load(cls, name: str | Path) -> Machine:
        """A described machine by its name or its .toml file. Raises MachineError."""
        from slipstream.machine.reading import load

        return load(name)

    @classmethod
    def from_topology(cls, text: str, name: str = "topology") -> Machine:
        """What the output of `nvidia-smi topo -m` says. Raises MachineError."""
        from slipstream.machine.topology import parse_topology

        return parse_topology(text, name)

    def __post_init__(self) -> None:
        indices = [device.index for device in self.devices]
        if indices != list(range(len(indices))):
            raise ValueError("devices are numbered 0, 1, 2, ...")
        pairs = [(link.a, link.b) for link in self.links]
        if len(set(pairs)) != len(pairs) or any(not 0 <= a < b < len(indices) for a, b in pairs):
            raise ValueError("every link joins two different devices, and no pair has two")
        every = self.ceilings
        used = {each.source for each in every.all_reduce} | {each.source for each in every.launch}
        used |= {each.source for each in every.memory_read} | {each.source for each in every.matrix}
        if missing := sorted(used - set(self.sources)):
            raise ValueError(f"no such source: {', '.join(missing)}")

    @property
    def has_gpus(self) -> bool:
        """Whether ranks are GPUs; otherwise they are processes on the CPU."""
        return bool(self.devices)

    def link(self, a: int, b: int) -> Link | None:
        """The path between two devices, in either order."""
        low, high = sorted((a, b))
        return next((link for link in self.links if (link.a, link.b) == (low, high)), None)

    @property
    def islands(self) -> list[list[int]]:
        """The devices by NUMA node, in the order of the nodes; those of an unknown node come last."""
        nodes: dict[int | None, list[int]] = {}
        for device in self.devices:
            nodes.setdefault(device.numa_node, []).append(device.index)
        return [nodes[node] for node in sorted(nodes, key=lambda node: (node is None, node or 0))]

    @property
    def fingerprint(self) -> str:
        """A short hash of the hardware and how it is wired; versions and measurements are not in it."""
        devices = [
            [d.name, d.memory_bytes, d.numa_node, d.pcie_generation, d.pcie_width] for d in self.devices
        ]
        links = [[link.a, link.b, link.label, link.peer_a_to_b, link.peer_b_to_a] for link in self.links]
        cpu = [self.cpu.name, self.cpu.sockets, self.cpu.cores, self.cpu.threads, len(self.cpu.numa)]
        return hashlib.sha256(json.dumps([devices, links, cpu]).encode()).hexdigest()[:16]

    def memory_read(self, ranks: int = 1, threads: int | None = None) -> Figure:
        """Bytes a second that each rank reads while all of them do. On CPUs `threads` is a rank's (default 1)."""
        found = self._by_threads(self.ceilings.memory_read, ranks, threads, "memory read bandwidth")
        shared = ranks if found.threads else 1
        return Figure(found.bytes_per_s / shared, self.sources[found.source])

    def matrix_rate(self, dtype: str, ranks: int = 1, threads: int | None = None) -> Figure:
        """FLOP a second of each rank in "float32", "bfloat16", "float8" or "float4", as `memory_read` counts them."""
        rates = tuple(rate for rate in self.ceilings.matrix if rate.dtype == dtype)
        found = self._by_threads(rates, ranks, threads, f"matrix rate in {dtype}")
        shared = ranks if found.threads else 1
        return Figure(found.flop_per_s / shared, self.sources[found.source])

    def launch_us(self, captured: bool) -> Figure:
        """What one small operation costs, eager or as a node of a CUDA graph."""
        for launch in self.ceilings.launch:
            if launch.captured == captured:
                return Figure(launch.us, self.sources[launch.source])
        raise self._unknown(f"launch overhead, {_how(captured)}")

    def all_reduce_us(
        self, size_bytes: int, ranks: int, backend: str, captured: bool, setting: str | None = None
    ) -> Figure:
        """Microseconds of one all-reduce of a message of `size_bytes`, and where that comes from.

        `setting` picks one of several measured configurations (`all_reduce_curves` lists them); without one the first
        that the machine lists answers. Where only the other of eager and captured is known it is an assumption:
        a captured call is taken to cost at most the eager one, an eager one a launch more than the captured.
        Raises MachineError when nothing is known.
        """
        if ranks == 1:
            return Figure(0.0, Source("assumed", "one rank has nothing to exchange"))
        curves = self.all_reduce_curves(backend, ranks, setting)
        exact = [curve for curve in curves if curve.captured == captured]
        if not curves:
            raise self._no_curve(backend, ranks, setting)
        curve = (exact or curves)[0]
        us, source = curve.us(size_bytes), self.sources[curve.source]
        if not exact:
            us += 0.0 if captured else self.launch_us(captured=False).value
            how = "at most the eager cost" if captured else "the captured cost and a launch"
            source = Source("assumed", f"{how}: {source.text}")
        if not curve.covers(size_bytes):
            within = f"{units.show_bytes(curve.from_bytes)} to {units.show_bytes(curve.to_bytes)}"
            source = Source("assumed", f"beyond what was measured, {within}: {source.text}")
        return Figure(us, source)

    def all_reduce_curves(
        self, backend: str | None = None, ranks: int | None = None, setting: str | None = None
    ) -> list[AllReduceCurve]:
        """What is known of the all-reduce, in order of preference."""
        return [
            curve
            for curve in self.ceilings.all_reduce
            if backend in (None, curve.backend)
            and ranks in (None, curve.ranks)
            and setting in (None, curve.setting)
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the fingerprint."""
        return {**asdict(self), "fingerprint": self.fingerprint}

    def _by_threads(self, rates: tuple[_Rate, ...], ranks: int, threads: int | None, what: str) -> _Rate:
        """The entry for a GPU, or for so many CPU threads in all; between two measured counts the lower one."""
        if self.has_gpus and rates:
            return rates[0]
        wanted = ranks * (threads or 1)
        fitting = [rate for rate in rates if rate.threads is not None and rate.threads <= wanted]
        if not fitting:
            raise self._unknown(what)
        return max(fitting, key=lambda rate: rate.threads or 0)

    def _unknown(self, what: str) -> MachineError:
        hint = "measure it with slipstream machine --calibrate, or describe it in a .toml file"
        return MachineError(f"machine {self.name}: no {what} is known; {hint}")

    def _no_curve(self, backend: str, ranks: int, setting: str | None) -> MachineError:
        asked = f"{backend} among {ranks} ranks" + (f" in setting {setting!r}" if setting else "")
        every = self.all_reduce_curves()
        known = sorted({f"{c.backend} x{c.ranks}" + f" ({c.setting})" * bool(setting) for c in every})
        return self._unknown(f"all-reduce of {asked} (known: {', '.join(known) or 'none'})")


def _how(captured: bool) -> str:
    return "captured" if captured else "eager"
