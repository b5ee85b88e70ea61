"""Routing and the experts: against float64, and each row by itself, bit for bit."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.kernels.experts import Routing, experts, experts_reference, route, route_reference
from slipstream.kernels.linear import FORMATS, group_of, pack, pack_many, quantise
from slipstream.kernels.native import native

needs_native = pytest.mark.skipif(native() is None, reason="no C++ compiler, or SLIPSTREAM_KERNELS=reference")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


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


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 6),
    groups=st.integers(1, 5),
    size=st.integers(2, 23),
    score=st.sampled_from(["softmax", "sigmoid"]),
    few=st.booleans(),
    data=st.data(),
)
def test_routes_of_any_shape(rows, groups, size, score, few, data):
    """Drawn from a few values, so that most choices are ties; in float64 equal logits have equal scores too."""
    top = data.draw(st.integers(1, groups))
    routing = Routing(data.draw(st.integers(1, top * size)), score, groups, top)
    logits = made(rows, groups * size, seed=data.draw(st.integers(0, 50)))
    logits = logits.round() if few else logits
    chosen, weights = route(logits, None, routing)
    expected, exact = exact_route(logits, None, routing)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights.double(), exact, rtol=1e-5, atol=1e-9)


@needs_native
@pytest.mark.parametrize("size", [9, 16, 31, 40])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_an_experts_score_does_not_depend_on_its_place(size, score):
    """torch's own does: the last few of an array are computed in another way than whole vectors."""
    logits = torch.full((1, size), 0.3)
    chosen, weights = route(logits, None, Routing(size, score, normalise=False))
    assert chosen.tolist() == [list(range(size))]
    assert len(set(weights[0].tolist())) == 1


@pytest.mark.parametrize("function", [route, route_reference])
def test_negative_zero_ties_with_zero(function):
    """score + bias is -0 or +0 where a score underflows; neither is the better."""
    logits, bias = torch.full((1, 4), -200.0), torch.tensor([-0.0, 0.0, -0.0, 0.0])
    assert function(logits, bias, Routing(4, "sigmoid"))[0].tolist() == [[0, 1, 2, 3]]


@needs_native
def test_a_bias_of_nan_or_infinity_ranks_an_expert():
    bias = torch.tensor([float("nan"), 0.0, float("-inf"), float("inf")])
    chosen, weights = route(torch.zeros(1, 4), bias, Routing(4, "sigmoid", normalise=False))
    assert chosen.tolist() == [[3, 1, 2, 0]]
    assert torch.isfinite(weights).all()


@needs_native
def test_no_rows_are_routed_nowhere():
    chosen, weights = route(torch.empty(0, 8), None, Routing(2))
    assert chosen.shape == weights.shape == (0, 2)


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


def as_kept(weight, format):
    """The numbers that a format keeps of a weight."""
    if format in ("float32", "bfloat16"):
        return weight.to(torch.float32 if format == "float32" else torch.bfloat16)
    return quantise(weight, format).dequantise()


def exact_experts(x, chosen, weights, up, down):
    """In float64 from dense weights; every rounding in between left out."""
    y = torch.zeros(len(x), x.shape[1], dtype=torch.float64)
    for row in range(len(x)):
        for expert, weight in zip(chosen[row].tolist(), weights[row].tolist(), strict=True):
            gate, value = (up[expert].double() @ x[row].double()).chunk(2)
            y[row] += weight * (down[expert].double() @ (gate * gate.sigmoid() * value))
    return y


# Root mean squares. x is rounded before each of the two products, SwiGLU's inputs once more: to 2^-9 in bfloat16; to
# whole steps of a group's greatest / 127, which is some 0.02 standard deviations (0.6 % after dividing by sqrt(12)).
ROUNDING = {"float32": 1e-6, "bfloat16": 5e-3, "q8_0": 1.5e-2, "q4_1": 1.5e-2}


@pytest.mark.parametrize("format", FORMATS)
def test_experts_against_float64(format):
    """With the weights as the format keeps them, so that only x's rounding remains."""
    up = [made(192, 64, seed=1 + e, scale=64**-0.5) for e in range(6)]
    down = [made(64, 96, seed=101 + e, scale=96**-0.5) for e in range(6)]
    packed = [pack_many(6, part.__getitem__, format) for part in (up, down)]
    x, weights = made(20, 64, seed=50), made(20, 3, seed=51).softmax(-1)
    chosen = torch.stack([made(6, seed=60 + r).argsort()[:3] for r in range(20)])
    exact = exact_experts(x, chosen, weights, *([as_kept(w, format) for w in part] for part in (up, down)))
    error = experts(x, chosen, weights, *packed).double() - exact
    assert error.square().mean().sqrt() <= ROUNDING[format] * exact.square().mean().sqrt()


@pytest.mark.parametrize("format", FORMATS)
def test_one_expert_for_all(format):
    """Every row, at every place, to the last of many: its tiles are full, the others' weights are never needed."""
    up, down = packed_experts(7, 64, 96, format)
    x, chosen, weights = made(50, 64).bfloat16(), torch.full((50, 2), 6), made(50, 2).abs()
    got = experts(x, chosen, weights, up, down)
    assert torch.equal(got, experts_reference(x, chosen, weights, up, down))
    only = packed_experts(1, 64, 96, format, seed=6)
    assert torch.equal(got, experts(x, torch.zeros_like(chosen), weights, *only))


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(2, 50), seed=st.integers(0, 100), format=st.sampled_from(FORMATS))
def test_companions_in_another_order(rows, seed, format):
    draw = torch.Generator().manual_seed(seed)
    up, down = packed_experts(5, 32, 64, format)
    x, weights = torch.randn(rows, 32, generator=draw).bfloat16(), torch.rand(rows, 3, generator=draw)
    chosen = torch.randint(0, 5, (rows, 3), generator=draw)
    order = torch.randperm(rows, generator=draw)
    got = experts(x, chosen, weights, up, down)
    assert torch.equal(experts(x[order], chosen[order], weights[order], up, down), got[order])


def test_experts_of_shapes_that_fill_no_vector():
    """Widths that are no multiples of a panel, x of three dimensions and from a wider tensor."""
    up, down = packed_experts(3, 42, 27, "bfloat16")
    x = made(2, 5, 50).bfloat16()[..., 4:46]
    chosen, weights = torch.arange(20).view(10, 2) % 3, made(10, 2).abs()
    got = experts(x, chosen, weights, up, down)
    assert got.shape == (2, 5, 42)
    assert torch.equal(got, experts_reference(x, chosen, weights, up, down))


@needs_native
def test_no_rows_through_experts():
    up, down = packed_experts(3, 32, 32, "bfloat16")
    nobody = torch.empty(0, 2, dtype=torch.int64)
    assert experts(torch.empty(0, 32), nobody, torch.empty(0, 2), up, down).shape == (0, 32)


@needs_native
def test_weights_are_fetched_one_at_a_time_and_packed_in_one_piece():
    """Nothing that `fetch` gave is held when the next is asked for."""
    alive: list[weakref.ref[torch.Tensor]] = []

    def fetch(index):
        assert all(ref() is None for ref in alive)
        weight = made(64, 32, seed=index)
        alive.append(weakref.ref(weight))
        return weight

    packed = pack_many(6, fetch, "float32")
    assert len(alive) == 6
    assert packed.data.nbytes == 6 * pack(made(64, 32), "float32").data.nbytes
    for index in range(6):
        assert torch.equal(group_of(packed, index).data, pack(made(64, 32, seed=index), "float32").data)
