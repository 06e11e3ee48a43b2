"""Laws of what the toll policy makes of the prompts before one: who would come, and the tail."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_fleet import Ideal, ModelFleet, poisson

from pigou.config import ControlConfig
from pigou.control.latency_model.arrivals import FleetRate
from pigou.control.latency_model.estimates import Estimates
from pigou.control.plane import ControlPlane
from pigou.control.routing.policy import CostTable
from pigou.control.routing.toll.policy import Toll, TollParams
from pigou.control.routing.toll.queue import delay_weight, joining_share, toll_limit
from pigou.control.routing.toll.tail import RecentPrompts, patience_s, rank_weight, wait_tail
from pigou.control.routing.view import Candidates, FleetView
from pigou.games.latency import LatencyLaw
from pigou.request import Request, Role

LAW = LatencyLaw(0.0008, 0.02)
WAYS = Candidates(np.array([0, -1], np.int32), np.array([1, 1], np.int32))
SIZES = st.lists(st.integers(1, 5).map(float), min_size=1, max_size=40)


def view(queue: int = 0, prompts: int = 0) -> FleetView:
    """A prefill worker with a queue, and a decode worker with streams."""
    known = Estimates.prior(2, LAW)
    known.mean_prefill[:], known.fleet_arrivals[:] = 0.1, 5.0
    return FleetView.of(
        2, estimates=known, output=100.0, prefills=np.array([True, False]),
        decodes=np.array([False, True]), prefill_requests=[prompts, 0],
        prefill_tokens=[queue, 0], decode_requests=[0, 9],
    )  # fmt: skip


@given(SIZES)
def test_the_tail_weighs_a_third_in_the_mean_whatever_the_sizes(sizes: list[float]) -> None:
    weights = [
        rank_weight(size, np.array(sizes[:i] + sizes[i + 1 :])) for i, size in enumerate(sizes)
    ]
    assert np.mean(weights) == pytest.approx(1 / 3)


@given(SIZES, st.floats(0.5, 5.5), st.floats(0.5, 5.5))
def test_the_longer_prompt_weighs_at_least_as_much(sizes: list[float], a: float, b: float) -> None:
    short, long = sorted((a, b))
    assert (
        0.0
        < rank_weight(short, np.array(sizes))
        <= rank_weight(long, np.array(sizes))
        <= 10.0 / 3.0
    )


@given(st.lists(st.floats(-2, 4), min_size=1, max_size=30), st.floats(0.01, 5))
def test_who_would_come_is_a_mean_over_the_queue(reaches: list[float], wait: float) -> None:
    at = (np.arange(4000) + 0.5) / 4000 * wait
    share = (np.array(reaches)[None, :] > at[:, None]).mean()
    assert joining_share(wait, np.array(reaches)) == pytest.approx(share, abs=1e-3)


def test_everybody_would_come_to_an_empty_queue_and_of_whom_nothing_is_known() -> None:
    assert joining_share(0.0, np.array([-1.0])) == joining_share(3.0, np.zeros(0)) == 1.0


def test_who_waits_for_its_reach_is_as_well_off_elsewhere() -> None:
    """Elsewhere is a worker that has 0.3 s of prompts to compute before this one."""

    def ways(wait: float) -> CostTable:
        known = Estimates.prior(3, LAW)
        known.prefill_base[:] = 0.0
        fleet = FleetView.of(
            3, estimates=known, output=100.0, prefills=np.array([True, False, False]),
            decodes=np.array([False, True, True]), prefill_requests=[1, 0, 1],
            prefill_tokens=[round(wait / 1e-4), 0, 3000],
        )  # fmt: skip
        found = Candidates(np.array([0, -1], np.int32), np.array([1, 2], np.int32))
        return Toll(TollParams(toll=0.0)).table(Request("r", 500, 100), fleet, found)

    far = patience_s(WAYS.prefill, ways(0.0).rows)
    table = ways(far)
    remote, local = table.total - table.parts["tail"]
    assert far > 0.2
    assert remote == pytest.approx(local, abs=1e-4)


def test_a_prompt_without_a_choice_has_no_reach() -> None:
    only = Candidates(np.array([0], np.int32), np.array([1], np.int32))
    found = Toll().table(Request("r", 500, 100), view(), only)
    assert math.isnan(patience_s(only.prefill, found.rows))
    recent = RecentPrompts()
    recent.record(3.0, math.nan)
    assert recent.sizes.tolist() == [3.0]
    assert recent.patience.tolist() == []


@given(st.floats(0, 5), st.floats(0.01, 2), st.floats(0.01, 50), st.floats(-1, 10))
def test_no_queue_is_dearer_than_what_the_next_prompt_gains_by_it(
    wait: float, mean: float, rate: float, gain: float
) -> None:
    found = toll_limit(wait, mean, rate, gain)
    assert 0.0 <= found <= max(0.0, gain)
    assert toll_limit(wait + 0.5, mean, 0.5 / mean, gain) <= toll_limit(
        wait, mean, 0.5 / mean, gain
    )
    assert toll_limit(wait, mean, rate, gain + 1.0) >= found
    if rate * mean < 1.0:  # whoever comes a gap later would have waited less by that
        assert found == pytest.approx(max(0.0, gain - max(0.0, wait - 1.0 / rate)))


def test_a_worker_that_would_be_idle_until_the_next_prompt_costs_this_one_less() -> None:
    assert toll_limit(0.0, 1.0, 1.25, 4.0) == pytest.approx(4.0 * (1 - 0.8))
    assert toll_limit(0.8, 1.0, 1.25, 4.0) == pytest.approx(4.0 * (1 - 0.8 * math.exp(-1)))
    assert toll_limit(4.8, 1.0, 1.25, 4.0) == pytest.approx(0.0)


def test_a_queue_is_never_dearer_than_the_way_round_it() -> None:
    """However many would come: the next of them may go local, with 9 streams of which each waits.

    Local is 0.1 s for the prompt, and as much for each stream; bringing it takes 5.950 ms less.
    """
    toll, request = Toll(), Request("r", 950, 100)
    for waiting in (1000, 4000, 20_000):
        fleet = view(waiting, 1)
        known = fleet.estimates
        known.fleet_arrivals[:], known.arrival_cv2[:], known.prefill_cv2[:] = 50.0, 0.0, 0.0
        found = toll.parts(request, fleet, WAYS)
        wait = found["wait"][0]
        gain = 10 * 0.1 - 0.00595 - 0.1 - (wait - 0.02)
        idle = math.exp(-50.0 * wait) * 0.02
        assert found["toll_queue"][0] == pytest.approx(max(0.0, gain) * (1 - idle / 0.1), abs=1e-9)


def test_the_fewer_would_come_the_less_a_place_in_the_queue_costs() -> None:
    toll, request, fleet = Toll(), Request("r", 500, 100), view(4000, 4)
    before = toll.parts(request, fleet, WAYS)["toll_queue"][0]
    for _ in range(64):
        toll.recent_prompts.record(500.0, 0.0)  # would go elsewhere at once
        toll.recent_prompts.record(500.0, 10.0)
    after = toll.parts(request, fleet, WAYS)["toll_queue"][0]
    for _ in range(128):
        toll.recent_prompts.record(500.0, 0.0)
    assert 0.0 == toll.parts(request, fleet, WAYS)["toll_queue"][0] < after < before


def test_the_tail_is_a_share_of_the_time_to_the_first_token() -> None:
    toll, request, fleet = Toll(TollParams(fairness=0.0)), Request("r", 500, 100), view(1000, 1)
    for size in (100.0, 200.0, 900.0):
        toll.recent_prompts.record(size, math.nan)
    parts = toll.parts(request, fleet, WAYS)
    share = (0.75**10 - 0.5**10) / (3 * 0.25)
    first = parts["wait"] + parts["prefill"] + parts["transfer"]
    extra = [wait_tail(each, 0.2) for each in parts["wait"]]
    assert extra[0] > extra[1] == 0.0
    assert parts["tail"] == pytest.approx(share * first + extra)


@given(st.floats(0, 20), st.floats(0.01, 5))
def test_the_tail_of_a_wait_is_what_it_adds_to_the_longest_of_ten(
    wait: float, scale: float
) -> None:
    times = np.linspace(0.0, wait, 2001)
    longest = (1.0 - np.exp(-times / scale)) ** 9 * 10 / 3
    assert wait_tail(wait, scale) == pytest.approx(np.trapezoid(longest, times), rel=1e-3, abs=1e-9)


@given(st.floats(0.01, 20), st.floats(0.001, 5), st.floats(0.05, 5))
def test_others_who_are_delayed_count_as_the_tail_counts_the_waits_that_they_come_to(
    wait: float, delay: float, scale: float
) -> None:
    times = np.linspace(delay, wait + delay, 2001)
    longest = (1.0 - np.exp(-times / scale)) ** 9 * 10 / 3
    found = delay_weight(wait, delay, scale)
    assert found == pytest.approx(4 / 3 + np.trapezoid(longest, times) / wait, rel=1e-3)
    assert 4 / 3 <= found <= 4 / 3 + 10 / 3 + 1e-9


def test_prices_alone_change_no_price() -> None:
    toll, fleet = Toll(), view(1000, 1)
    first = toll.costs(Request("r", 500, 100), fleet, WAYS).tolist()
    for size in range(100, 2000, 100):
        toll.costs(Request(str(size), size, 100), fleet, WAYS)
    assert toll.costs(Request("s", 500, 100), fleet, WAYS).tolist() == first


def test_explaining_decisions_changes_none() -> None:
    served = []
    for most in (0, 100):
        plane = ControlPlane(ControlConfig(policy="toll", max_decisions=most))
        fleet = {Role.PREFILL: [Ideal(LAW)], Role.DECODE: [Ideal(LAW)] * 2}
        model = ModelFleet(plane, fleet)
        model.run(poisson(8, 20, 1, (200, 4000), (50, 150)))
        served.append(plane.tracker.state.columns.served.tolist())
    assert served[0] == served[1]


@given(st.floats(0.01, 5))
def test_the_rate_of_a_fleet_is_that_of_its_gaps(gap: float) -> None:
    rate = FleetRate()
    for _ in range(1000):
        rate.observe(gap)
    assert rate.per_second == pytest.approx(1 / gap, rel=0.01)


def test_a_quiet_night_counts_for_ten_seconds() -> None:
    night, rest = FleetRate(), FleetRate()
    for rate, gap in ((night, 30_000.0), (rest, 10.0)):
        rate.observe(0.01)
        rate.observe(gap)
    assert night.per_second == rest.per_second
