"""Reads the matrix that `nvidia-smi topo -m` prints and, where the text has it too, that of `nvidia-smi topo -p2p rw`.

Their form has changed with the driver: cells are set apart by tabs or spaces, the header may be underlined by escape
codes, NICs have rows and columns of their own ("NIC0" or "mlx5_0"), and any of "CPU Affinity", "NUMA Affinity" and
"GPU NUMA ID" may be missing, as a column or as a cell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.errors import MachineError
from slipstream.machine.machine import Cpu, Device, Link, Machine, NumaNode, PathKind, Source

_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GPU = re.compile(r"GPU\d+")
_AFFINITIES = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_PATHS: Mapping[str, PathKind | None] = {
    "PIX": "PIX",
    "PXB": "PXB",
    "PHB": "PHB",
    "NODE": "NODE",
    "SYS": "SYS",
    "SOC": "SYS",  # what drivers before 2017 wrote
    "N/A": None,
    "ERR": None,
    "?": None,
}
# Refused by the chipset, the GPU, the topology, for another reason, by a setting.
_PEER: Mapping[str, bool | None] = {
    "OK": True,
    "U": None,
    **dict.fromkeys(("CNS", "GNS", "TNS", "NS", "DR"), False),
}


@dataclass(frozen=True)
class _Matrix:
    columns: list[str]
    affinities: list[str]
    rows: dict[str, list[str]]

    @property
    def gpus(self) -> list[str]:
        return [column for column in self.columns if _GPU.fullmatch(column)]

    def cell(self, row: str, column: str) -> str:
        return self.rows[row][self.columns.index(column)]

    def affinity(self, row: str) -> dict[str, str]:
        """By heading; nothing when the row has fewer cells than there are headings, as which is which is not known."""
        cells = self.rows[row][len(self.columns) :]
        return dict(zip(self.affinities, cells, strict=True)) if len(cells) == len(self.affinities) else {}


def parse_topology(text: str, name: str = "topology") -> Machine:
    """The GPUs, their links and NUMA nodes. Raises MachineError when the text has no such matrix or a broken one."""
    matrices = _matrices(_ESCAPE.sub("", text), name)
    links = next((matrix for matrix in matrices if _is_topology(matrix)), None)
    if links is None:
        raise MachineError(
            f"{name}: this is not what nvidia-smi topo -m prints (no header GPU0 GPU1 ... with its rows)"
        )
    peers = next((matrix for matrix in matrices if matrix is not links and _is_peers(matrix)), None)
    if peers and peers.gpus != links.gpus:
        raise MachineError(f"{name}: the two matrices have different GPUs")
    gpus, notes = links.gpus, []
    if gpus != [f"GPU{index}" for index in range(len(gpus))]:
        notes.append(f"numbered here in the order printed: {', '.join(gpus)}")
    nodes = [_node(links.affinity(gpu).get("NUMA Affinity", "")) for gpu in gpus]
    joined = []
    for a, first in enumerate(gpus):
        for b, second in enumerate(gpus[a + 1 :], a + 1):
            there, back = links.cell(first, second), links.cell(second, first)
            if there != back:
                raise MachineError(f"{name}: from {first} to {second} it is {there}, the other way {back}")
            peer = [_PEER[peers.cell(*way)] if peers else None for way in ((first, second), (second, first))]
            joined.append(Link(a, b, *_path(there, name), *peer))
    return Machine(
        name=name,
        about=f"{len(gpus)} GPU{'s' * (len(gpus) > 1)}, from the output of nvidia-smi topo",
        devices=tuple(Device(index, numa_node=node) for index, node in enumerate(nodes)),
        links=tuple(joined),
        cpu=Cpu(numa=_numa(links, nodes)),
        sources={"topology": Source("cited", "nvidia-smi topo")},
        notes=tuple(notes),
    )


def _matrices(text: str, name: str) -> list[_Matrix]:
    found: list[_Matrix] = []
    for line in text.splitlines():
        words = line.split()
        if not words:
            continue
        matrix = found[-1] if found else None
        awaited = matrix is not None and words[0] in matrix.columns and words[0] not in matrix.rows
        if _GPU.fullmatch(words[0]) and not awaited and (len(words) == 1 or not _is_cell(words[1])):
            affinities = [heading for heading in _AFFINITIES if heading in " ".join(words)]
            columns = re.split("|".join(_AFFINITIES), " ".join(words))[0].split()
            found.append(_Matrix(columns, affinities, {}))
        elif matrix is not None and words[0] in matrix.columns:
            _add_row(matrix, words[0], words[1:], name)
    for matrix in found:
        if missing := [gpu for gpu in matrix.gpus if gpu not in matrix.rows]:
            raise MachineError(f"{name}: the row of {missing[0]} is missing")
    return found


def _add_row(matrix: _Matrix, label: str, cells: list[str], name: str) -> None:
    columns = matrix.columns
    if label in matrix.rows:
        raise MachineError(f"{name}: the row {label} is there twice")
    if not len(columns) <= len(cells) <= len(columns) + len(matrix.affinities):
        raise MachineError(f"{name}: the row {label} has {len(cells)} cells for {len(columns)} columns")
    if strange := [cell for cell in cells[: len(columns)] if not _is_cell(cell)]:
        raise MachineError(f"{name}: {strange[0]!r} is no link that is known (NV#, PIX, PXB, PHB, NODE, SYS)")
    if cells[columns.index(label)] != "X":
        raise MachineError(f"{name}: the X of the row {label} is not in its own column")
    matrix.rows[label] = cells


def _is_cell(word: str) -> bool:
    return word == "X" or word in _PATHS or word in _PEER or re.fullmatch(r"NV\d+", word) is not None


def _is_topology(matrix: _Matrix) -> bool:
    cells = [matrix.cell(a, b) for a in matrix.gpus for b in matrix.gpus if a != b]
    return bool(matrix.affinities) or (bool(cells) and not all(cell in _PEER for cell in cells))


def _is_peers(matrix: _Matrix) -> bool:
    return all(matrix.cell(a, b) in _PEER for a in matrix.gpus for b in matrix.gpus if a != b)


def _path(cell: str, name: str) -> tuple[PathKind | None, int]:
    if found := re.fullmatch(r"NV(\d+)", cell):
        return "NVL", int(found[1])
    if cell not in _PATHS:
        raise MachineError(f"{name}: {cell!r} is no link that is known (NV#, PIX, PXB, PHB, NODE, SYS)")
    return _PATHS[cell], 0


def _node(affinity: str) -> int | None:
    return int(affinity) if affinity.isdecimal() else None  # "N/A", and "0-1" where it is near to several


def _numa(matrix: _Matrix, nodes: list[int | None]) -> tuple[NumaNode, ...]:
    cpus = {
        node: matrix.affinity(gpu).get("CPU Affinity", "")
        for node, gpu in zip(nodes, matrix.gpus, strict=True)
        if node is not None
    }
    return tuple(NumaNode(node, cpus[node]) for node in sorted(cpus))
