"""`nvidia-smi topo -m` in the forms that drivers of different years print."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import MachineError
from slipstream.machine.machine import Machine
from slipstream.machine.meaning import meaning
from tests.machine.shared import shared

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""
NICS = """
        GPU0    GPU1    GPU2    GPU3    NIC0    NIC1    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      NV18    NV18    NV18    PIX     SYS     0-55,112-167    0               N/A
GPU1    NV18     X      NV18    NV18    NODE    SYS     0-55,112-167    0               N/A
GPU2    NV18    NV18     X      NV18    SYS     PIX     56-111,168-223  1               N/A
GPU3    NV18    NV18    NV18     X      SYS     NODE    56-111,168-223  1               N/A
NIC0    PIX     NODE    SYS     SYS      X      SYS
NIC1    SYS     SYS     PIX     NODE    SYS      X
"""
OLD = """
        GPU0    GPU1    GPU2    GPU3    mlx5_0  CPU Affinity
GPU0     X      PIX     SOC     SOC     PHB     0-9,20-29
GPU1    PIX      X      SOC     SOC     PHB     0-9,20-29
GPU2    SOC     SOC      X      PXB     SOC     10-19,30-39
GPU3    SOC     SOC     PXB      X      SOC     10-19,30-39
mlx5_0  PHB     PHB     SOC     SOC      X
"""
NO_NUMA = (
    "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV2\t0-23\t\tN/A\nGPU1\tNV2\t X \t0-23\t\tN/A\n"
)
ESCAPE_FIRST = (
    "\x1b[4m\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\r\n"
    "GPU0\t X \tPIX\tSYS\t0-23,48-71\t0\t\tN/A\r\n"
    "GPU1\tPIX\t X \tSYS\t0-23,48-71\t0\t\tN/A\r\n"
    "GPU2\tSYS\tSYS\t X \t24-47,72-95\t1\t\tN/A\r\n"
)
ONE_GPU = (
    "\tGPU0\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    "GPU0\t X \tPHB\t0-251\t\tN/A\t\tN/A\nNIC0\tPHB\t X \n"
)
MIG = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-f07ea2df-1b6f-9a02-b534-5090abf3c174)
        GPU0    GPU1    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      N/A     0,2,4,6,8,10    0               N/A
GPU1    N/A      X      1,3,5,7,9,11    1               N/A
"""
GRACE = """
        GPU0    GPU1    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      NV18    0-71    0,2-17          4
GPU1    NV18     X      72-143  1,18-33         12
"""
PEERS = """
        GPU0    GPU1    GPU2    CPU Affinity    NUMA Affinity
GPU0     X      PHB     SYS     0-15            0
GPU1    PHB      X      SYS     0-15            0
GPU2    SYS     SYS      X      16-31           1

 \tGPU0\tGPU1\tGPU2\t
 GPU0\tX\tOK\tGNS\t
 GPU1\tOK\tX\tU\t
 GPU2\tCNS\tOK\tX\t

Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
"""


def read(text: str) -> Machine:
    return Machine.from_topology(text, "box")


def drawn(machine: Machine) -> str:
    """The upper triangle, row by row."""
    return " ".join(link.label for link in machine.links)


@pytest.mark.parametrize("legend", ["", LEGEND])
@pytest.mark.parametrize(
    ("text", "links", "nodes"),
    [
        (NICS, "NV18 NV18 NV18 NV18 NV18 NV18", [0, 0, 1, 1]),
        (OLD, "PIX SYS SYS SYS SYS PXB", [None] * 4),
        (NO_NUMA, "NV2", [None, None]),
        (ESCAPE_FIRST, "PIX SYS SYS", [0, 0, 1]),
        (ONE_GPU, "", [None]),
        (MIG, "?", [0, 1]),
        (GRACE, "NV18", [None, None]),
        (PEERS, "PHB SYS SYS", [0, 0, 1]),
    ],
)
def test_forms(text: str, links: str, nodes: list[int | None], legend: str) -> None:
    machine = read(text + legend)
    assert drawn(machine) == links
    assert [device.numa_node for device in machine.devices] == nodes


def test_the_real_one() -> None:
    """16 cards: underlined header, tabs, an empty cell before the last column."""
    text = shared("data/topology/nvidia_smi_topo_16x_rtx_pro_6000.txt").read_text(encoding="utf-8")
    assert "\x1b[4m" in text
    machine = read(text)
    assert len(machine.devices) == 16
    assert [machine.link(0, b).path for b in (1, 2, 15)] == ["PIX", "NODE", "NODE"]  # type: ignore[union-attr]
    assert sum(link.path == "PIX" for link in machine.links) == 8
    assert machine.islands == [list(range(16))]
    assert [(node.index, node.cpus) for node in machine.cpu.numa] == [(0, "0-127")]


def test_peer_access_both_ways() -> None:
    machine = read(PEERS)
    ways = [(link.peer_a_to_b, link.peer_b_to_a, link.peer) for link in machine.links]
    assert ways == [(True, True, True), (False, False, False), (None, True, None)]
    assert "Pairs 0-2 have no peer access" in " ".join(meaning(machine))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not what nvidia-smi topo -m prints"),
        ("root:x:0:0:root:/root:/bin/bash\n", "not what nvidia-smi topo -m prints"),
        (LEGEND, "not what nvidia-smi topo -m prints"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "not what"),
        (PEERS.split("\n\n")[1], "not what nvidia-smi topo -m prints"),
        (NICS.replace("GPU3    NV18", "GPU7    NV18"), "row of GPU3 is missing"),
        (NICS.replace("GPU3    NV18", "GPU2    NV18"), "row GPU2 is there twice"),
        (NICS.replace("PIX     SYS     0-55", "PIXSYS 0-55"), "'PIXSYS' is no link"),
        (NICS.replace("NODE    SYS     0-55,112-167    0", ""), "the row GPU1 has 5 cells for 6 columns"),
        (
            NICS.replace("GPU1    NV18     X      NV18", "GPU1    NV18    NV18     X  "),
            "X of the row GPU1 is not in its own column",
        ),
        (NICS.replace("GPU1    NV18", "GPU1    NV4 "), "from GPU0 to GPU1 it is NV18, the other way NV4"),
        (MIG.replace("N/A     0,2", "FAR     0,2").replace("GPU1    N/A", "GPU1    FAR"), "'FAR' is no link"),
        (PEERS.replace("\tGPU2\t", "\tGPU3\t").replace(" GPU2\tCNS", " GPU3\tCNS"), "different GPUs"),
        (NICS.replace("     X      ", "    ---     "), "'---' is no link"),
    ],
)
def test_what_is_not_one(text: str, why: str) -> None:
    with pytest.raises(MachineError, match=why) as error:
        read(text)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("box: ")


PATHS = st.sampled_from(["NV1", "NV12", "PIX", "PXB", "PHB", "NODE", "SYS"])


@given(st.data(), st.integers(1, 6), st.integers(0, 2), st.booleans(), st.booleans(), st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_any_matrix_in_any_form(
    data: st.DataObject, gpus: int, nics: int, tabs: bool, escapes: bool, headings: int
) -> None:
    """What is printed comes back, whatever separates the cells and whichever columns there are."""
    labels = [f"GPU{i}" for i in range(gpus)] + [f"mlx5_{i}" for i in range(nics)]
    cells = {(a, b): data.draw(PATHS) for i, a in enumerate(labels) for b in labels[i + 1 :]}
    cells |= {(b, a): cell for (a, b), cell in cells.items()} | {(a, a): "X" for a in labels}
    nodes = [data.draw(st.integers(0, 3)) for _ in range(gpus)]
    gap = "\t" if tabs else "   "
    heads = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")[:headings]
    lines = [gap + gap.join([*labels, *heads])]
    for number, label in enumerate(labels):
        affinity = (
            [f"{4 * number}-{4 * number + 3}", str(nodes[number]), "N/A"][:headings] if number < gpus else []
        )
        lines.append(gap.join([label, *(cells[label, other] for other in labels), *affinity]))
    if escapes:
        lines[0] = f"\x1b[4m{lines[0]}\x1b[0m"
    machine = read("\n".join([*lines, LEGEND]))
    assert drawn(machine) == " ".join(
        cells[f"GPU{a}", f"GPU{b}"] for a in range(gpus) for b in range(a + 1, gpus)
    )
    assert [d.numa_node for d in machine.devices] == (nodes if headings >= 2 else [None] * gpus)


@given(
    st.text(max_size=300)
    | st.lists(st.sampled_from(["GPU0", "GPU1", "X", "SYS", "\n", "\t", "NV4"])).map(" ".join)
)
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    refused = ""
    try:
        read(text)
    except MachineError as error:
        refused = str(error)
    assert "\n" not in refused
