"""Load windows: what requests of a window say of their class."""

from __future__ import annotations

import numpy as np
import pytest

from pigou.objectives import Objectives, Slo, WorkloadClass
from pigou.request import SECOND
from pigou.windows.builder import (
    ComputedPrompt,
    LoadMeter,
    MeteredRequest,
    MeteredWindow,
    WorkerCounts,
    latency_summary,
)


def request(name: str, at_s: int, **rest: object) -> MeteredRequest:
    base = MeteredRequest(name, 100, at_s * SECOND, at_s * SECOND)
    return base._replace(**rest)


def window(arrived: list[MeteredRequest], ended: list[MeteredRequest]) -> MeteredWindow:
    first = [one for one in ended if one.first_token_ns]
    return MeteredWindow(arrived, first, ended, {"": 7}, {"": 2}, {"": [30, 40]})


def test_refused_requests_are_arrivals_and_never_attain() -> None:
    meter = LoadMeter(Objectives(Slo(ttft_s=1.0)), "m")
    done = request("", 1, first_token_ns=2 * SECOND, ended_ns=4 * SECOND, output_tokens=5,
                   itl_ns=0.5 * SECOND, is_done=True, is_attained=True,
                   computed=ComputedPrompt("w", 100, 25))  # fmt: skip
    refused = request("", 2, ended_ns=2 * SECOND)
    (load,) = meter.loads(window([done, refused], [done, refused]))
    assert (load.model, load.arrivals, load.completed, load.attained) == ("m", 2, 1, 1)
    assert (load.isl, load.osl, load.hit_rate) == (100.0, 5.0, 0.75)
    assert (load.ttft.mean, load.itl.mean) == (1.0, 0.5)
    assert load.request_s == 1.5
    assert (load.queued, load.queued_tokens, load.in_flight) == (2, 70.0, 2)
    assert load.output_tokens == 7.0


def test_nothing_to_measure_is_none_and_no_arrivals_are_zero() -> None:
    (load,) = LoadMeter(Objectives()).loads(MeteredWindow([], [], [], {}, {}, {}))
    assert load.arrivals == 0
    assert load.isl is load.osl is load.hit_rate is load.ttft.mean is load.attained is None


def test_classes_are_loads_of_their_own() -> None:
    meter = LoadMeter(Objectives(None, (WorkloadClass(name="a"),)))
    loads = meter.loads(window([request("a", 1), request("a", 2), request("", 3)], []))
    assert {load.workload: load.arrivals for load in loads} == {"a": 2, "": 1}


@pytest.mark.parametrize("border_s", [3.0, 5.0, 1000.0])
@pytest.mark.parametrize("burst", [1, 8])
def test_arrivals_in_bursts_are_dispersed_by_their_size(border_s: float, burst: int) -> None:
    meter = LoadMeter(Objectives(Slo(ttft_s=4.0)))
    rng = np.random.default_rng(7)
    times = np.cumsum(rng.exponential(0.25, 8000))
    values = []
    for begin in np.arange(0.0, 2000.0, border_s):
        own = times[(times >= begin) & (times < begin + border_s)]
        arrived = [request("", 0)._replace(intended_ns=int(t * SECOND)) for t in own.repeat(burst)]
        (load,) = meter.loads(window(arrived, []))
        values.append(load.arrival_scv)
    assert np.mean([x for x in values if x is not None]) == pytest.approx(burst, rel=0.15)


def test_requests_that_their_client_withdrew_in_time_are_not_late() -> None:
    ended = [
        request("", 1, is_done=True, is_attained=True),
        request("", 1),
        request("", 1, is_offered=False),
    ]
    (load,) = LoadMeter(Objectives(Slo(ttft_s=1.0))).loads(window([], ended))
    assert (load.ended, load.completed, load.attained) == (2, 1, 1)


def test_a_percentile_is_the_smallest_value_with_its_share() -> None:
    summary = latency_summary([value * SECOND for value in range(1, 11)])
    assert (summary.mean, summary.p50, summary.p90, summary.p99) == (5.5, 5.0, 9.0, 10.0)


def test_means_of_a_worker_are_over_looks() -> None:
    counts = WorkerCounts()
    assert counts.mean_running is None
    counts.sample(2, 10)
    counts.sample(4, 30)
    counts.add_prompt(ComputedPrompt("w", 10, 4))
    assert (counts.mean_running, counts.mean_held_tokens) == (3.0, 20.0)
    assert counts.pairs == pytest.approx(4 * 8)


def test_prompts_that_were_given_up_count_with_the_seconds_that_they_took() -> None:
    counts = WorkerCounts()
    counts.observe_tokens(50.0)
    assert counts.tokens == 0  # of no prompt that ended
    counts.add_prompt(ComputedPrompt("w", 10, 4))
    counts.observe_tokens(None)
    counts.observe_tokens(6.0)
    assert (counts.prompts, counts.tokens) == (1, 6)
    assert counts.pairs == pytest.approx(6 * 8)
