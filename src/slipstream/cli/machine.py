"""`slipstream machine`: what box this is, how its GPUs are joined, and what that means for an all-reduce."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.errors import MachineError, RequestError

if TYPE_CHECKING:
    from slipstream.machine.machine import Machine


def machine(
    name: Annotated[
        str | None, typer.Argument(help="A described machine, or a .toml file; without one, this machine.")
    ] = None,
    topology: Annotated[
        Path | None, typer.Option(help="A file with what `nvidia-smi topo -m` printed (and `topo -p2p rw`).")
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Measure this machine for a minute or two, and keep the figures."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show a machine: its GPUs, links, NUMA nodes and what is known of its speed."""
    from slipstream.machine.machine import Machine
    from slipstream.machine.meaning import meaning

    if name is not None and topology is not None:
        raise RequestError("give the name of a machine or --topology, not both")
    if calibrate and (name is not None or topology is not None):
        raise RequestError("--calibrate measures the machine it runs on: give no name and no --topology")
    if calibrate:
        found = _calibrate()
    elif topology is not None:
        found = Machine.from_topology(_read(topology), topology.stem)
    else:
        found = Machine.here() if name is None else Machine.load(name)
    sentences = meaning(found)
    if as_json:
        print(json.dumps({**found.to_json(), "meaning": sentences}, ensure_ascii=False))
    else:
        _print(found, sentences)


def _calibrate() -> Machine:
    from slipstream.cli.console import progress_bar, say
    from slipstream.lab.calibrate import calibrate
    from slipstream.lab.calibrate_all_reduce import measure_all_reduces
    from slipstream.machine import cache
    from slipstream.machine.probe import probe_hardware

    hardware = probe_hardware()
    with progress_bar() as progress:
        all_reduces = measure_all_reduces(hardware, progress)
    with progress_bar() as progress:
        found = calibrate(hardware, all_reduces, progress)
    replaces = cache.path_for(found).exists()
    say(f"{'replaced' if replaces else 'wrote'} {cache.save(found)}")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise MachineError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise MachineError(f"{path} is not text: give what nvidia-smi topo -m printed") from None


def _print(it: Machine, sentences: list[str]) -> None:
    from slipstream.cli.console import print_numbers, stdout

    console = stdout()
    console.print(f"{it.name}: {it.about}" if it.about else it.name, style="bold", markup=False)
    about = _about(it)
    width = max((len(what) for what, _ in about), default=0)
    for what, facts in about:
        console.print(f"{what:{width}}  {facts}", markup=False)
    console.print()
    if len(it.devices) > 1:
        labels = [str(device.index) for device in it.devices]
        nodes = ["?" if device.numa_node is None else str(device.numa_node) for device in it.devices]
        rows = [
            (f"GPU{a}", nodes[a], *("-" if a == b else _cell(it, a, b) for b in range(len(labels))))
            for a in range(len(labels))
        ]
        print_numbers("Links", ("", "NUMA", *labels), rows)
        _print_legend(it)
    if speeds := _speeds(it):
        print_numbers("Speed", ("", "", "from"), speeds)
    if reduces := _all_reduces(it):
        sizes = ("4 KiB", "64 KiB", "1 MiB")
        print_numbers("All-reduce (microseconds)", ("backend, ranks", *sizes, "setting", "from"), reduces)
    used = {source for *_, source in (*speeds, *reduces)}
    for key, source in it.sources.items():
        if key in used:
            console.print(f"{key} ({source.kind}): {source.text}", markup=False)
    if used:
        console.print()
    for sentence in sentences:
        console.print(sentence, markup=False, style="bold" if console.is_terminal else None)
    for note in it.notes:
        console.print(f"note: {note}", markup=False)


def _about(it: Machine) -> list[tuple[str, str]]:
    from slipstream.machine.meaning import ranges
    from slipstream.machine.units import show_bytes

    rows = []
    kinds: dict[tuple[str, str], list[int]] = {}
    for device in it.devices:
        facts = [device.name]
        if device.memory_bytes:
            facts.append(show_bytes(device.memory_bytes))
        if device.compute_capability:
            facts.append("compute capability " + ".".join(map(str, device.compute_capability)))
        if device.pcie_generation:
            facts.append(f"PCIe Gen{device.pcie_generation} x{device.pcie_width or '?'}")
        kinds.setdefault(("GPU", ", ".join(facts)), []).append(device.index)
    rows += [(f"{kind} {ranges(indices)}", facts) for (kind, facts), indices in kinds.items()]
    cpu = it.cpu
    if cpu.threads or cpu.sockets:
        counts = ((cpu.sockets, "socket"), (cpu.cores, "core"), (cpu.threads, "thread"))
        rows.append(
            ("CPU", ", ".join([cpu.name, *(f"{n} {what}{'s' * (n > 1)}" for n, what in counts if n)]))
        )
    if cpu.caches_bytes:
        rows.append(
            ("caches", ", ".join(f"{name} {show_bytes(size)}" for name, size in cpu.caches_bytes.items()))
        )
    if cpu.memory_bytes:
        rows.append(("memory", show_bytes(cpu.memory_bytes)))
    for node in cpu.numa:
        memory = f", {show_bytes(node.memory_bytes)}" if node.memory_bytes else ""
        rows.append((f"NUMA node {node.index}", f"CPUs {node.cpus or '?'}{memory}"))
    versions = vars(it.versions)
    rows.append(("versions", ", ".join(f"{what} {version}" for what, version in versions.items() if version)))
    return [row for row in rows if row[1]]


def _ways(it: Machine) -> set[bool | None]:
    return {way for link in it.links for way in (link.peer_a_to_b, link.peer_b_to_a)}


def _cell(it: Machine, a: int, b: int) -> str:
    """The path, marked where some pairs differ in whether they reach each other's memory."""
    link = it.link(a, b)
    if link is None:
        return "?"
    reaches = link.peer_a_to_b if a < b else link.peer_b_to_a
    return link.label + (_MARKS[reaches] if len(_ways(it)) > 1 else "")


_MARKS = {True: "", None: "?", False: "!"}


def _print_legend(it: Machine) -> None:
    from slipstream.cli.console import stdout
    from slipstream.machine.machine import PATH_MEANS

    seen, ways = {link.path for link in it.links}, _ways(it)
    said = [f"{'NV#' if path == 'NVL' else path} {what}" for path, what in PATH_MEANS.items() if path in seen]
    if len(ways) > 1 and False in ways:
        said.append("! the row's GPU does not reach the column's memory")
    if len(ways) > 1 and None in ways:
        said.append("? it is not known whether it does")
    stdout().print("; ".join(said) + "\n", markup=False)


def _speeds(it: Machine) -> list[tuple[str, str, str]]:
    def threads(count: int | None) -> str:
        return f", {count} thread{'s' * (count > 1)}" if count else ""

    every = it.ceilings
    found = [
        (f"memory read{threads(rate.threads)}", f"{rate.bytes_per_s / 1e9:,.1f} GB/s", rate.source)
        for rate in every.memory_read
    ]
    found += [
        (
            f"{rate.dtype} products{threads(rate.threads)}",
            f"{rate.flop_per_s / 1e9:,.0f} GFLOP/s",
            rate.source,
        )
        for rate in every.matrix
    ]
    return found + [
        (f"a small operation, {'captured' if each.captured else 'eager'}", f"{each.us:.2f} us", each.source)
        for each in every.launch
    ]


def _all_reduces(it: Machine) -> list[tuple[str, ...]]:
    found = []
    for curve in it.ceilings.all_reduce:
        how = "captured" if curve.captured else "eager"
        times = [f"{curve.us(size):,.1f}" if curve.covers(size) else "" for size in (4096, 65536, 1048576)]
        found.append((f"{curve.backend} x{curve.ranks}, {how}", *times, curve.setting, curve.source))
    return found
