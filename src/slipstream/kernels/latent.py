"""Multi-head latent attention's way into its cache: one latent and one rotated key a token (arXiv 2405.04434, 2.1)."""

from __future__ import annotations

from torch import Tensor

from slipstream.kernels import triton as gpu
from slipstream.kernels.native import native
from slipstream.kernels.norm import rms_norm_reference
from slipstream.kernels.rope import rotate


def latent_rope_write(
    q: Tensor,
    kv: Tensor,
    norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv_rows: Tensor,
    cache: Tensor,
) -> None:
    """Rotates the last D elements of every head of q in place; writes RMSNorm(latent) and the rotated key to the cache.

    q: [B, T, H, N + D]. kv: [B, T, L + D], latent first. norm: [L]. cos, sin: float32 [P, D / 2], by position; halves
    are rotated (`kernels/rope.py`). positions, kv_rows: int64 [B, T]. cache: [rows, 1, L + D], kv's dtype.
    """
    if q.device.type == "cpu" and (ext := native()) is not None:
        ext.latent_rope_write(q, kv, norm, eps, cos, sin, positions, kv_rows, cache)
        return
    if gpu.runs(q):
        from slipstream.kernels.triton import rows

        rows.latent_rope_write(q, kv, norm, eps, cos, sin, positions, kv_rows, cache)
        return
    latent_rope_write_reference(q, kv, norm, eps, cos, sin, positions, kv_rows, cache)


def latent_rope_write_reference(
    q: Tensor,
    kv: Tensor,
    norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv_rows: Tensor,
    cache: Tensor,
) -> None:
    rank, dim = len(norm), 2 * cos.shape[-1]
    c, s = cos[positions], sin[positions]
    rotated = q[..., -dim:]
    rotated.copy_(rotate(rotated, c[:, :, None], s[:, :, None]))
    cache[kv_rows, 0, :rank] = rms_norm_reference(kv[..., :rank], norm, eps)
    cache[kv_rows, 0, rank:] = rotate(kv[..., rank:], c, s)
