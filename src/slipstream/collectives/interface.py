"""What a forward asks of the ranks that share it, and the answer of a single rank.

Sums are in float32 in rank order and rounded once (design rule 8): every rank gets the same bits, and a row's bits do
not depend on how many rows there are, where a backend says so (`row_invariant`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from slipstream.collectives.meeting import Meeting
from slipstream.kernels.norm import add_rms_norm_


class Collectives(ABC):
    """The operations between the ranks of one tensor-parallel group; every rank calls them in the same order."""

    name: str
    rank: int = 0
    size: int = 1

    row_invariant: bool = False
    """A row's sum has the same bits in every message: whatever the other rows are, and however many."""

    is_lossy: bool = False
    """The payload is quantised on its way; never chosen unless asked for."""

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x (float32 or bfloat16, contiguous, of the same shape), in x's dtype; may reuse x."""

    def all_reduce_add_rms_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds the sum of all ranks' x [..., H] to `residual` in place and returns the RMSNorm of that.

        The bits of `add_rms_norm_(all_reduce(x), residual, weight, eps)`, in one pass where the backend can.
        """
        return add_rms_norm_(self.all_reduce(x), residual, weight, eps)

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' x [..., n] beside each other in rank order: [..., size * n]."""

    @abstractmethod
    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x on every rank (any dtype), written into x."""

    @abstractmethod
    def barrier(self) -> None:
        """Returns when all ranks have come here."""

    def close(self) -> None:
        """Gives back what is shared with the other ranks."""


class Backend(Collectives):
    """One way of carrying them out, among several ranks."""

    device = "cpu"
    """Where the tensors are: cpu or cuda."""

    gives_up = ""
    """What a group that uses it goes without, where it is not row-invariant or lossy; half a sentence."""

    @classmethod
    @abstractmethod
    def unavailable(cls, meeting: Meeting) -> str | None:
        """Why it cannot run among these ranks, as half a sentence; None where it can."""

    @abstractmethod
    def __init__(self, meeting: Meeting) -> None:
        """Sets it up between the ranks, which must all do so in the same order. After `unavailable` said None."""


class Solo(Collectives):
    """One rank: nothing to exchange."""

    name = "solo"
    row_invariant = True

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def barrier(self) -> None:
        return None
