"""The kernels for GPUs, one file an operation; only `kernels/` imports them, and only for tensors on a GPU."""

from __future__ import annotations

import functools
import importlib.util

from torch import Tensor


def runs(x: Tensor) -> bool:
    """Whether these kernels take the tensor: it lies on a GPU, and Triton is installed."""
    return x.is_cuda and _is_installed()


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
