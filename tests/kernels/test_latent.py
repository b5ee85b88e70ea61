"""The way into latent attention's cache: the norm and the rotation that the other kernels have, bit for bit."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels.latent import latent_rope_write, latent_rope_write_reference
from slipstream.kernels.native import native
from slipstream.kernels.norm import rms_norm
from slipstream.kernels.rope import rope_kv_write

needs_native = pytest.mark.skipif(native() is None, reason="no C++ compiler, or SLIPSTREAM_KERNELS=reference")
EPS = 1e-6


def case(dtype, batch=2, rows=3, heads=4, nope=24, rank=40, rotated=16):
    draw = torch.Generator().manual_seed(0)

    def made(*shape):
        return torch.randn(*shape, generator=draw)

    angles = torch.outer(torch.arange(50.0), torch.rand(rotated // 2, generator=draw))
    positions = torch.randint(0, 50, (batch, rows), generator=draw)
    kv_rows = torch.randperm(30, generator=draw)[: batch * rows].view(batch, rows)
    wide = made(batch, rows, 10 + heads * (nope + rotated) + rank + rotated).to(dtype)
    q = wide[..., 10 : 10 + heads * (nope + rotated)].unflatten(-1, (heads, nope + rotated))
    kv, norm = wide[..., -(rank + rotated) :], made(rank).to(dtype)
    return (
        q,
        kv,
        norm,
        EPS,
        angles.cos(),
        angles.sin(),
        positions,
        kv_rows,
        torch.zeros(30, 1, rank + rotated).to(dtype),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_float64(dtype):
    q, kv, norm, _, cos, sin, positions, kv_rows, cache = arguments = case(dtype)
    before, latent = q.clone().double(), kv[..., :40].double()
    latent_rope_write(*arguments)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-8, "atol": 2**-7}
    normed = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + EPS) * norm.double()
    torch.testing.assert_close(cache[kv_rows, 0, :40].double(), normed, **tolerance)
    c, s = cos[positions].double(), sin[positions].double()
    low, high = kv[..., 40:].double().chunk(2, -1)
    torch.testing.assert_close(
        cache[kv_rows, 0, 40:].double(), torch.cat([low * c - high * s, high * c + low * s], -1), **tolerance
    )
    assert torch.equal(q[..., :24].double(), before[..., :24])
    low, high = before[..., 24:].chunk(2, -1)
    c, s = c[:, :, None], s[:, :, None]
    torch.testing.assert_close(
        q[..., 24:].double(), torch.cat([low * c - high * s, high * c + low * s], -1), **tolerance
    )


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_those_of_the_other_kernels(dtype):
    q, kv, norm, _, cos, sin, positions, kv_rows, cache = arguments = case(dtype)
    rotated = torch.cat([q[..., 24:].flatten(2), kv[..., 40:], kv[..., 40:]], -1)
    k_cache = torch.zeros(30, 1, 16).to(dtype)
    want_q = rope_kv_write(rotated, cos, sin, positions, kv_rows, k_cache, torch.zeros_like(k_cache))
    want_latent = rms_norm(kv[..., :40].contiguous(), norm, EPS)
    latent_rope_write(*arguments)
    assert torch.equal(q[..., 24:], want_q)
    assert torch.equal(cache[kv_rows, 0, :40], want_latent)
    assert torch.equal(cache[:, 0, 40:], k_cache[:, 0])


def test_nothing_else_is_written():
    arguments = case(torch.float32)
    latent_rope_write(*arguments)
    kv_rows, cache = arguments[-2:]
    others = torch.ones(30, dtype=torch.bool)
    others[kv_rows.flatten()] = False
    assert cache[others].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_near(dtype):
    ours, theirs = case(dtype), case(dtype)
    latent_rope_write(*ours)
    latent_rope_write_reference(*theirs)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-7}
    torch.testing.assert_close(ours[-1], theirs[-1], **tolerance)
    assert torch.equal(ours[0], theirs[0])


@needs_native
@pytest.mark.parametrize(("argument", "value"), [(6, 50), (6, -1), (7, 30)])
def test_positions_and_rows_out_of_range_are_refused(argument, value):
    arguments = list(case(torch.float32))
    arguments[argument] = arguments[argument].clone()
    arguments[argument][0, 0] = value
    with pytest.raises(RuntimeError, match="out of range"):
        latent_rope_write(*arguments)
