"""The packed linears: right against float64, and the same bits for a row whatever computes the rest."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.kernels import linear as L
from slipstream.kernels.native import SOURCES, native

needs_native = pytest.mark.skipif(native() is None, reason="no C++ compiler, or SLIPSTREAM_KERNELS=reference")
ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31, 32, 33, 64, 100)
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def made(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def exact(x: Tensor, weight: Tensor, format: L.Format, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The contract in float64, and for each output the sum of |products|, to which rounding errors are proportional."""
    x64 = x.double()
    if format == "bfloat16":
        x64, w64 = x.bfloat16().double(), weight.bfloat16().double()
    elif format == "float32":
        w64 = weight.double()
    else:
        w64 = L.quantise(weight, format).dequantise().double()
        groups = x.float().unflatten(-1, (-1, L.GROUP))
        scale = groups.abs().amax(-1, keepdim=True) / 127
        inverse = torch.where(scale > 0, 1 / scale, 0)
        x64 = ((groups * inverse).round().double() * scale.double()).flatten(-2)
    y, size = x64 @ w64.T, x64.abs() @ w64.abs().T
    if bias is not None:
        y, size = y + bias.double(), size + bias.double().abs()
    return y, size


def assert_close(y: Tensor, x: Tensor, weight: Tensor, format: L.Format, bias: Tensor | None = None) -> None:
    """Each of about K float32 sums rounds by at most 2^-24 of the running total (dpbf16 and q4_1 round twice a step);
    scales of the quantised formats round a few times more; a bfloat16 output by 2^-9 of itself."""
    expected, size = exact(x, weight, format, bias)
    bound = size * 2.0**-24 * (2 * weight.shape[1] + 8) + 1e-37
    if y.dtype == torch.bfloat16:
        bound = bound + (expected.abs() + bound) * 2.0**-8
    worst = ((y.double() - expected).abs() - bound).max()
    assert worst <= 0, f"{float(worst):.3g} beyond the bound"


@pytest.mark.parametrize("format", L.FORMATS)
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_close_to_float64(format: L.Format, x_dtype: torch.dtype, out_dtype: torch.dtype, rows: int) -> None:
    x, weight, bias = made(rows, 192, 1).to(x_dtype), made(75, 192, 2), made(1, 75, 3)[0]
    y = L.linear(x, L.pack(weight, format, bias), out_dtype)
    assert y.dtype == out_dtype
    assert y.shape == (rows, 75)
    assert_close(y, x, weight, format, bias)


@needs_native
@pytest.mark.parametrize("format", L.FORMATS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape(format: L.Format, data: st.DataObject) -> None:
    is_quantised = format in ("q8_0", "q4_1")
    k = data.draw(st.integers(1, 5)) * L.GROUP if is_quantised else data.draw(st.integers(1, 150))
    n, rows = data.draw(st.integers(1, 100)), data.draw(st.integers(0, 40))
    x = made(rows, k, data.draw(st.integers(0, 1000))).to(data.draw(st.sampled_from(DTYPES)))
    weight = made(n, k, 7)
    y = L.linear(x, L.pack(weight, format), torch.float32)
    assert y.shape == (rows, n)
    if rows:
        assert_close(y, x, weight, format)


@needs_native
@pytest.mark.parametrize("format", L.FORMATS)
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company(format: L.Format, x_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    # The largest crosses the threshold below which one thread works alone, even for one row.
    for n, k in [(45, 96), (130, 1536), (257, 576)]:
        packed = L.pack(made(n, k, 5), format, made(1, n, 6)[0])
        x = made(100, k, 8).to(x_dtype)
        torch.set_num_threads(1)
        alone = torch.cat([L.linear(x[i : i + 1], packed) for i in range(100)])
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows in ROW_COUNTS:
                chosen = torch.randperm(100, generator=generator)[:rows]
                assert torch.equal(L.linear(x[chosen], packed), alone[chosen]), (n, k, threads, rows)


@needs_native
@pytest.mark.parametrize("format", ["float32", "bfloat16"])
@pytest.mark.parametrize("k", [1, 2, 3, 17, 95, 577])
def test_odd_widths_are_row_invariant_too(format: L.Format, k: int) -> None:
    packed, x = L.pack(made(39, k, 1), format), made(33, k, 2)
    alone = torch.cat([L.linear(row[None], packed) for row in x])
    assert torch.equal(L.linear(x, packed), alone)


@needs_native
def test_rows_beyond_one_cache_block_are_invariant() -> None:
    packed, x = L.pack(made(64, 1024, 1), "bfloat16"), made(700, 1024, 2)
    y = L.linear(x, packed)
    for i in (0, 188, 350, 351, 699):
        assert torch.equal(L.linear(x[i : i + 1], packed)[0], y[i])


@needs_native
@pytest.mark.parametrize("format", L.FORMATS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_poisoned_row_poisons_only_itself(format: L.Format, poison: float) -> None:
    packed, x = L.pack(made(70, 64, 1), format), made(9, 64, 2)
    clean = L.linear(x, packed)
    x[4, 33] = poison
    y = L.linear(x, packed)
    assert not y[4].isfinite().any()
    others = torch.arange(9) != 4
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("format", ["q8_0", "q4_1"])
def test_quantised_close_to_reference(format: L.Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """The integers are the same; only the float32 sums over groups are in another order."""
    x, weight = made(6, 576, 1), made(96, 576, 2)
    x[2] = 0
    x[3] *= 1e-38  # a scale too small to be inverted counts as 0
    x[4] *= 1e30
    y = L.linear(x, L.pack(weight, format))
    monkeypatch.setattr(L, "native", lambda: None)
    reference = L.reference(x, L.pack(weight, format))
    assert torch.allclose(y, reference, rtol=1e-4, atol=1e-4 * float(weight.abs().max()))
    assert not y[2].any()
    assert not y[3].any()


@pytest.mark.parametrize("format", L.FORMATS)
def test_shapes_strides_and_no_rows(format: L.Format) -> None:
    packed = L.pack(made(40, 64, 1), format)
    x = made(64, 6, 2).T  # not contiguous
    y = L.linear(x, packed)
    assert torch.equal(y, L.linear(x.contiguous(), packed))
    assert torch.equal(L.linear(x.reshape(2, 3, 64), packed), y.view(2, 3, 40))
    assert torch.equal(L.linear(x[0], packed), y[0])
    assert L.linear(x[:0], packed).shape == (0, 40)
    assert L.linear(x.reshape(2, 3, 64)[:, :0], packed, torch.bfloat16).shape == (2, 0, 40)


def test_a_gguf_block_is_taken_as_it_is() -> None:
    q = torch.arange(-127, 129).clamp(max=127).to(torch.int8).view(4, 64)
    weight = L.QuantisedWeight("q8_0", q, torch.full((4, 2), 0.5).half())
    y = L.linear(torch.eye(64)[:7] * 127, L.pack(weight, "q8_0"))
    assert torch.equal(y, q[:, :7].T.float() * 127 * 0.5)


@needs_native
def test_bfloat16_output_rounds_to_nearest_even() -> None:
    packed = L.pack(torch.ones(1, 1), "float32")
    x = torch.cat([made(3000, 1, 1), torch.tensor([[1 + 2**-8], [1 + 3 * 2**-8], [3.4e38], [1e-40]])])
    assert torch.equal(L.linear(x, packed, torch.bfloat16), x.bfloat16())


@needs_native
def test_wrong_arguments_are_refused() -> None:
    ext = native()
    assert ext is not None
    packed = L.pack(made(40, 64), "float32")
    with pytest.raises(RuntimeError, match="x must be"):
        L.linear(made(1, 63), packed)
    with pytest.raises(RuntimeError, match="float32 or bfloat16"):
        L.linear(made(1, 64).double(), packed)
    with pytest.raises(RuntimeError, match="not one of"):
        ext.linear(made(1, 64), packed.data, "bfloat16", None, 40, 64, torch.float32)
    with pytest.raises(RuntimeError, match="bias"):
        L.linear(made(1, 64), L.pack(made(40, 64), "float32", made(1, 39)[0]))
    place = ext.allocate_packed(1, 32, 32, "q8_0")
    with pytest.raises(RuntimeError, match="needs its scale"):
        ext.pack_into(place, torch.zeros(32, 32, dtype=torch.int8), None, None, "q8_0")
    with pytest.raises(RuntimeError, match="not one of"):
        ext.pack_into(place[64:], torch.zeros(32, 32, dtype=torch.int8), None, None, "q8_0")
    with pytest.raises(ValueError, match="multiple of 32"):
        L.pack(made(4, 33), "q4_1")


class PackCall(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("weight", "scale", "minimum", "packed")],
        *[(name, ctypes.c_int64) for name in ("n", "k")],
        ("format", ctypes.c_int32),
    ]


class LinearCall(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("x", "packed", "bias", "y")],
        *[(name, ctypes.c_int64) for name in ("rows", "n", "k")],
        *[(name, ctypes.c_int32) for name in ("format", "x_type", "y_type", "threads")],
    ]


class GroupedCall(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("x", "y", "offsets", "packed")],
        *[(name, ctypes.c_int64) for name in ("groups", "n", "k")],
        *[(name, ctypes.c_int32) for name in ("format", "x_type", "y_type", "threads")],
    ]


Portable = Callable[[Tensor, Tensor, L.Format], Tensor]


@pytest.fixture(scope="module")
def portable_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The same sources without one intrinsic, for the plainest CPU of this architecture, serial."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("portable") / "linear.so"
    sources = [str(Path(SOURCES) / name) for name in ("linear.cpp", "linear_pack.cpp")]
    flags = [
        "-std=c++17",
        "-O1",
        "-ffp-contract=off",
        "-shared",
        "-fPIC",
        "-DSLIPSTREAM_PORTABLE",
        "-Wno-psabi",
    ]
    subprocess.run([compiler, *flags, "-o", str(library), *sources], check=True)
    lib = ctypes.CDLL(str(library))
    lib.slipstream_packed_bytes.restype = ctypes.c_int64
    lib.slipstream_packed_bytes.argtypes = [ctypes.c_int32, ctypes.c_int64, ctypes.c_int64]
    return lib


def portably_packed(lib: ctypes.CDLL, weight: Tensor, format: L.Format) -> Tensor:
    index, (n, k) = L.FORMATS.index(format), weight.shape
    scale = minimum = None
    if format in ("q8_0", "q4_1"):
        quantised = L.quantise(weight, format)
        data, scale, minimum = quantised.q, quantised.scale, quantised.minimum
    else:
        data = weight.to(torch.float32 if format == "float32" else torch.bfloat16)
    packed = torch.empty(lib.slipstream_packed_bytes(index, n, k), dtype=torch.uint8)
    pointers = [None if t is None else t.data_ptr() for t in (data, scale, minimum)]
    lib.slipstream_pack(ctypes.byref(PackCall(*pointers, packed.data_ptr(), n, k, index)))
    return packed


@pytest.fixture(scope="module")
def portable(portable_library: ctypes.CDLL) -> Portable:
    lib = portable_library

    def run(x: Tensor, weight: Tensor, format: L.Format) -> Tensor:
        index, (n, k), packed = L.FORMATS.index(format), weight.shape, portably_packed(lib, weight, format)
        y = torch.empty(len(x), n)
        is_bfloat16 = int(x.dtype == torch.bfloat16)
        call = LinearCall(
            x.data_ptr(), packed.data_ptr(), None, y.data_ptr(), len(x), n, k, index, is_bfloat16, 0, 1
        )
        lib.slipstream_linear(ctypes.byref(call))
        return y

    return run


@pytest.mark.parametrize("format", L.FORMATS)
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_the_portable_build_keeps_the_contract(
    portable: Portable, format: L.Format, x_dtype: torch.dtype
) -> None:
    for n, k in [(45, 96), (64, 576), (33, 32)]:
        x, weight = made(33, k, 1).to(x_dtype), made(n, k, 2)
        y = portable(x, weight, format)
        assert_close(y, x, weight, format)
        for rows in (1, 2, 8, 13):
            assert torch.equal(portable(x[:rows].contiguous(), weight, format), y[:rows])


@pytest.mark.parametrize("format", L.FORMATS)
def test_portable_groups_are_linears(
    portable_library: ctypes.CDLL, portable: Portable, format: L.Format
) -> None:
    """Several weights behind each other, their rows in any order, one of them without rows: each linear's own bits."""
    weights = [made(45, 64, seed) for seed in range(3)]
    packed = torch.cat([portably_packed(portable_library, weight, format) for weight in weights])
    x, y, order = made(20, 64, 9), torch.empty(20, 45), torch.randperm(20).tolist()
    offsets = torch.tensor([0, 7, 7, 20])
    rows_of = [(ctypes.c_void_p * 20)(*(t[row].data_ptr() for row in order)) for t in (x, y)]
    places = [ctypes.addressof(rows) for rows in rows_of]
    call = GroupedCall(
        *places, offsets.data_ptr(), packed.data_ptr(), 3, 45, 64, L.FORMATS.index(format), 0, 0, 1
    )
    portable_library.slipstream_grouped(ctypes.byref(call))
    for group, rows in ((0, order[:7]), (2, order[7:])):
        assert torch.equal(y[rows], portable(x[rows], weights[group], format))
