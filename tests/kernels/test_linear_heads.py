"""The per-head products: each head is its own linear, bit for bit, whatever the strides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.kernels import linear as L
from slipstream.kernels.linear import group_of, linear, linear_heads, linear_heads_reference, pack, pack_many
from slipstream.kernels.native import native

needs_native = pytest.mark.skipif(native() is None, reason="no C++ compiler, or SLIPSTREAM_KERNELS=reference")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def made(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def heads_of(groups, n, k, format):
    return pack_many(groups, lambda head: made(n, k, seed=head, scale=k**-0.5), format)


@pytest.mark.parametrize("format", L.FORMATS)
@pytest.mark.parametrize("rows", [(1,), (3,), (2, 7)])
def test_every_head_is_its_own_linear(format, rows):
    """Bit for bit, from a strided slice as latent attention takes it."""
    weights = [made(72, 64, seed=head, scale=0.1) for head in range(5)]
    many = pack_many(5, weights.__getitem__, format)
    wide = made(*rows, 5, 100).bfloat16()
    x = wide[..., 10:74]
    got = linear_heads(x, many)
    assert got.shape == (*rows, 5, 72)
    for head in range(5):
        assert torch.equal(
            got[..., head, :], linear(x[..., head, :].contiguous(), pack(weights[head], format))
        )
        assert torch.equal(got[..., head, :], linear(x[..., head, :].contiguous(), group_of(many, head)))
    assert torch.equal(got, linear_heads_reference(x, many))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_float64(dtype):
    """In float32; the other formats are linear's own bits (above), which test_linear.py holds against float64."""
    weights = torch.stack([made(128, 64, seed=head, scale=0.125) for head in range(3)])
    x = made(5, 3, 64, seed=9).to(dtype)
    exact = torch.einsum("rgk,gnk->rgn", x.double(), weights.double())
    got = linear_heads(x, pack_many(3, weights.__getitem__, "float32"))
    assert got.dtype == dtype
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-8, "atol": 1e-5}
    torch.testing.assert_close(got.double(), exact, **tolerance)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 20),
    groups=st.integers(1, 6),
    n=st.integers(1, 70),
    k=st.integers(1, 70),
    pads=st.tuples(*[st.integers(0, 9)] * 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 50),
)
def test_any_shape_and_stride(rows, groups, n, k, pads, dtype, seed):
    """x and out are slices in every dimension; what lies around out stays as it was."""
    weight = heads_of(groups, n, k, "bfloat16")
    before, after, heads = pads
    x = made(rows, groups + heads, before + k + after, seed=seed).to(dtype)
    x = x[:, heads:, before : before + k]
    around = torch.full((rows, groups + heads, before + n + after), 7.0, dtype=dtype)
    out = around[:, :groups, before : before + n]
    got = linear_heads(x, weight, out)
    want = linear_heads(x.contiguous(), weight)
    assert got.data_ptr() == out.data_ptr()
    assert torch.equal(out, want)
    out.fill_(7.0)
    assert (around == 7.0).all()
    row = seed % rows
    assert torch.equal(linear_heads(x[row : row + 1], weight)[0], want[row])
    assert torch.equal(linear_heads(x[row], weight), want[row])


@pytest.mark.parametrize("function", [linear_heads, linear_heads_reference])
def test_leading_dimensions_in_any_order(function):
    """Transposed batches cannot be flattened without a copy, and heads may come before rows in memory."""
    weight = heads_of(4, 48, 32, "bfloat16")
    x = made(4, 3, 2, 40).bfloat16()[..., 5:37].permute(2, 1, 0, 3)
    out = torch.zeros(3, 2, 4, 60).bfloat16().transpose(0, 1)[..., :48]
    assert torch.equal(function(x, weight, out), linear_heads(x.contiguous(), weight))


@needs_native
def test_a_strided_x_is_not_copied():
    """What a call allocates is its result, though x is a slice that no flattening leaves in place."""
    weight = heads_of(4, 32, 64, "bfloat16")
    x, out = made(3, 50, 4, 80).bfloat16()[..., :64].transpose(0, 1), torch.empty(50, 3, 4, 32).bfloat16()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        linear_heads(x, weight, out)
    assert sum(event.cpu_memory_usage for event in profile.key_averages()) == 0
    assert not any("copy" in event.key or "clone" in event.key for event in profile.key_averages())


def test_threads_and_companions_do_not_change_a_row():
    weight = heads_of(5, 160, 128, "bfloat16")
    x = made(40, 5, 128).bfloat16()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(linear_heads(x, weight))
        assert torch.equal(linear_heads(x[order], weight), results[-1][order])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_out_may_be_x():
    """All of x is taken in before anything is written, on one thread or several."""
    weight, x = heads_of(3, 64, 64, "float32"), made(60, 3, 64)
    want = linear_heads(x, weight)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        place = x.clone()
        assert torch.equal(linear_heads(place, weight, place), want)


@needs_native
def test_impossible_outputs_are_refused():
    weight, x = heads_of(2, 32, 32, "float32"), made(3, 2, 32)
    for out, why in (
        (torch.empty(3, 2, 31), "out must be"),
        (torch.empty(3, 2, 64)[..., ::2], "out must be"),
        (torch.empty(3, 2, 32).bfloat16(), "out is"),
        (torch.empty(1, 2, 32).expand(3, 2, 32), "single memory location"),
    ):
        with pytest.raises(RuntimeError, match=why):
            linear_heads(x, weight, out)
