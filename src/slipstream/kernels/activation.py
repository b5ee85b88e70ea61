"""SwiGLU's gate (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels import triton as gpu
from slipstream.kernels.native import native


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2I], the gate's half first: silu(gate) * up, computed in float32, [..., I] in x's dtype."""
    if gate_up.device.type == "cpu" and (ext := native()) is not None:
        y: Tensor = ext.swiglu(gate_up)
        return y
    if gpu.runs(gate_up):
        from slipstream.kernels.triton import rows

        return rows.swiglu(gate_up)
    return swiglu_reference(gate_up)


def swiglu_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
