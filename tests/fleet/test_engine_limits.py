"""Operating points on live workers: a regime's limits are in force at each engine, and shown."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from tests.fleet.harness import Client, attached, running, text, until
from tests.gateway.stub import Stub

from pigou.config import ControlConfig
from pigou.fleet.live_fleet import LiveFleet
from pigou.fleet.serve import Serving
from pigou.request import SECOND, EngineLimits, Role
from pigou.workload.journal_file import lines
from pigou.workload.journal_replay import replay_journal

WORKER = ("--executor", "sleep", "--sleep-base", "5000000", "--repeat", "1", "--max-seqs", "16",
          "--max-batched-tokens", "512", "--rehearse", "0")  # fmt: skip
POINTS = {
    "light": {"params": {"urgency": 4.0}},
    "heavy": {"temperature": 0.25, "max_seqs": 2, "max_batched_tokens": 64},
}
#: Sees a queue within a second, and its end by a second without work.
DETECTOR = {"detector": "cusum", "arl0": 60 * SECOND, "span": 1.0, "idle": SECOND}
Rows = dict[str, dict[str, Any]]


def limited(max_seqs: int, tokens: int, count: int) -> Callable[[Rows], bool]:
    """Whether so many workers are up, and all have these limits."""
    wanted = {
        "max_seqs": max_seqs, "max_batched_tokens": tokens, "kv_quotas": None, "refused": None,
    }  # fmt: skip

    def law(rows: Rows) -> bool:
        up = [row for row in rows.values() if row["state"] == "up"]
        return len(up) == count and all(row["limits"] == wanted for row in up)

    return law


async def game(client: Client) -> dict[str, Any]:
    async with client.session.get(client.url + "/workers") as response:
        return dict((await response.json())["game"])


async def seen_at(serving: Serving) -> list[Any]:
    """Return what the workers say of their limits, to those who know the fleet's secret."""
    ups = serving.plane_driver.upstreams.values()
    pages = [await upstream.get("/server_info", 5.0) for upstream in ups]
    return [msgspec.json.decode(page)["limits"] for _, page in pages]


async def until_regime(client: Client, holds: Callable[[str], bool]) -> dict[str, Any]:
    """Wait until the regime is so; return what the gateway shows of the game."""
    for _ in range(1200):
        if holds((shown := await game(client))["regime"]):
            return shown
        await asyncio.sleep(0.05)
    raise AssertionError(shown)


async def test_a_regime_s_point_reaches_every_engine_and_one_that_joins_and_goes_again(
    tmp_path: Path,
) -> None:
    journal = tmp_path / "journal.jsonl"
    control = ControlConfig(operating_points=POINTS, saturation=DETECTOR)
    async with running(
        0, 0, 2, control=control, arguments=WORKER, template=WORKER, journal=journal
    ) as (serving, client):
        for _ in range(10):  # what a prompt takes without a queue is learned
            text(await client.reply(max_tokens=2))
        shown = await until_regime(client, "below".__eq__)
        assert shown["operating_point"] == POINTS["light"]
        assert shown["parameters"]["urgency"] == 4.0
        await until(client, lambda rows: all(row["limits"] is None for row in rows.values()))

        over = asyncio.Event()
        flood = [asyncio.create_task(_ask(client, over)) for _ in range(64)]
        await until(client, limited(2, 64, 2))
        shown = await until_regime(client, "below".__ne__)
        assert shown["operating_point"] == POINTS["heavy"]
        assert (shown["temperature"], shown["parameters"]["urgency"]) == (0.25, 2.0)
        assert serving.plane_driver.plane.state.columns.max_seqs.tolist() == [2, 2]
        assert await seen_at(serving) == [{"max_seqs": 2, "max_batched_tokens": 64}] * 2
        url = next(iter(serving.plane_driver.upstreams.values())).worker.url
        async with client.session.post(url + "/limits", json={"max_seqs": 1}) as response:
            assert response.status == 401
        async with client.session.get(client.url + "/metrics") as response:
            metrics = await response.text()
        line = re.search(r'pigou_worker_max_batched_tokens{.*worker="both-0".*} (.*)', metrics)
        assert line is not None
        assert line[1] == "64.0"
        status, _ = await client.post("/workers", role="both")
        assert status == 202
        await until(client, limited(2, 64, 3))

        live = LiveFleet(serving.supervisor)
        live.set_limits("both", 3, None, 0)  # a planner's go first
        await until(client, limited(3, 64, 3))
        over.set()
        await asyncio.gather(*flood)
        await until(client, limited(3, 512, 3))
        assert (await until_regime(client, "below".__eq__))["operating_point"] == POINTS["light"]
    assert replay_journal(lines(str(journal))).difference is None


async def _ask(client: Client, over: asyncio.Event) -> None:
    while not over.is_set():
        text(await client.reply(max_tokens=16))


async def test_an_engine_that_is_not_pigou_s_gets_fewer_streams_and_says_what_it_keeps() -> None:
    async with attached(Stub("vllm-0", stock=True)) as (serving, client):
        driver = serving.plane_driver
        driver.limits.set_fleet(EngineLimits(3, 64))
        rows = await until(client, lambda rows: rows["vllm-0"]["limits"] is not None)
        assert rows["vllm-0"]["limits"] == {
            "max_seqs": 3, "max_batched_tokens": None, "kv_quotas": None,
            "refused": "its engine keeps the limits that it was started with",
        }  # fmt: skip
        assert driver.plane.state.columns.max_seqs.tolist() == [3]
        driver.flip("vllm-0", Role.PREFILL)  # its prompts stall no stream
        await until(client, lambda rows: not any(rows["vllm-0"]["limits"].values()))
        driver.flip("vllm-0", Role.BOTH)
        await until(client, lambda rows: rows["vllm-0"]["limits"]["max_seqs"] == 3)
        driver.limits.set_fleet(EngineLimits())
        await until(client, lambda rows: not any(rows["vllm-0"]["limits"].values()))
        assert driver.plane.state.columns.max_seqs.tolist() == [0]
