"""This machine: sysfs as Linux writes it, and an NVML that answers as drivers do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.machine.machine import Machine
from slipstream.machine.nvml import NoGpus, read_gpus
from slipstream.machine.sysfs import pci_numa_node, read_cpu


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n", encoding="utf-8")
    return root


def test_two_sockets(tmp_path: Path) -> None:
    """Four cores of two threads, on two sockets and two nodes."""
    system = "sys/devices/system"
    files = {
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: A CPU 9000\n",
        "proc/meminfo": "MemTotal:  1000 kB\nMemFree: 1 kB",
    }
    for cpu in range(8):
        files[f"{system}/cpu/cpu{cpu}/topology/physical_package_id"] = str(cpu % 4 // 2)
        files[f"{system}/cpu/cpu{cpu}/topology/core_id"] = str(cpu % 2)  # numbered anew on each socket
    for index, (level, kind, size) in enumerate(
        ((1, "Data", "48K"), (1, "Instruction", "32K"), (3, "Unified", "2048K"))
    ):
        for what, value in (("level", str(level)), ("type", kind), ("size", size)):
            files[f"{system}/cpu/cpu0/cache/index{index}/{what}"] = value
    for node, cpus in enumerate(("0-1,4-5", "2-3,6-7")):
        files[f"{system}/node/node{node}/cpulist"] = cpus
        files[f"{system}/node/node{node}/meminfo"] = f"Node {node} MemTotal:       500 kB"
    cpu = read_cpu(write(tmp_path, files))
    assert (cpu.name, cpu.sockets, cpu.cores, cpu.threads) == ("A CPU 9000", 2, 4, 8)
    assert cpu.memory_bytes == 1_024_000
    assert cpu.caches_bytes == {"L1d": 48 * 1024, "L3": 2048 * 1024}
    assert [(node.index, node.cpus, node.memory_bytes) for node in cpu.numa] == [
        (0, "0-1,4-5", 512_000),
        (1, "2-3,6-7", 512_000),
    ]


def test_nothing_readable(tmp_path: Path) -> None:
    cpu = read_cpu(tmp_path)
    assert (cpu.sockets, cpu.cores, cpu.threads, cpu.memory_bytes, cpu.numa) == (None, None, None, None, ())
    assert pci_numa_node("00000000:01:00.0", tmp_path) is None


class FakeNvml:
    """NVML of a box with so many cards; `paths` and `peers` by pair, `nvlinks` the links of each card."""

    class NVMLError(Exception):
        pass

    NVML_FEATURE_ENABLED = 1
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2
    NVML_P2P_STATUS_OK, NVML_P2P_STATUS_GPU_NOT_SUPPORTED, NVML_P2P_STATUS_UNKNOWN = 0, 2, 6
    NVML_P2P_CAPS_INDEX_READ, NVML_P2P_CAPS_INDEX_WRITE, NVML_P2P_CAPS_INDEX_NVLINK = 0, 1, 2
    NVML_TOPOLOGY_INTERNAL, NVML_TOPOLOGY_SINGLE, NVML_TOPOLOGY_MULTIPLE = 0, 10, 20
    NVML_TOPOLOGY_HOSTBRIDGE, NVML_TOPOLOGY_NODE, NVML_TOPOLOGY_SYSTEM = 30, 40, 50

    def __init__(
        self, levels: dict[Any, int], peers: dict[Any, int], nvlinks: list[list[str]], switched: bool
    ) -> None:
        self.levels, self.peers, self.nvlinks, self.switched = levels, peers, nvlinks, switched
        self.is_open = False

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return len(self.nvlinks)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"575.57.08"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA X"

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{handle + 1:02X}:00.0".encode())

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=2**30)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return (12, 0)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetTopologyCommonAncestor(self, a: int, b: int) -> int:
        return self.levels[a, b]

    def nvmlDeviceGetP2PStatus(self, a: int, b: int, caps: int) -> int:
        if caps == self.NVML_P2P_CAPS_INDEX_NVLINK:
            return 0 if self.switched else 2
        return self.peers.get((a, b, caps), self.peers.get((a, b), 0))

    def nvmlDeviceGetNvLinkState(self, handle: int, number: int) -> int:
        if number >= len(self.nvlinks[handle]):
            raise self.NVMLError("Invalid Argument")
        return 1

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, number: int) -> Any:
        return SimpleNamespace(busId=self.nvlinks[handle][number].encode())

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, number: int) -> int:
        return 2 if self.switched else 0


def test_cards_on_pcie(tmp_path: Path) -> None:
    root = write(
        tmp_path, {f"sys/bus/pci/devices/0000:0{i + 1}:00.0/numa_node": n for i, n in enumerate("01")}
    )
    write(tmp_path, {"sys/bus/pci/devices/0000:03:00.0/numa_node": "-1"})
    nvml = FakeNvml(
        levels={(0, 1): 50, (0, 2): 10, (1, 2): 99},
        peers={(0, 1): 0, (1, 0): 2, (0, 2, 0): 0, (0, 2, 1): 2, (1, 2): 6},
        nvlinks=[[], [], []],
        switched=False,
    )
    devices, links, driver = read_gpus(nvml, root)
    assert driver == "575.57.08"
    assert not nvml.is_open
    assert [device.numa_node for device in devices] == [0, 1, None]
    assert (devices[0].compute_capability, devices[0].pcie_generation, devices[0].pcie_width) == (
        (12, 0),
        5,
        None,
    )
    assert devices[1].bus_id == "00000000:02:00.0"
    assert [link.label for link in links] == ["SYS", "PIX", "?"]
    assert [(link.peer_a_to_b, link.peer_b_to_a) for link in links] == [
        (True, False),
        (False, True),
        (None, True),
    ]


@pytest.mark.parametrize("switched", [True, False])
def test_nvlink(switched: bool) -> None:
    """Through a switch every link leads to every card; without one, those that lead to the other card count."""
    remote = (
        [["00000000:0A:00.0"] * 4] * 3
        if switched
        else [["00000000:02:00.0"] * 2, ["00000000:01:00.0"] * 2, []]
    )
    nvml = FakeNvml({(0, 1): 50, (0, 2): 50, (1, 2): 50}, {}, remote, switched)
    links = read_gpus(nvml)[1]
    assert [link.label for link in links] == (["NV4"] * 3 if switched else ["NV2", "SYS", "SYS"])


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml({}, {}, [], False)
    monkeypatch.setattr(nvml, "nvmlInit", lambda: (_ for _ in ()).throw(nvml.NVMLError("Driver Not Loaded")))
    with pytest.raises(NoGpus, match="no GPU: Driver Not Loaded"):
        read_gpus(nvml)


def test_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever this machine is: its own CPU, and a note that nothing was measured yet."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    machine = Machine.here()
    assert (machine.cpu.threads or 0) >= 1
    assert machine.versions.torch
    assert any("--calibrate" in note for note in machine.notes)
    assert machine.fingerprint == Machine.here().fingerprint
