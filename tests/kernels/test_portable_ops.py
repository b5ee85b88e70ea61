"""The same kernels compiled without AVX-512, as other machines run them: the references' results."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.kernels import sampling as S
from slipstream.kernels.activation import swiglu_reference
from slipstream.kernels.attention import attention_reference
from slipstream.kernels.experts import Routing, route_reference
from slipstream.kernels.latent import latent_rope_write_reference
from slipstream.kernels.native import SOURCES
from slipstream.kernels.norm import rms_norm_reference
from slipstream.kernels.rope import rope_kv_write_reference

KERNELS = ("attention", "elementwise", "experts", "sampling", "nucleus")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    path = tmp_path_factory.mktemp("portable") / "ops.so"
    sources = [str(SOURCES / f"{name}.cpp") for name in KERNELS]
    shim = str(Path(__file__).with_name("portable_ops.cpp"))
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-DSLIPSTREAM_PORTABLE", "-w"]
    subprocess.run([compiler, *flags, f"-I{SOURCES}", "-o", str(path), shim, *sources], check=True)
    return ctypes.CDLL(str(path))


def at(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def attend(
    library: ctypes.CDLL, is_tree: bool, dtype: torch.dtype, dim: int, prefix: int
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(dim + prefix)
    rows, heads, kv = 4, 6, 2
    columns = prefix + rows
    table = torch.randperm(columns + 3)[None, :columns].contiguous()
    k, v = (torch.randn(columns + 3, kv, dim).to(dtype) for _ in range(2))
    q = torch.randn(1, rows, heads, dim).to(dtype)
    slots, before = torch.tensor([0]), torch.tensor([prefix])
    depth = torch.tensor([[0, 1, 1, 2]]) if is_tree else None
    ancestors = torch.tensor([[[0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 2, 3]]]) if is_tree else None
    out = torch.empty_like(q)
    pointers = [None if t is None else t.data_ptr() for t in (table, slots, before, depth, ancestors)]
    shape = (ctypes.c_int64 * 7)(1, rows, heads, kv, dim, columns, 3)
    is_bf16 = int(dtype == torch.bfloat16)
    indices = (ctypes.c_void_p * 5)(*pointers)
    library.portable_attention(is_bf16, at(q), at(k), at(v), at(out), indices, shape, ctypes.c_float(0.3))
    return out, attention_reference(q, k, v, table, slots, before, depth, ancestors, 0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize(("dim", "prefix"), [(64, 62), (64, 130), (8, 0), (20, 63)])
def test_attention(library: ctypes.CDLL, dtype: torch.dtype, is_tree: bool, dim: int, prefix: int) -> None:
    out, want = attend(library, is_tree, dtype, dim, prefix)
    tolerance = 5e-6 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(out, want, rtol=tolerance, atol=tolerance)


def test_elementwise(library: ctypes.CDLL) -> None:
    x, weight = torch.randn(3, 154), torch.randn(154)
    y = torch.empty_like(x)
    library.portable_rms_norm(
        at(x), at(weight), at(y), ctypes.c_int64(3), ctypes.c_int64(154), ctypes.c_float(1e-5)
    )
    torch.testing.assert_close(y, rms_norm_reference(x, weight, 1e-5), rtol=1e-6, atol=1e-7)
    gated = torch.empty(3, 77)
    library.portable_swiglu(at(x), at(gated), ctypes.c_int64(3), ctypes.c_int64(77))
    torch.testing.assert_close(gated, swiglu_reference(x), rtol=2e-6, atol=1e-7)


def test_rope(library: ctypes.CDLL) -> None:
    qkv, angle, rows = torch.randn(1, 5, 8 * 20), torch.rand(9, 10), torch.randperm(9)[None, :5].contiguous()
    ours, theirs = [torch.zeros(9, 2, 20) for _ in range(2)], [torch.zeros(9, 2, 20) for _ in range(2)]
    q, cos, sin = torch.empty(1, 5, 4, 20), angle.cos(), angle.sin()
    sizes = [ctypes.c_int64(n) for n in (5, 4, 2, 20)]
    library.portable_rope(
        at(qkv), at(cos), at(sin), at(rows), at(rows), at(q), at(ours[0]), at(ours[1]), *sizes
    )
    assert torch.equal(q, rope_kv_write_reference(qkv, cos, sin, rows, rows, *theirs))
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize(
    "routing", [Routing(3), Routing(4, "sigmoid", 4, 2, scale=2.5)], ids=["all", "groups"]
)
def test_route(library: ctypes.CDLL, routing: Routing) -> None:
    logits, bias = torch.randn(20, 44), torch.randn(44) * 0.1
    chosen, weights = (
        torch.empty(20, routing.per_token, dtype=torch.int64),
        torch.empty(20, routing.per_token),
    )
    sizes = (ctypes.c_int64 * 5)(20, 44, routing.per_token, routing.groups, routing.top_groups)
    is_softmax, scale = int(routing.score == "softmax"), ctypes.c_float(routing.scale)
    library.portable_route(at(logits), at(bias), sizes, is_softmax, scale, at(chosen), at(weights))
    want_chosen, want_weights = route_reference(logits, bias, routing)
    assert torch.equal(chosen, want_chosen)
    torch.testing.assert_close(weights, want_weights, rtol=2e-6, atol=1e-9)


def test_weighted_sum(library: ctypes.CDLL) -> None:
    outputs, weights, y = torch.randn(5, 3, 37), torch.rand(5, 3), torch.empty(5, 37)
    library.portable_weighted_sum(at(outputs), at(weights), at(y), *(ctypes.c_int64(n) for n in (5, 3, 37)))
    want = torch.zeros(5, 37)
    for place in range(3):
        want += outputs[:, place] * weights[:, place, None]
    assert torch.equal(y, want)


def test_sort_by_expert(library: ctypes.CDLL) -> None:
    """The pairs of an expert together, in their own order; experts that nobody chose have none."""
    chosen = torch.tensor([4, 1, 4, 0, 1, 4])
    order, offsets = torch.empty(6, dtype=torch.int64), torch.empty(7, dtype=torch.int64)
    library.portable_sort(at(chosen), ctypes.c_int64(6), ctypes.c_int64(6), at(order), at(offsets))
    assert order.tolist() == [3, 1, 4, 0, 2, 5]
    assert offsets.tolist() == [0, 1, 3, 3, 3, 6, 6]


def test_latent(library: ctypes.CDLL) -> None:
    batch, rows, heads, rank, rotated = 2, 3, 4, 21, 10
    q, kv, norm = (
        torch.randn(batch, rows, heads, 7 + rotated),
        torch.randn(batch, rows, rank + rotated),
        torch.rand(rank),
    )
    angle, positions = torch.rand(9, rotated // 2), torch.tensor([[0, 3, 8], [1, 1, 2]])
    kv_rows, ours, theirs = torch.randperm(9)[:6].view(2, 3), torch.zeros(9, 1, 31), torch.zeros(9, 1, 31)
    q_ours, cos, sin = q.clone(), angle.cos(), angle.sin()
    shape = (ctypes.c_int64 * 6)(batch, rows, heads, rank, rotated, q.shape[-1])
    library.portable_latent(
        at(q_ours),
        at(kv),
        at(norm),
        ctypes.c_float(1e-6),
        at(cos),
        at(sin),
        at(positions),
        at(kv_rows),
        at(ours),
        shape,
    )
    latent_rope_write_reference(q, kv, norm, 1e-6, cos, sin, positions, kv_rows, theirs)
    assert torch.equal(q_ours, q)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.0, 0, 1.0), (0.9, 0, 1.0), (1.2, 40, 1.0), (1, 0, 0.8)]
)
def test_draws(library: ctypes.CDLL, temperature: float, top_k: int, top_p: float) -> None:
    rows, width = 300, 1003
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(1)) * 3
    args = (
        torch.full((rows,), float(temperature)),
        torch.full((rows,), top_k, dtype=torch.int64),
        torch.full((rows,), top_p),
        torch.arange(rows) * 31,
        torch.arange(rows),
    )
    ids = torch.empty(rows, dtype=torch.int64)
    sizes = ctypes.c_int64(rows), ctypes.c_int64(width)
    library.portable_sample(at(logits), *(at(a) for a in args), at(ids), *sizes)
    assert (ids != S.sample_reference(logits, *args)).sum() <= 1  # two best within a rounding
    library.portable_argmax(at(logits), at(ids), *sizes)
    assert torch.equal(ids, S.argmax_reference(logits))
