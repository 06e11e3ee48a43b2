"""Laws of what the toll policy makes of streams that are slower than the fleet's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.control.latency_model.estimates import Estimates
from pigou.control.routing.toll.fairness import second_weight, surcharge
from pigou.control.routing.toll.policy import Toll, TollParams
from pigou.control.routing.view import Candidates, FleetView
from pigou.games.latency import LatencyLaw
from pigou.request import Request

LAW = LatencyLaw(0.0, 0.01)  # streams alone do not slow each other: contexts do
BOTH = Candidates(np.array([-1, -1], np.int32), np.array([0, 1], np.int32))
RATIOS, POWERS = st.floats(0, 10), st.floats(0, 20)
LEAST = Toll(TollParams(fairness=0.0))


def fleet(held: tuple[int, int], streams: tuple[int, int] = (10, 10)) -> FleetView:
    """Two workers that hold so many tokens, of streams of 1,000; none has a prompt to compute."""
    known = Estimates.prior(2, LAW)
    known.context_token[:], known.mean_context[:] = 1e-7, 1000.0
    known.mean_prefill[:] = 0.1
    return FleetView.of(
        2, estimates=known, output=100.0, decode_requests=list(streams), decode_tokens=list(held)
    )


@given(RATIOS, RATIOS, POWERS)
def test_the_slower_stream_counts_for_more_from_one_to_three(
    a: float, b: float, power: float
) -> None:
    fast, slow = sorted((a, b))
    assert 1.0 <= second_weight(fast, power) <= second_weight(slow, power) <= 3.0
    assert second_weight(min(fast, 1.0), power) == 1.0


@given(RATIOS, POWERS)
def test_its_own_seconds_count_as_those_of_the_streams_that_it_joins(
    ratio: float, power: float
) -> None:
    at = np.linspace(1.0, max(1.0, ratio), 4001)
    more = [second_weight(each, power) - 1.0 for each in at.tolist()]
    assert surcharge(ratio, power) == pytest.approx(np.trapezoid(more, at), rel=1e-3, abs=1e-5)


def test_slow_streams_are_priced_by_how_slow_they_are() -> None:
    """Steps of 10 ms, and 13 ms where 40,000 tokens are held: 1.1 s and 1.4 s for a request."""
    request, view = Request("r", 1000, 100), fleet((10_000, 40_000))
    parts, plain = Toll().parts(request, view, BOTH), LEAST.parts(request, view, BOTH)
    count = (1.4 / 1.25) ** 5
    assert 1.7 < count < 1.8
    for name in ("toll_stream", "toll_stall"):
        assert plain[name][0] > 0.0
        assert parts[name] == pytest.approx(plain[name] * [1.0, count])
    more = 100 * 1e-7 * 50.0  # it holds 1,050 tokens, those of the fleet 1,000
    own = 1.25 * surcharge((1.4 + more) / 1.25, 5.0)
    assert parts["tail"] - plain["tail"] == pytest.approx([0.0, own])
    others = [name for name in parts if name not in ("toll_stream", "toll_stall", "tail")]
    assert all((parts[name] == plain[name]).all() for name in others)


def test_prompts_that_wait_make_the_streams_beside_them_slow() -> None:
    """A second of prompts, which each of ten streams is to lose, against a mean of 1.6 s."""
    view = fleet((10_000, 10_000))
    view.prefill_requests[1], view.prefill_tokens[1] = 1, 9950
    parts, plain = (t.parts(Request("r", 1000, 100), view, BOTH) for t in (Toll(), LEAST))
    assert parts["toll_stall"][0] == plain["toll_stall"][0]
    assert parts["toll_stall"][1] > 1.5 * plain["toll_stall"][1]


@given(st.integers(0, 40), st.integers(1, 50_000))
def test_workers_alike_are_priced_alike_whatever_the_fairness(streams: int, held: int) -> None:
    view, request = fleet((held, held), (streams, streams)), Request("r", 1000, 100)
    fair, plain = (each.parts(request, view, BOTH) for each in (Toll(), LEAST))
    for name in ("toll_stream", "toll_stall", "toll_queue"):
        assert fair[name] == pytest.approx(plain[name])
    assert np.ptp(Toll().costs(request, view, BOTH)) == pytest.approx(0.0, abs=1e-9)


def test_long_contexts_go_together_for_the_least_mean_and_apart_for_fairness() -> None:
    """Of 8 streams with 12,000 tokens each and of 12 with 1,000: who takes the next long one?"""
    view, request = fleet((96_000, 12_000), (8, 12)), Request("r", 12_000, 100)
    assert LEAST.costs(request, view, BOTH).argmin() == 0
    assert Toll().costs(request, view, BOTH).argmin() == 1


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_fairness_that_is_no_number_from_nought_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"fairness is .*; it must be a number from 0"):
        TollParams(fairness=value)
