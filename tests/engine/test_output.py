"""End of text, stop strings and limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.output import Output
from slipstream.engine.request import SamplingParams
from slipstream.errors import RequestError


class Letters:
    """Token n is the n-th letter."""

    def push(self, token: int) -> str:
        return "abcdefgh"[token]


def output(**params) -> Output:
    return Output(SamplingParams(**params), [7], Letters())


def test_tokens_beyond_the_limit_are_discarded():
    out = output(max_new_tokens=3)
    assert out.push([0, 1, 2, 3, 4]) == ("abc", [0, 1, 2])
    assert out.finish_reason == "length"


def test_end_of_text_ends_it_and_is_not_shown():
    out = output()
    assert out.push([0, 7, 1]) == ("a", [0, 7])
    assert out.finish_reason == "stop"
    assert output(ignore_eos=True).push([0, 7, 1])[1] == [0, 7, 1]


def test_a_stop_string_across_two_pushes_is_never_shown():
    out = output(stop=("cde",))
    assert out.push([0, 1, 2])[0] == "ab"
    assert out.push([3])[0] == ""
    assert out.push([4, 5]) == ("", [4])
    assert (out.text, out.finish_reason) == ("ab", "stop")


def test_what_was_held_back_comes_when_it_was_no_stop_string():
    out = output(stop=("cde",), max_new_tokens=4)
    assert out.push([0, 2])[0] == "a"
    assert out.push([0])[0] == "ca"
    assert out.push([2])[0] == "c"
    assert out.finish_reason == "length"


@given(
    tokens=st.lists(st.integers(0, 7), min_size=1, max_size=40),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=40),
    stop=st.lists(st.text("abcd", min_size=1, max_size=4), max_size=3),
    limit=st.integers(1, 40),
)
def test_pieces_add_up_to_what_one_push_gives(tokens, cuts, stop, limit):
    params = {"stop": tuple(stop), "max_new_tokens": limit}
    whole, pieces = output(**params), output(**params)
    whole.push(tokens)
    shown, at = "", 0
    for cut in cuts * len(tokens):
        if at >= len(tokens) or pieces.finish_reason:
            break
        shown += pieces.push(tokens[at : at + cut])[0]
        at += cut
    assert pieces.token_ids == whole.token_ids
    assert pieces.finish_reason == whole.finish_reason
    if whole.finish_reason:
        assert shown == whole.text
        assert not any(each in shown for each in stop)
    else:
        assert whole.text.startswith(shown)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"max_new_tokens": 0},
        {"stop": ("",)},
        {"seed": 2**63},
    ],
)
def test_params_out_of_range_are_refused_by_name(params):
    (name,) = params
    with pytest.raises(RequestError, match=name.split("_")[0]):
        SamplingParams(**params)
