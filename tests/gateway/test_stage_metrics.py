"""Laws of the stages' histograms, and of the two kinds of stalls."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.gateway.stub import Fleet, Script, Stub, serving
from tests.gateway.test_stalled import WIDE, paused

from pigou.gateway.metrics import MIN_STALL_S, STALL_RATIO, StageMetrics
from pigou.metric_rows import MetricSet
from pigou.request import SECOND, Role


async def scrape(fleet: Fleet) -> dict[str, float]:
    """Return the sums of the samples of each name; of the stalls also by cause."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(fleet.url + "/metrics") as response,
    ):
        page = await response.text()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            cause = sample.labels.get("cause", "")
            name = f"{sample.name}:{cause}" if cause else sample.name
            sums[name] = sums.get(name, 0.0) + sample.value
    return sums


async def ask(fleet: Fleet, **body: object) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.post(fleet.url + "/v1/completions", json={"prompt": "x" * 80, **body}) as response,
    ):
        await response.read()
        return response.status


def stalls(metrics: StageMetrics) -> dict[str, float]:
    (family,) = (each for each in metrics._stalls.collect())
    return {s.labels["cause"]: s.value for s in family.samples if s.name.endswith("_total")}


async def test_each_stage_of_a_request_is_observed_once_and_within_its_duration() -> None:
    prefill, decode = Stub("p", Role.PREFILL), Stub("d", Role.DECODE, script=Script(delay_s=0.01))
    async with serving(prefill, decode) as fleet:
        assert await ask(fleet, stream=True, max_tokens=4) == 200
        sums = await scrape(fleet)
    for stage in ("queue_wait", "transfer", "delivery"):
        assert sums[f"pigou_{stage}_seconds_count"] == 1, stage
    total = sums["pigou_prefill_leg_seconds_sum"] + sums["pigou_queue_wait_seconds_sum"]
    total += sums["pigou_transfer_seconds_sum"]
    assert 0.01 < total <= sums["pigou_request_duration_seconds_sum"]
    assert sums["pigou_transfer_seconds_sum"] >= 0.01  # the decode worker's own delay


async def test_a_request_of_one_leg_has_no_transfer_and_a_whole_reply_no_delivery() -> None:
    async with serving(Stub("a")) as fleet:
        assert await ask(fleet, max_tokens=2) == 200
        sums = await scrape(fleet)
    assert sums["pigou_queue_wait_seconds_count"] == 1
    assert sums["pigou_transfer_seconds_count"] == sums["pigou_delivery_seconds_count"] == 0


async def test_the_time_in_which_bytes_wait_for_a_client_is_its_delivery() -> None:
    async with serving(Stub("a", script=WIDE), client_timeout=60) as fleet:
        reader, writer = await paused(fleet, 60_000)
        await asyncio.sleep(0.3)
        while not (await reader.read(400_000)).endswith(b"0\r\n\r\n"):
            pass
        writer.close()
        await fleet.settle(5.0)
        sums = await scrape(fleet)
    assert sums["pigou_delivery_seconds_count"] == 1
    assert sums["pigou_delivery_seconds_sum"] >= 0.25


@pytest.mark.parametrize("cause", ["client", "engine"])
async def test_a_pause_is_its_makers_alone(cause: str) -> None:
    """The engine's pause is between tokens; the client's is one of reading, tokens being there."""
    script = Script(delay_s=0.35) if cause == "engine" else WIDE
    async with serving(Stub("a", script=script), client_timeout=60) as fleet:
        for _ in range(200):
            fleet.metrics.stages.gap(0.005)
        if cause == "engine":
            await ask(fleet, stream=True, max_tokens=2)
        else:
            reader, writer = await paused(fleet, 60_000)
            await asyncio.sleep(0.4)
            while not (await reader.read(400_000)).endswith(b"0\r\n\r\n"):
                pass
            writer.close()
            await fleet.settle(5.0)
        sums = await scrape(fleet)
    other = {"client": "engine", "engine": "client"}[cause]
    assert sums[f"pigou_stream_stalls_total:{cause}"] >= 1
    assert sums[f"pigou_stream_stall_seconds_total:{cause}"] >= 0.3
    assert sums[f"pigou_stream_stalls_total:{other}"] == 0


def test_the_running_median_comes_near_the_median_and_a_stall_is_above_ten_times_it() -> None:
    metrics = StageMetrics(MetricSet())
    gaps = [0.01, 0.02, 0.03, 0.02, 0.015] * 200
    for gap in gaps:
        metrics.gap(gap)
    assert metrics.typical_itl_s == pytest.approx(0.02, rel=0.1)
    limit = STALL_RATIO * metrics.typical_itl_s
    metrics.gap(0.9 * limit)
    assert stalls(metrics) == {"client": 0, "engine": 0}
    metrics.gap(1.2 * limit)
    metrics.client_blocked(int(1.2 * limit * SECOND))
    assert stalls(metrics) == {"client": 1, "engine": 1}


def test_no_pause_counts_that_nobody_sees_or_before_the_median_is_known() -> None:
    metrics = StageMetrics(MetricSet())
    metrics.gap(0.02)
    metrics.gap(5.0)
    metrics.client_blocked(5 * SECOND)
    for _ in range(500):
        metrics.gap(0.001)
    metrics.gap(0.9 * MIN_STALL_S)
    assert stalls(metrics) == {"client": 0, "engine": 0}
