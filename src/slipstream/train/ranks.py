"""One process or several: what torchrun starts each find their device here, and share a module's weights (FSDP2)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed, nn

from slipstream.errors import SlipstreamError

_PATIENCE = timedelta(hours=1)
"""That a rank waits for the others: one may be writing states that the others have done with."""


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is."""

    rank: int
    count: int
    device: str

    @property
    def is_first(self) -> bool:
        """The one that prints and writes."""
        return self.rank == 0


def join(device: str) -> Ranks:
    """Joins the group that torchrun made, or stands alone. device: cpu, cuda, or auto."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise SlipstreamError(f"the device is {device!r}; it must be auto, cpu or cuda")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SlipstreamError("there is no GPU that torch can use; take --device cpu")
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return Ranks(0, 1, device)
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda":
        if local >= torch.cuda.device_count():
            raise SlipstreamError(
                f"rank {rank} has no GPU: {torch.cuda.device_count()} are here; start fewer"
            )
        torch.cuda.set_device(local)
        device = f"cuda:{local}"
    distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo", timeout=_PATIENCE)
    return Ranks(rank, count, device)


def shard(module: nn.Module, ranks: Ranks) -> None:
    """Shards the weights, their gradients and moments over the ranks; forwards gather them (FSDP2)."""
    if ranks.count == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(ranks.device.split(":")[0], (ranks.count,))
    fully_shard(module, mesh=mesh)


def settle(module: nn.Module) -> None:
    """Puts the sharded weights back in their place, where a forward has gathered them that no backward followed."""
    if (reshard := getattr(module, "reshard", None)) is not None:
        reshard()


def any_of(flags: Iterable[bool], ranks: Ranks) -> list[bool]:
    """Each flag, true where it is on any rank; all must call it."""
    if ranks.count == 1:
        return list(flags)
    tensor = torch.tensor([float(flag) for flag in flags], device=ranks.device)
    distributed.all_reduce(tensor, distributed.ReduceOp.MAX)
    return [bool(flag) for flag in tensor.tolist()]


def leave() -> None:
    """Takes the group down, if there is one."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def be_deterministic() -> None:
    """The same bits again from the same state, which continuing needs; some GPU kernels are a little slower for it."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # It costs time, and nothing here reads memory that it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
