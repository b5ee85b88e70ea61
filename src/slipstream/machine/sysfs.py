"""What Linux says of the processors, their caches, the memory and the NUMA nodes (/proc and /sys)."""

from __future__ import annotations

import platform
import re
from pathlib import Path

from slipstream.machine.machine import Cpu, NumaNode


def read_cpu(root: Path = Path("/")) -> Cpu:
    """What is readable; the rest is unknown."""
    system = root / "sys/devices/system"
    cpus = sorted((system / "cpu").glob("cpu[0-9]*"), key=_number)
    cores = {(_text(cpu / "topology/physical_package_id"), _text(cpu / "topology/core_id")) for cpu in cpus}
    known = {(package, core) for package, core in cores if package and core}
    return Cpu(
        name=_model(root),
        sockets=len({package for package, _ in known}) or None,
        cores=len(known) or None,
        threads=len(cpus) or None,
        memory_bytes=_memory(_text(root / "proc/meminfo")),
        caches_bytes=_caches(cpus[0] / "cache") if cpus else {},
        numa=tuple(
            NumaNode(_number(node), _text(node / "cpulist"), _memory(_text(node / "meminfo")))
            for node in sorted((system / "node").glob("node[0-9]*"), key=_number)
        ),
    )


def pci_numa_node(bus_id: str, root: Path = Path("/")) -> int | None:
    """The NUMA node of a PCI device ("00000000:01:00.0" or "0000:01:00.0"); None where Linux knows of none (-1)."""
    domain, _, rest = bus_id.lower().partition(":")
    node = _text(root / "sys/bus/pci/devices" / f"{int(domain, 16):04x}:{rest}" / "numa_node")
    return int(node) if node.isdecimal() else None


def _caches(folder: Path) -> dict[str, int]:
    found = {}
    for index in sorted(folder.glob("index*")):
        kind = {"Data": "d", "Instruction": "i"}.get(_text(index / "type"), "")
        size = re.fullmatch(r"(\d+)K", _text(index / "size"))
        if size and kind != "i":
            found[f"L{_text(index / 'level')}{kind}"] = int(size[1]) * 1024
    return found


def _model(root: Path) -> str:
    found = re.search(r"^model name\s*:\s*(\S.*)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine() or "unknown"


def _memory(meminfo: str) -> int | None:
    found = re.search(r"MemTotal:\s*(\d+) kB", meminfo)
    return int(found[1]) * 1024 if found else None


def _number(path: Path) -> int:
    return int(re.sub(r"\D", "", path.name))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
