"""The page's history: bounded, sampled by the server, its quantiles those of the histograms."""

from __future__ import annotations

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub import Stub, serving

from pigou.config import ControlConfig
from pigou.control.plane import ControlPlane
from pigou.diagnosis.metric_pages import quantile_of
from pigou.gateway.api.dashboard import ASSETS, MAX_EVENTS, MAX_SAMPLES, STEP_S, History
from pigou.gateway.fleet_status import FleetStatus, WorkerRow
from pigou.gateway.metrics import Metrics
from pigou.gateway.plane_driver import PlaneDriver


class Fleet:
    """One worker whose row, and a clock that one can set."""

    def __init__(self) -> None:
        self.row = WorkerRow(id="a", url="", role="both", state="starting", kind="local")
        self.metrics = Metrics()
        self.now = 1000.0
        rows = lambda: [self.row]  # noqa: E731
        fleet_status = FleetStatus(PlaneDriver(ControlPlane(ControlConfig())), rows)
        self.history = History(fleet_status, self.metrics, [self.metrics], lambda: self.now)

    def step(self) -> None:
        self.now += STEP_S
        self.history.sample()


async def test_the_history_is_bounded_and_told_from_a_time_on() -> None:
    fleet = Fleet()
    for number in range(MAX_SAMPLES + 50):
        fleet.row.state = "up" if number % 2 else "down"
        fleet.step()
    view = fleet.history.view()
    assert {len(column) for column in view["series"].values()} == {MAX_SAMPLES}
    assert len(view["events"]) == MAX_EVENTS
    last = view["series"]["time"][-1]
    late = fleet.history.view(last - 2 * STEP_S)
    assert late["series"]["time"] == view["series"]["time"][-2:]
    nothing = fleet.history.view(last)
    assert nothing["series"]["time"] == nothing["events"] == []


async def test_each_restart_and_state_is_an_event_once() -> None:
    fleet = Fleet()
    changes = [("starting", 0), ("up", 0), ("up", 0), ("backoff", 0), ("starting", 1), ("up", 1)]
    for state, restarts in changes:
        fleet.row.state, fleet.row.restarts = state, restarts
        fleet.step()
    kinds = [event["kind"] for event in fleet.history.view()["events"]]
    assert kinds == ["up", "down", "restart", "up"]
    assert fleet.history.view()["totals"]["restarts"] == 1


async def test_rates_and_latencies_are_those_since_the_last_sample() -> None:
    fleet = Fleet()
    fleet.step()
    for _ in range(10):
        fleet.metrics.first_token.observe(0.3)
        fleet.metrics.itl.observe(0.02)
    fleet.metrics.requests.labels("/v1/completions", "200").inc(6)
    fleet.metrics.requests.labels("/v1/completions", "502").inc(2)
    fleet.metrics.requests.labels("/metrics", "500").inc(9)
    fleet.step()
    fleet.step()
    series = fleet.history.view()["series"]
    assert series["requests_per_s"] == [None, 8 / STEP_S, 0]
    assert series["errors_per_s"] == [None, 2 / STEP_S, 0]
    assert series["ttft_p50_s"][0] is series["ttft_p50_s"][2] is None
    assert 0.25 <= series["ttft_p50_s"][1] <= 0.5
    assert 0.015 <= series["itl_p95_s"][1] <= 0.02


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4), st.floats(0.01, 1))
def test_a_quantile_lies_in_its_bucket(counts: list[int], share: float) -> None:
    bounds = [0.1, 1.0, 10.0, float("inf")]
    cumulative = {bound: sum(counts[: i + 1]) for i, bound in enumerate(bounds)}
    found = quantile_of(cumulative, share)
    if not sum(counts):
        assert found is None
        return
    index = next(i for i, b in enumerate(bounds) if cumulative[b] >= share * sum(counts))
    assert found is not None
    low = 0.0 if index == 0 else bounds[index - 1]
    assert low <= found <= min(bounds[index], 10.0)


async def test_the_page_and_its_files_run_nothing_within_or_from_elsewhere() -> None:
    async with serving(Stub("a")) as fleet, aiohttp.ClientSession(fleet.url) as session:
        for path in ASSETS:
            async with session.get(path) as reply:
                text, policy = await reply.text(), reply.headers["content-security-policy"]
                assert reply.status == 200
            assert "unsafe" not in policy
            if path == "/":
                assert "<script>" not in text
                assert " style=" not in text
            assert "http://" not in text.replace("http://www.w3.org", "")


@pytest.mark.parametrize("since", ["x", "1;2"])
async def test_a_time_that_is_none_is_refused(since: str) -> None:
    async with serving(Stub("a")) as fleet, aiohttp.ClientSession(fleet.url) as session:
        async with session.get("/history", params={"since": since}) as reply:
            assert (reply.status, (await reply.json())["error"]["param"]) == (400, "since")
        async with session.get("/history") as reply:
            assert (await reply.json())["step_s"] == STEP_S
