"""What an optimisation says about itself, and what several of them ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from slipstream.lab.case import Case

Answer = Literal["yes", "no", "untested"]
Effort = Literal["flag", "setting", "patch", "project"]
EFFORTS: Mapping[Effort, tuple[float, str]] = {
    "flag": (1, "a flag or a variable, and a restart"),
    "setting": (1.5, "a setting of the machine or the engine, with some searching"),
    "patch": (3, "a change of the engine's source, or a build of another library"),
    "project": (8, "days to weeks of work"),
}
"""What an effort weighs in the ranking, and what it means."""

Engine = Literal["slipstream", "sglang", "vllm"]


@dataclass(frozen=True)
class Feasible:
    """Whether it can work in a case, and how that is known."""

    answer: Answer
    because: str

    @property
    def possible(self) -> bool:
        """Whether it is worth a prediction."""
        return self.answer != "no"


@dataclass(frozen=True)
class Optimisation:
    """One thing that may make a cycle cheaper, or worth more."""

    name: str
    title: str
    effort: Effort
    gain: str
    """Where the time would be saved."""
    feasible: Callable[[Case], Feasible]
    change: Callable[[Case], Case]
    """The case with it applied; asked only where it is possible."""
    how: Mapping[Engine, str]
    """The exact flags, variables or calls, with the versions they are known of; an engine without them is left out."""
    risks: tuple[str, ...]
    measure: str
    """How to see whether it worked."""
    sources: tuple[str, ...] = ()
    here: Mapping[str, object] | None = None
    """The settings of `slipstream.Engine` that apply it, where there are any."""
    changes_text: bool = False
    """It may change what the model writes."""
    needs_first: str = ""
    """What must be known or done before."""


YES = Feasible("yes", "nothing stands against it here")


def first(*answers: Feasible | None) -> Feasible:
    """The first answer that there is."""
    return next(answer for answer in answers if answer is not None)


def one_rank(case: Case) -> Feasible | None:
    """No, where nothing is communicated."""
    return None if case.fast.tp > 1 else Feasible("no", "one rank has nothing to communicate")


def cpu_only(case: Case) -> Feasible | None:
    """No, where ranks are processes on a CPU."""
    return None if case.machine.has_gpus else Feasible("no", "there is no GPU here")


def gpus(case: Case) -> Feasible | None:
    """No, where ranks are GPUs."""
    return Feasible("no", "it is for ranks on a CPU") if case.machine.has_gpus else None


def not_nccl(case: Case) -> Feasible | None:
    """No, where NCCL carries no all-reduce."""
    return (
        None
        if case.fast.backend == "nccl"
        else Feasible("no", f"{case.fast.backend} carries the all-reduces")
    )


def all_nvlink(case: Case) -> bool:
    """Whether every pair of the ranks' GPUs is joined by NVLink."""
    return _every_link(case, lambda path, peer: path == "NVL")


def no_peer(case: Case) -> Feasible | None:
    """No, where a GPU is known not to reach another's memory."""
    refused = [link for link in case.machine.links if link.b < case.fast.tp and link.peer is False]
    if not refused:
        return None
    return Feasible(
        "no", f"GPU {refused[0].a} cannot reach the memory of GPU {refused[0].b}, nor some others"
    )


def peer_unknown(case: Case) -> Feasible | None:
    """Untested, where nobody asked the driver yet."""
    if _every_link(case, lambda path, peer: peer is True):
        return None
    return Feasible(
        "untested",
        "whether the GPUs reach each other's memory is not known; slipstream machine on that box says it "
        "(cudaDeviceCanAccessPeer, both ways)",
    )


def pcie_bytes_per_s(case: Case) -> float:
    """What one GPU sends or receives: 80 % of the link; peers read 52 GB/s over PCIe 5 (b12x#139)."""
    device = case.machine.devices[0]
    lanes, generation = device.pcie_width or 16, device.pcie_generation or 4
    return 0.8 * lanes * 4e9 * 2.0 ** (generation - 5)


def _every_link(case: Case, holds: Callable[[str | None, bool | None], bool]) -> bool:
    pairs = [(a, b) for a in range(case.fast.tp) for b in range(a + 1, case.fast.tp)]
    links = [case.machine.link(a, b) for a, b in pairs]
    return bool(links) and all(link is not None and holds(link.path, link.peer) for link in links)
