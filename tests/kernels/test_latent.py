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


def strided(batch, rows, dtype=torch.bfloat16):
    """A case whose q and kv are some rows of a longer batch, heads before rows in q's memory."""
    arguments = list(case(dtype, batch, rows))
    q, kv = arguments[:2]
    longer = torch.zeros(batch, 6, rows + 5, q.shape[-1] + 3).to(dtype)
    arguments[0] = longer[:, 1:5, 2 : 2 + rows, 1:-2].transpose(1, 2)
    arguments[0].copy_(q)
    arguments[1] = torch.zeros(batch, rows + 5, kv.shape[-1]).to(dtype)[:, 2 : 2 + rows]
    arguments[1].copy_(kv)
    return arguments, longer


@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (1, 4), (4, 1), (3, 5)])
def test_strides_do_not_matter(batch, rows):
    """One row of a longer batch, and one batch of many rows, have strides that no contiguous tensor has."""
    plain, (arguments, longer) = case(torch.bfloat16, batch, rows), strided(batch, rows)
    latent_rope_write(*plain)
    latent_rope_write(*arguments)
    assert torch.equal(arguments[0], plain[0])
    assert torch.equal(arguments[-1], plain[-1])
    arguments[0].zero_()
    assert longer.abs().max() == 0


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_is_its_own(threads):
    """Enough rows and heads for several threads; each row by itself writes the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = case(torch.bfloat16, batch=2, rows=12, heads=96)
        q = together[0].clone()
        latent_rope_write(*together)
        for b, t in ((0, 0), (0, 11), (1, 3)):
            arguments = list(together)
            arguments[0] = q[b : b + 1, t : t + 1]
            for i in (1, 6, 7):
                arguments[i] = arguments[i][b : b + 1, t : t + 1]
            arguments[-1] = torch.zeros_like(together[-1])
            latent_rope_write(*arguments)
            row = together[7][b, t]
            assert torch.equal(arguments[0][0, 0], together[0][b, t])
            assert torch.equal(arguments[-1][row], together[-1][row])
    finally:
        torch.set_num_threads(before)


@needs_native
def test_heads_that_share_memory_are_refused():
    arguments = list(case(torch.float32))
    arguments[0] = arguments[0][:, :, :1].expand(-1, -1, 4, -1)
    with pytest.raises(RuntimeError, match="single memory location"):
        latent_rope_write(*arguments)
