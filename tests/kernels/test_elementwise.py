"""RMSNorm, SwiGLU and the rotary embedding: against float64, and each row's bits its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.kernels.activation import swiglu, swiglu_reference
from slipstream.kernels.norm import (
    add_rms_norm_,
    rms_norm,
    rms_norm_heads_,
    rms_norm_heads_reference_,
    rms_norm_reference,
)
from slipstream.kernels.rope import rope_kv_write, rope_kv_write_reference

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
WIDTHS = pytest.mark.parametrize("width", [1, 5, 16, 64, 77, 576, 577, 4096])
EPS = 1e-5


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def made(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def close(got: Tensor, want: Tensor, ulps: float = 1) -> None:
    """Within a few roundings of the exact float64 result."""
    tolerance = 6e-7 * ulps if got.dtype == torch.float32 else 2.0**-8
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=1e-30)


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()


@DTYPES
@WIDTHS
@pytest.mark.parametrize("norm", [rms_norm, rms_norm_reference], ids=["native", "reference"])
def test_rms_norm(norm: Callable[..., Tensor], dtype: torch.dtype, width: int) -> None:
    for weight_dtype in (torch.float32, torch.bfloat16):
        x, weight = made(2, 3, width, dtype=dtype), made(width, dtype=weight_dtype, seed=1)
        y = norm(x, weight, EPS)
        assert (y.dtype, y.shape) == (x.dtype, x.shape)
        close(y, exact_norm(x, weight))


@DTYPES
@pytest.mark.parametrize("dim", [8, 64, 128])
@pytest.mark.parametrize("norm", [rms_norm_heads_, rms_norm_heads_reference_], ids=["native", "reference"])
def test_rms_norm_heads(norm: Callable[..., None], dtype: torch.dtype, dim: int) -> None:
    """Each q and k head as if it were a row of its own, bit for bit; v is left alone."""
    heads, kv_heads = 5, 2
    qkv = made(2, 3, (heads + 2 * kv_heads) * dim, dtype=dtype)
    q_norm, k_norm = made(dim, dtype=dtype, seed=1), made(dim, dtype=dtype, seed=2)
    q, k, v = qkv.view(2, 3, -1, dim).split([heads, kv_heads, kv_heads], dim=2)
    alone = rms_norm if norm is rms_norm_heads_ else rms_norm_reference
    want = torch.cat([alone(q.contiguous(), q_norm, EPS), alone(k.contiguous(), k_norm, EPS), v], dim=2)
    norm(qkv, q_norm, k_norm, kv_heads, EPS)
    assert torch.equal(qkv.view_as(want), want)


@DTYPES
@WIDTHS
def test_add_rms_norm_rounds_the_sum_first(dtype: torch.dtype, width: int) -> None:
    x, residual, weight = (
        made(5, width, dtype=dtype),
        made(5, width, dtype=dtype, seed=2),
        made(width, seed=1),
    )
    total = residual + x
    y = add_rms_norm_(x, residual, weight, EPS)
    assert torch.equal(residual, total)
    assert torch.equal(y, rms_norm(total, weight, EPS))


@DTYPES
@pytest.mark.parametrize("kernel", [swiglu, swiglu_reference], ids=["native", "reference"])
def test_swiglu(kernel: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    for width in (1, 5, 16, 77, 1536):
        gate_up = made(2, 3, 2 * width, dtype=dtype, scale=8)
        gate, up = gate_up.double().chunk(2, -1)
        close(kernel(gate_up), gate * torch.sigmoid(gate) * up, ulps=2)


def test_exponential_is_within_two_parts_in_ten_million() -> None:
    """silu(g) / g = 1 / (1 + e^-g) shows the exponential where that is large, up to both ends."""
    gate = -torch.linspace(5, 80, 200_000)
    got = swiglu(torch.stack([gate, 1 / gate], -1)).double()[:, 0] / (gate * (1 / gate)).double()
    want = 1 / (1 + torch.exp(-gate.double()))
    assert (
        float(((got - want) / want).abs().max()) < 5e-7
    )  # the exponential, a sum, a quotient and two products
    ends = torch.tensor([[-200.0, 1], [200.0, 1], [0.0, 1], [float("nan"), 1], [-1e30, 1], [1e30, 1]])
    assert torch.equal(swiglu(ends)[[0, 1, 2, 4, 5], 0].abs(), torch.tensor([0, 200.0, 0, 0, 1e30]))
    assert swiglu(ends)[3].isnan()


def rope_case(
    batch: int, rows: int, heads: int, kv: int, dim: int, dtype: torch.dtype, seed: int = 0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    angle = torch.rand(50, dim // 2, generator=generator) * 6
    caches = [made(batch * rows + 9, kv, dim, dtype=dtype, seed=seed + i) for i in (1, 2)]
    positions = torch.randint(50, (batch, rows), generator=generator)
    kv_rows = torch.randperm(len(caches[0]), generator=generator)[: batch * rows].view(batch, rows)
    qkv = made(batch, rows, (heads + 2 * kv) * dim, dtype=dtype, seed=seed)
    return [qkv, angle.cos(), angle.sin(), positions, kv_rows, *caches]


@DTYPES
@pytest.mark.parametrize("dim", [2, 8, 32, 64, 80, 128])
def test_rope_is_bit_equal_to_the_reference(dtype: torch.dtype, dim: int) -> None:
    for batch, rows, heads, kv in [(1, 1, 9, 3), (2, 3, 4, 4), (1, 100, 3, 1)]:
        ours, theirs = (rope_case(batch, rows, heads, kv, dim, dtype) for _ in range(2))
        assert torch.equal(rope_kv_write(*ours), rope_kv_write_reference(*theirs))
        assert torch.equal(ours[5], theirs[5])
        assert torch.equal(ours[6], theirs[6])


@DTYPES
def test_rope_rotates_each_pair_by_its_angle(dtype: torch.dtype) -> None:
    qkv, cos, sin, positions, kv_rows, k_cache, v_cache = case = rope_case(2, 5, 6, 2, 16, dtype)
    q = rope_kv_write(*case)
    heads = qkv.view(2, 5, 10, 16).double()
    turn = torch.complex(cos.double(), sin.double())[positions][:, :, None]
    turned = torch.complex(heads[..., :8], heads[..., 8:]) * turn
    want = torch.cat([turned.real, turned.imag], -1)
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2.0**-8, "atol": 1e-6}
    torch.testing.assert_close(q.double(), want[:, :, :6], **tolerance)
    torch.testing.assert_close(k_cache[kv_rows].double(), want[:, :, 6:8], **tolerance)
    assert torch.equal(v_cache[kv_rows], qkv.view(2, 5, 10, 16)[:, :, 8:])


@DTYPES
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 33), width=st.integers(1, 700), seed=st.integers(0, 99))
def test_rows_have_the_same_bits_in_any_company(dtype: torch.dtype, rows: int, width: int, seed: int) -> None:
    """Down to one row, and up to where many threads share the rows."""
    x, weight = made(rows, 2 * width, dtype=dtype, seed=seed), made(2 * width)
    many = x.repeat(1 + 300 // rows, 1)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for kernel in (lambda a: rms_norm(a, weight, EPS), swiglu):
            whole = kernel(many)
            assert torch.equal(whole[-rows:], kernel(x))
            assert torch.equal(whole[rows - 1], kernel(x[-1]))


def test_no_rows_give_no_rows() -> None:
    assert rms_norm(torch.empty(0, 8), torch.ones(8), EPS).shape == (0, 8)
    assert swiglu(torch.empty(2, 0, 8)).shape == (2, 0, 4)


@pytest.mark.parametrize(
    "call",
    [
        lambda: rms_norm(torch.zeros(2, 8), torch.ones(7), EPS),
        lambda: rms_norm(torch.zeros(2, 8).half(), torch.ones(8), EPS),
        lambda: rms_norm(torch.zeros(2, 8), torch.ones(8).double(), EPS),
        lambda: add_rms_norm_(torch.zeros(2, 8), torch.zeros(1, 8), torch.ones(8), EPS),
        lambda: add_rms_norm_(torch.zeros(2, 8), torch.zeros(2, 8).bfloat16(), torch.ones(8), EPS),
        lambda: add_rms_norm_(torch.zeros(2, 8), torch.zeros(8, 2).T, torch.ones(8), EPS),
        lambda: swiglu(torch.zeros(2, 7)),
    ],
)
def test_bad_arguments_are_refused(call: Callable[[], Tensor]) -> None:
    with pytest.raises(RuntimeError):
        call()


@pytest.mark.parametrize(("argument", "value"), [(3, 50), (3, -1), (4, 10**9), (4, -1)])
def test_rope_refuses_positions_and_rows_out_of_range(argument: int, value: int) -> None:
    case = rope_case(1, 3, 4, 2, 8, torch.float32)
    case[argument][0, 1] = value
    with pytest.raises(RuntimeError, match="out of range"):
        rope_kv_write(*case)
