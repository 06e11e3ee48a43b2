"""Laws of attached servers: learnt, watched, left while they hang or are away, taken back."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from tests.fleet.harness import WATCH, attached, text, until
from tests.gateway.stub import Script, Stub, whole_text

from pigou.fleet.member import Backoff
from pigou.fleet.probe import ProbeFailed, probe, read_startup_profile
from pigou.fleet.worker_report import read_load
from pigou.request import Rehearsed
from pigou.wire.metrics_text import cache_config

PAGE = b"""# HELP vllm:num_requests_running Running.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:kv_cache_usage_perc 0.5
vllm:cache_config_info{block_size="128",num_gpu_blocks="None"} 1.0
vllm:broken nonsense
"""


def test_a_server_of_several_data_parallel_ranks_has_the_blocks_of_all() -> None:
    ranks = b"".join(
        b'vllm:kv_cache_usage_perc{engine="%d"} %f\n'
        b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="%d"} 1.0\n'
        % (rank, usage, rank)
        for rank, usage in enumerate((0.2, 0.6))
    )
    assert cache_config(ranks) == {"block_size": 16, "num_gpu_blocks": 200}
    assert read_load(ranks, "a").kv_usage == pytest.approx(0.4)


async def test_a_server_is_learnt_and_its_load_is_followed() -> None:
    stub = Stub("a", script=Script(hang_after=1))
    async with attached(stub) as (serving, client):
        (worker,) = serving.plane_driver.plane.state.workers
        assert (worker.block_size, worker.blocks) == (32, 77)
        task = asyncio.create_task(client.reply(ignore_eos=None))
        await until(
            client, lambda rows: rows["a"]["running"] == 1 and rows["a"]["kv_usage"] == 0.25
        )
        task.cancel()


@pytest.mark.parametrize("k", [0, 1, 7])
async def test_a_server_whose_streams_do_not_move_is_left_though_it_is_healthy(k: int) -> None:
    watch = msgspec.structs.replace(WATCH, hang=0.5)
    script = Script(hang_after=k, times=1)
    async with attached(Stub("a", script=script), Stub("b", script=script), watch=watch) as (
        _, client,
    ):  # fmt: skip
        chunks = await client.reply(max_tokens=12, ignore_eos=None)
        assert text(chunks) == whole_text(12)
        rows = await until(client, lambda rows: all(r["state"] == "up" for r in rows.values()))
        assert sum(row["restarts"] for row in rows.values()) == 1


async def test_an_unhealthy_server_is_left_and_taken_back() -> None:
    stub = Stub("a")
    async with attached(stub, Stub("b")) as (_, client):
        stub.health = 503
        await until(client, lambda rows: rows["a"]["state"] == "down")
        assert text(await client.reply(max_tokens=3, ignore_eos=None)) == whole_text(3)
        stub.health = 200
        await until(client, lambda rows: rows["a"]["state"] == "up")


@pytest.mark.parametrize("stock", [False, True])
async def test_what_a_worker_measured_is_known_of_it_and_of_no_stock_server(stock: bool) -> None:
    stub = Stub("a", stock=stock, about={"rehearsed": [[0, 4, 8, 0.02], [512, 4, 1, 0.035]]})
    told = (Rehearsed(0, 4, 8, 0.02), Rehearsed(512, 4, 1, 0.035))
    async with attached(stub) as (serving, _):
        (worker,) = serving.plane_driver.plane.state.workers
        assert worker.rehearsed == (() if stock else told)


@pytest.mark.parametrize("order", ["edf", "priority", "fcfs"])
async def test_what_a_worker_orders_by_is_known_of_it(order: str) -> None:
    async with attached(Stub("a", about={"order": order})) as (serving, _):
        (upstream,) = serving.plane_driver.upstreams.values()
        assert upstream.engine.deadlines == (order == "edf")
        assert upstream.engine.ranks == (order == "priority")


GOOD = [128, 0, 1, 0.005]


@pytest.mark.parametrize("wrong", [
    None, 3, "4444", {}, [], GOOD[:3], [*GOOD, 1], ["128", 0, 1, 0.005], [None, 0, 1, 0.005],
    [0, 0, 1, 0.005], [-1, 4, 1, 0.005], [128, -1, 1, 0.005], [128, 0, 0, 0.005],
    [128, 0, 1, 0], [128, 0, 1, -1.0], [128, 0, 1, float("nan")], [128, 0, 1, float("inf")],
    [1.5, 0, 1, 0.005], [True, 0, 1, 0.005], [10**400, 0, 1, 0.005], [[128], 0, 1, 0.005],
    [10**30, 0, 1, 0.005], [128, 10**9, 1, 0.005], [128, 0, 10**9, 1e5], [128, 0, 1, 1e-300],
    [128, 0, 1, 1e300],
])  # fmt: skip
def test_what_cannot_be_a_measurement_is_dropped(wrong: Any) -> None:
    assert read_startup_profile([wrong, GOOD, wrong]) == (Rehearsed(128, 0, 1, 0.005),)
    assert read_startup_profile(wrong) == ()


async def test_who_is_no_worker_is_no_worker() -> None:
    with pytest.raises(ProbeFailed):
        await probe("http://127.0.0.1:9", timeout_s=2)


def test_a_metrics_page_tells_load_summed_over_ranks() -> None:
    report = read_load(PAGE, "w")
    assert (report.running, report.waiting, report.kv_usage) == (5, 1, 0.5)
    assert cache_config(PAGE) == {"block_size": 128}
    assert read_load(b"", "w").running == 0


def test_a_backoff_doubles_until_its_limit_and_begins_anew_after_a_long_life() -> None:
    backoff = Backoff(1.0, 5.0)
    assert [backoff.failed(0) for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]
    assert backoff.failed(60) == 1.0


@pytest.mark.parametrize(
    ("lane", "seqs"),
    [("min_prompt=1000,tokens=64,seqs=2", 2), ("min_prompt=-1,tokens=1", 0), (["x"], 0), ("", 0)],
)
async def test_the_lane_for_long_prompts_is_the_workers_if_it_can_be_read(
    lane: object, seqs: int
) -> None:
    async with attached(Stub("a", about={"long_lane": lane})) as (serving, client):
        await until(client, lambda rows: rows["a"]["state"] == "up")
        known = serving.plane_driver.plane.state.lane
        assert (0 if known is None else known.seqs) == seqs
