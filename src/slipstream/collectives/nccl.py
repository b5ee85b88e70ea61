"""torch.distributed's NCCL: the baseline on GPUs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore

from slipstream.collectives.gloo import TorchCollectives
from slipstream.collectives.meeting import ANSWER_S, Meeting


class Nccl(TorchCollectives):
    """NCCL picks algorithm and protocol by message size, and with them the order in which it adds.

    Operations run on the current stream: a rank that died is noticed by NCCL's watchdog, which ends this process.
    """

    name = "nccl"
    device = "cuda"
    gives_up = "the order of its sums depends on the message's size"

    @classmethod
    def unavailable(cls, meeting: Meeting) -> str | None:
        if not torch.cuda.is_available():
            return "torch sees no GPU"
        if not distributed.is_nccl_available():
            return "this build of torch has no NCCL"
        here = [host for host in meeting.hosts if host == meeting.hosts[meeting.rank]]
        if len(here) > torch.cuda.device_count():
            return f"{len(here)} ranks share {torch.cuda.device_count()} GPUs, and NCCL wants one for each"
        return None

    def __init__(self, meeting: Meeting) -> None:
        nccl: Any = distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=ANSWER_S)
        store = PrefixStore(meeting.fresh_key(self.name), meeting.store)
        self._use(meeting, nccl(store, meeting.rank, meeting.size, options))
