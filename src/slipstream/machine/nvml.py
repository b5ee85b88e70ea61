"""GPUs and their links from the driver, through NVML (the package nvidia-ml-py, imported as pynvml)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from slipstream.machine.machine import Device, Link, PathKind
from slipstream.machine.sysfs import pci_numa_node

_LEVELS: dict[str, PathKind] = {
    "NVML_TOPOLOGY_INTERNAL": "PIX",  # two GPUs of one board
    "NVML_TOPOLOGY_SINGLE": "PIX",
    "NVML_TOPOLOGY_MULTIPLE": "PXB",
    "NVML_TOPOLOGY_HOSTBRIDGE": "PHB",
    "NVML_TOPOLOGY_NODE": "NODE",
    "NVML_TOPOLOGY_SYSTEM": "SYS",
}
_MAX_NVLINKS = 18


class NoGpus(Exception):
    """There is no driver to ask, or no library to ask it with; the message says which."""


def read_gpus(nvml: Any = None, root: Path = Path("/")) -> tuple[tuple[Device, ...], tuple[Link, ...], str]:
    """The devices, the links between them, and the driver's version. Raises NoGpus."""
    nvml = nvml or _library()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NoGpus(f"no GPU: {error}") from None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        devices = tuple(_device(nvml, index, handle, root) for index, handle in enumerate(handles))
        links = tuple(
            _link(nvml, (a, handles[a]), (b, handles[b]), devices[b].bus_id)
            for a, b in itertools.combinations(range(len(handles)), 2)
        )
        return devices, links, _word(nvml.nvmlSystemGetDriverVersion())
    finally:
        nvml.nvmlShutdown()


def _library() -> Any:
    try:
        import pynvml
    except ImportError:
        raise NoGpus("GPUs are not looked for: pip install nvidia-ml-py (or slipstream[gpu])") from None
    return pynvml


def _device(nvml: Any, index: int, handle: Any, root: Path) -> Device:
    bus_id = _word(nvml.nvmlDeviceGetPciInfo(handle).busId)
    capability = _ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    return Device(
        index=index,
        name=_word(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=memory.total if memory else None,
        compute_capability=tuple(capability) if capability else None,
        numa_node=pci_numa_node(bus_id, root),
        pcie_generation=_ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_width=_ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        bus_id=bus_id,
    )


def _link(nvml: Any, first: tuple[int, Any], second: tuple[int, Any], second_bus_id: str | None) -> Link:
    (a, one), (b, other) = first, second
    level = _ask(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, one, other)
    paths = {getattr(nvml, name): path for name, path in _LEVELS.items()}
    nvlinks = _nvlinks(nvml, one, other, second_bus_id)
    peers = [_peer(nvml, *way) for way in ((one, other), (other, one))]
    return Link(a, b, "NVL" if nvlinks else paths.get(level), nvlinks, *peers)


def _nvlinks(nvml: Any, one: Any, other: Any, other_bus_id: str | None) -> int:
    """Links that lead from one device to the other: directly, or all that are up where an NVSwitch joins both."""
    direct = switched = 0
    for number in range(_MAX_NVLINKS):
        if _ask(nvml, nvml.nvmlDeviceGetNvLinkState, one, number) != nvml.NVML_FEATURE_ENABLED:
            continue
        remote = _ask(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, one, number)
        if remote is not None and _word(remote.busId) == other_bus_id:
            direct += 1
        elif (
            _ask(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, one, number)
            == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
        ):
            switched += 1
    joined = _ask(nvml, nvml.nvmlDeviceGetP2PStatus, one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    return direct or (switched if joined == nvml.NVML_P2P_STATUS_OK else 0)


def _peer(nvml: Any, one: Any, other: Any) -> bool | None:
    """Whether `one` can both read and write the other's memory."""
    asked = (nvml.NVML_P2P_CAPS_INDEX_READ, nvml.NVML_P2P_CAPS_INDEX_WRITE)
    found = [_ask(nvml, nvml.nvmlDeviceGetP2PStatus, one, other, caps) for caps in asked]
    if any(status is None or status == nvml.NVML_P2P_STATUS_UNKNOWN for status in found):
        return None
    return all(status == nvml.NVML_P2P_STATUS_OK for status in found)


def _ask(nvml: Any, function: Any, *arguments: Any) -> Any:
    """None where this card or driver does not answer."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _word(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
