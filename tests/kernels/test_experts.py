"""Routing, the experts and the per-head products: against float64, and each row by itself, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.kernels.experts import Routing, experts, experts_reference, route, route_reference
from slipstream.kernels.linear import (
    FORMATS,
    group_of,
    linear,
    linear_heads,
    linear_heads_reference,
    pack,
    pack_many,
)
from slipstream.kernels.native import native

needs_native = pytest.mark.skipif(native() is None, reason="no C++ compiler, or SLIPSTREAM_KERNELS=reference")
ROUTINGS = {
    "softmax": Routing(3),
    "softmax, as they are": Routing(3, normalise=False),
    "sigmoid": Routing(4, "sigmoid", scale=2.5),
    "groups": Routing(4, "sigmoid", 8, 4, scale=2.5),
    "one group of many": Routing(2, "sigmoid", 8, 1),
}


def made(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def exact_route(logits, bias, routing):
    """In float64, by sorting; the lower expert wins a tie."""
    wide = logits.double()
    scores = wide.softmax(-1) if routing.score == "softmax" else wide.sigmoid()
    choice = scores if bias is None else scores + bias.double()
    rows = []
    for row, one in zip(choice.tolist(), scores.tolist(), strict=True):
        size = len(row) // routing.groups
        groups = [sorted(row[g * size : (g + 1) * size])[-2:] for g in range(routing.groups)]
        kept = sorted(range(routing.groups), key=lambda g: (-sum(groups[g]), g))[: routing.top_groups]
        allowed = [e for e in range(len(row)) if e // size in kept]
        chosen = sorted(allowed, key=lambda e: (-row[e], e))[: routing.per_token]
        weights = [one[e] for e in chosen]
        total = sum(weights) if routing.normalise else 1.0
        rows.append((chosen, [w / total * routing.scale for w in weights]))
    return torch.tensor([r[0] for r in rows]), torch.tensor([r[1] for r in rows], dtype=torch.float64)


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("function", [route, route_reference])
def test_route(routing, biased, function):
    logits, bias = made(50, 40), made(40, seed=1, scale=0.3) if biased else None
    chosen, weights = function(logits, bias, routing)
    expected, exact = exact_route(logits, bias, routing)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights.double(), exact, rtol=2e-6, atol=1e-9)


@needs_native
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_a_rows_route_is_its_own(routing):
    logits, bias = made(37, 40), made(40, seed=1)
    chosen, weights = route(logits, bias, routing)
    for row in range(37):
        alone = route(logits[row : row + 1], bias, routing)
        assert torch.equal(alone[0][0], chosen[row])
        assert torch.equal(alone[1][0], weights[row])


@pytest.mark.parametrize("function", [route, route_reference])
def test_ties_go_to_the_lower_expert(function):
    chosen, weights = function(torch.zeros(2, 16), None, Routing(3, "sigmoid", 4, 2))
    assert chosen.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


@needs_native
def test_nan_and_infinite_logits_still_choose_experts():
    logits = torch.full((3, 8), float("nan"))
    logits[1] = float("inf")
    logits[2, 3] = 1.0
    for routing in (Routing(2), Routing(3, "sigmoid", 4, 2)):
        chosen, _ = route(logits, None, routing)
        assert all(len(set(row)) == routing.per_token for row in chosen.tolist())
        assert chosen.min() >= 0
        assert chosen.max() < 8


@needs_native
def test_impossible_routings_are_refused():
    for routing in (
        Routing(9),
        Routing(2, groups=3),
        Routing(5, groups=4, top_groups=2),
        Routing(1, groups=8),
    ):
        with pytest.raises(RuntimeError, match="cannot choose"):
            route(torch.zeros(1, 8), None, routing)


def packed_experts(count, hidden, width, format, seed=0):
    up = [made(2 * width, hidden, seed=seed + e, scale=hidden**-0.5) for e in range(count)]
    down = [made(hidden, width, seed=seed + 100 + e, scale=width**-0.5) for e in range(count)]
    return pack_many(count, up.__getitem__, format), pack_many(count, down.__getitem__, format)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_experts_are_the_reference_bit_for_bit(format, dtype, rows):
    """The reference runs each expert's linears by themselves, and these are tested against float64 elsewhere."""
    up, down = packed_experts(6, 64, 96, format)
    x = made(rows, 64).to(dtype)
    chosen = torch.stack(
        [torch.randperm(6, generator=torch.Generator().manual_seed(r))[:3] for r in range(rows)]
    )
    weights = made(rows, 3, seed=5).abs()
    got = experts(x, chosen, weights, up, down)
    assert torch.equal(got, experts_reference(x, chosen, weights, up, down))


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 40),
    count=st.integers(1, 9),
    places=st.integers(1, 4),
    seed=st.integers(0, 100),
    lopsided=st.booleans(),
)
def test_a_rows_experts_are_its_own(rows, count, places, seed, lopsided):
    """Whoever else comes: all to one expert, or none to most of them."""
    draw = torch.Generator().manual_seed(seed)
    up, down = packed_experts(count, 32, 32, "bfloat16")
    x, weights = torch.randn(rows, 32, generator=draw).bfloat16(), torch.rand(rows, places, generator=draw)
    chosen = torch.randint(0, 1 if lopsided else count, (rows, places), generator=draw)
    together = experts(x, chosen, weights, up, down)
    for row in range(rows):
        one = slice(row, row + 1)
        assert torch.equal(experts(x[one], chosen[one], weights[one], up, down), together[one])


def test_threads_do_not_change_the_experts():
    up, down = packed_experts(8, 256, 128, "bfloat16")
    x, chosen, weights = made(33, 256).bfloat16(), torch.arange(99).view(33, 3) % 8, made(33, 3).abs()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(experts(x, chosen, weights, up, down))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@needs_native
def test_experts_out_of_range_are_refused():
    up, down = packed_experts(4, 32, 32, "float32")
    for wrong in (4, -1):
        with pytest.raises(RuntimeError, match="chosen out of range"):
            experts(made(1, 32), torch.tensor([[wrong]]), torch.ones(1, 1), up, down)


@pytest.mark.parametrize("format", FORMATS)
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
