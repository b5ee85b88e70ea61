"""What a machine's wiring means for an all-reduce among all its ranks, in sentences."""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.machine.machine import PATH_MEANS, Machine

_DIRECT = ("NVL", "PIX", "PXB")
"""Paths over which NCCL 2.30 has GPUs reach each other unless told otherwise (NCCL_P2P_LEVEL's default, PXB)."""


def meaning(machine: Machine) -> list[str]:
    """One to four sentences: which ranks cross between NUMA nodes, which do not reach each other, what follows."""
    if not machine.has_gpus:
        return _on_cpus(machine)
    if len(machine.devices) == 1:
        return ["One GPU: there is nothing to reduce."]
    return [sentence for part in (_nodes, _nccl, _peers) for sentence in part(machine)]


def _on_cpus(machine: Machine) -> list[str]:
    cores, nodes = machine.cpu.cores, machine.cpu.numa
    count = f"{cores} cores" if cores else "the cores"
    found = [
        f"No GPU: tensor-parallel ranks are processes on {count}; they share the memory and its bandwidth."
    ]
    if len(nodes) > 1:
        found.append(
            f"The cores are on {len(nodes)} NUMA nodes: bind each rank to one, or its weights are read across them."
        )
    return found


def _nodes(machine: Machine) -> list[str]:
    known = [device.numa_node for device in machine.devices if device.numa_node is not None]
    if len(known) < len(machine.devices):
        return ["Which NUMA node each GPU is on is not known."]
    islands = machine.islands
    if len(islands) == 1:
        return [f"All GPUs are on NUMA node {known[0]}: no rank crosses between nodes."]
    if all(link.path == "NVL" for link in machine.links):
        return [
            f"The GPUs are on {len(islands)} NUMA nodes, but NVLink joins all pairs: no all-reduce crosses them."
        ]
    here = {device: number for number, island in enumerate(islands) for device in island}
    crossing = sum(here[link.a] != here[link.b] for link in machine.links)
    groups = " and ".join(f"GPUs {ranges(island)}" for island in islands)
    return [
        f"{groups} are on different NUMA nodes: {crossing} of {len(machine.links)} pairs cross between them, and a "
        f"ring of all ranks does so {len(islands)} times; summed within each node first, then between them "
        "(hierarchical), each part crosses once."
    ]


def _nccl(machine: Machine) -> list[str]:
    far = [link for link in machine.links if link.path is not None and link.path not in _DIRECT]
    if not far:
        return []
    all_of = "all pairs" if len(far) == len(machine.links) else f"{len(far)} of {len(machine.links)} pairs"
    through = sorted({PATH_MEANS[link.path] for link in far if link.path})
    return [
        f"On {all_of} the path goes over {' or '.join(through)}: there NCCL copies through host memory by default "
        f"(NCCL_P2P_LEVEL is PXB{', on AMD with two GPUs SYS' if len(machine.devices) == 2 else ''})."
    ]


def _peers(machine: Machine) -> list[str]:
    refused = [link for link in machine.links if link.peer is False]
    unknown = [link for link in machine.links if link.peer is None]
    if refused:
        pairs = ", ".join(f"{link.a}-{link.b}" for link in refused[:6]) + (
            ", ..." if len(refused) > 6 else ""
        )
        which = "No pair has" if len(refused) == len(machine.links) else f"Pairs {pairs} have no"
        return [
            f"{which} peer access: one-shot and two-shot kernels cannot run among all ranks; hostmem (through pinned "
            "host memory) and NCCL can."
        ]
    if unknown:
        return [
            "Whether the GPUs reach each other's memory is not known (nvidia-smi topo -p2p rw says it): one-shot "
            "kernels need it, hostmem and NCCL do not."
        ]
    return ["All pairs have peer access both ways: one-shot and two-shot kernels can run."]


def ranges(numbers: Iterable[int]) -> str:
    """0-3, 6."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)
