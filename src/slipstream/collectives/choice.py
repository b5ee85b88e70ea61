"""Which backends there are, and which of them a group of ranks uses: measured, among those with identical bits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.collectives.gloo import Gloo, OrderedGloo
from slipstream.collectives.interface import Backend, Collectives, Solo
from slipstream.collectives.meeting import Meeting
from slipstream.collectives.nccl import Nccl
from slipstream.collectives.quantised import Quantised
from slipstream.collectives.shm import Shm
from slipstream.errors import SlipstreamError

BACKENDS: dict[str, type[Backend]] = {
    backend.name: backend for backend in (Gloo, OrderedGloo, Shm, Nccl, Quantised)
}

SIZES_BYTES = (2 << 10, 16 << 10, 128 << 10, 1 << 20)
"""Of the measured messages: from one row of a small model to a prefill's block."""

_ROUNDS = 15


@dataclass(frozen=True)
class Choice:
    """What was measured, and what follows from it; the same on every rank."""

    us: Mapping[str, Mapping[int, float]]
    """Median microseconds of an all-reduce by backend and message bytes."""

    exact: Sequence[str]
    """The backends that give identical bits: fp32 sums in rank order, rounded once."""

    unavailable: Mapping[str, str] = field(default_factory=dict)
    gives_up: Mapping[str, str] = field(default_factory=dict)
    """What the others would cost in exactness."""

    def best(self, message_bytes: int, among: Sequence[str] | None = None) -> str:
        """The fastest backend at the measured size that is nearest from above (the greatest, for greater ones)."""
        names = self.exact if among is None else among
        sizes = sorted(self.us[names[0]])
        size = next((each for each in sizes if each >= message_bytes), sizes[-1])
        return min(names, key=lambda name: self.us[name][size])

    def offers(self) -> list[str]:
        """A line for each backend that is faster somewhere than all exact ones, and what it gives up."""
        lines = []
        for name, why in self.gives_up.items():
            faster = [size for size, us in self.us[name].items() if us < self.us[self.best(size)][size]]
            if faster:
                ratio = max(self.us[self.best(size)][size] / self.us[name][size] for size in faster)
                lines.append(f"{name} takes down to 1/{ratio:.1f} of the time at {faster} bytes, but {why}")
        return lines


class Mixed(Collectives):
    """Several backends of identical bits: each reduction goes to the one that is fastest at its size."""

    row_invariant = True

    def __init__(self, meeting: Meeting, choice: Choice, backends: Mapping[str, Collectives]) -> None:
        self.rank, self.size = meeting.rank, meeting.size
        self.choice, self._backends = choice, backends
        self._smallest = backends[choice.best(0)]
        self.name = "+".join(backends)

    def _for(self, x: Tensor) -> Collectives:
        return self._backends[self.choice.best(x.nbytes)]

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._for(x).all_reduce(x)

    def all_reduce_add_rms_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._for(x).all_reduce_add_rms_norm_(x, residual, weight, eps)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._for(x).all_gather(x)

    def broadcast(self, x: Tensor) -> Tensor:
        return self._smallest.broadcast(x)

    def barrier(self) -> None:
        self._smallest.barrier()

    def close(self) -> None:
        for backend in self._backends.values():
            backend.close()


def why_not(meeting: Meeting, device: str = "cpu") -> dict[str, str]:
    """The backends that cannot run among these ranks on this kind of device, each with the first rank's reason."""
    reasons = {}
    for name, backend in BACKENDS.items():
        own = (
            f"it is for {backend.device} tensors, and the ranks compute on {device}"
            if backend.device != device
            else backend.unavailable(meeting)
        )
        every = meeting.exchange(f"why not {name}", own)
        if found := [reason for reason in every if reason]:
            reasons[name] = found[0]
    return reasons


def connect(meeting: Meeting, backend: str = "auto", device: str = "cpu") -> Collectives:
    """The collectives of this group; every rank calls it with the same name (see `BACKENDS`), or auto.

    device: cpu or cuda (the current one). SlipstreamError where the name is not known or the backend cannot run here:
    its own reason is in the line.
    """
    if backend != "auto" and backend not in BACKENDS:
        raise SlipstreamError(f"there is no backend {backend!r}; there are auto, {', '.join(BACKENDS)}")
    if meeting.size == 1:
        return Solo()
    meeting.agree("the backend", backend)
    reasons = why_not(meeting, device)
    if backend == "auto":
        return _fastest(meeting, reasons, device)
    if backend in reasons:
        raise SlipstreamError(f"the backend {backend} cannot run here: {reasons[backend]}")
    return BACKENDS[backend](meeting)


def _fastest(meeting: Meeting, reasons: Mapping[str, str], device: str) -> Collectives:
    """The exact backends, by size; where there is no exact one, the first that is not lossy."""
    candidates = [each for each in BACKENDS.values() if each.name not in reasons and not each.is_lossy]
    if not candidates:
        told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise SlipstreamError(f"no backend can run here: {told}")
    connected = {each.name: each(meeting) for each in candidates}
    exact = [name for name, each in connected.items() if each.row_invariant] or list(connected)[:1]
    choice = measure(meeting, {name: connected[name] for name in exact}, device)
    used = dict.fromkeys(choice.best(size) for size in SIZES_BYTES)
    for name, each in connected.items():
        if name not in used:
            each.close()
    if len(used) == 1:
        return connected[next(iter(used))]
    return Mixed(meeting, choice, {name: connected[name] for name in used})


def measure(meeting: Meeting, backends: Mapping[str, Collectives], device: str = "cpu") -> Choice:
    """Times the backends' all-reduces in turn; rank 0's clock counts, so that all ranks choose the same."""
    us: dict[str, dict[int, list[float]]] = {name: {size: [] for size in SIZES_BYTES} for name in backends}
    for size in SIZES_BYTES:
        for _ in range(_ROUNDS):
            for name, backend in backends.items():
                x = torch.zeros(size // 4, device=device)
                backend.barrier()
                start = time.perf_counter()
                backend.all_reduce(x)
                if device != "cpu":
                    torch.cuda.synchronize()
                us[name][size].append((time.perf_counter() - start) * 1e6)
    medians = {
        name: {size: statistics.median(all_us) for size, all_us in by.items()} for name, by in us.items()
    }
    first = meeting.exchange("costs", medians)[0]
    agreed = {name: {int(size): us for size, us in by.items()} for name, by in first.items()}
    exact = [name for name, each in backends.items() if each.row_invariant and not each.is_lossy]
    others = {name: BACKENDS[name].gives_up for name in backends if name not in exact}
    return Choice(agreed, exact or list(backends)[:1], gives_up=others)
