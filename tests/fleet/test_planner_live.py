"""A planner on a fleet of real processes: workers join and leave, and no stream is changed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fleet.harness import SLEEP, Client, running, text

from pigou.control.planner.config import PlannerConfig
from pigou.workload.journal_file import lines
from pigou.workload.journal_replay import replay_journal

ONE_READY = {"ready": 1, "starting": 0, "draining": 0}


async def plan(client: Client) -> dict[str, Any]:
    async with client.session.get(client.url + "/plan") as response:
        assert response.status == 200
        return dict(await response.json())


async def until_plan(client: Client, holds: Callable[[Any], bool]) -> dict[str, Any]:
    """Wait until the plan is so; return it."""
    for _ in range(1200):
        if holds(view := await plan(client)):
            return view
        await asyncio.sleep(0.05)
    raise AssertionError(f"the plan is {view}")


async def until_states(client: Client, **wanted: int) -> dict[str, dict[str, Any]]:
    """Wait until so many workers are in each state; return their rows."""
    for _ in range(1200):
        rows = await client.workers()
        states = [row["state"] for row in rows.values()]
        if all(states.count(state) == count for state, count in wanted.items()):
            return rows
        await asyncio.sleep(0.05)
    raise AssertionError(f"{wanted} are not reached: {rows}")


async def follow(client: Client, until: asyncio.Event, words: str) -> list[str]:
    """Ask for the same stream again and again; return the texts."""
    texts = []
    while not until.is_set():
        texts.append(text(await client.reply(prompt=words * 30, max_tokens=30, temperature=0)))
    return texts


async def test_workers_join_after_kills_and_streams_and_decisions_stay_the_same(
    tmp_path: Path,
) -> None:
    journal = tmp_path / "journal.jsonl"
    planner = PlannerConfig(
        slo="ttft=5,itl=1", planner={"planner": "static", "workers": 2}, max_workers=2,
        interval_s=0.3,
    )  # fmt: skip
    async with running(0, 0, 1, arguments=SLEEP, planner=planner, journal=journal) as (_, client):
        right = text(await client.reply(prompt="a " * 30, max_tokens=30, temperature=0))
        over = asyncio.Event()
        streams = [asyncio.create_task(follow(client, over, "a ")) for _ in range(3)]
        rows = await until_states(client, up=1, starting=1)
        (starting,) = (row for row in rows.values() if row["state"] == "starting")
        if starting["pid"]:
            os.kill(starting["pid"], signal.SIGKILL)
        rows = await until_states(client, up=2)
        view = await until_plan(client, lambda view: view["replicas"]["both"]["ready"] == 2)
        assert view["planner"] == "static"
        assert view["moves"] == {"add_workers": 1}  # the one that was killed started again
        assert view["failures"] == 0
        # Somebody drains one by hand, and it is killed: the planner sees it go, and adds another.
        async with client.session.post(client.url + "/workers/both-1/drain") as response:
            assert response.status == 202, await response.text()
        os.kill(rows["both-1"]["pid"], signal.SIGKILL)
        await until_plan(client, lambda view: view["moves"] == {"add_workers": 2})
        over.set()
        for texts in await asyncio.gather(*streams):
            assert texts
            assert set(texts) == {right}
        slo = (await plan(client))["slo"]
        assert slo["attained"] == 1.0
    replay = replay_journal(lines(str(journal)))
    assert replay.difference is None
    assert replay.windows > 3


async def pace(client: Client, until: asyncio.Event) -> None:
    """Send a request every tenth of a second."""
    tasks = []
    while not until.is_set():
        tasks.append(asyncio.create_task(client.reply(prompt="a " * 30, max_tokens=5)))
        await asyncio.sleep(0.1)
    await asyncio.gather(*tasks)


async def test_price_keeps_what_somebody_adds_and_does_not_replace_what_somebody_drains() -> None:
    planner = PlannerConfig(
        slo="ttft=5,itl=1", planner={"planner": "price", "hold_s": 1}, max_workers=3,
        interval_s=0.3, start_up=1.0,
    )  # fmt: skip

    async def seconds_later(seconds: float) -> dict[str, Any]:
        last = (await plan(client))["series"]["time"][-1]
        return await until_plan(client, lambda view: view["series"]["time"][-1] > last + seconds)

    async with running(0, 0, 1, arguments=SLEEP, planner=planner) as (_, client):
        over = asyncio.Event()
        load = asyncio.create_task(pace(client, over))
        await until_plan(client, lambda view: len(view["series"]["time"]) > 5)
        status, _ = await client.post("/workers", role="both", count=1)
        assert status == 202
        await until_states(client, up=2)
        view = await seconds_later(2)  # twice `hold_s`
        assert (view["moves"], view["replicas"]["both"]["ready"]) == ({}, 2)
        status, _ = await client.change("POST", "/workers/both-1/drain")
        assert status == 202
        await until_plan(client, lambda view: view["replicas"]["both"] == ONE_READY)
        view = await seconds_later(1.5)
        assert (view["moves"], view["replicas"]["both"]) == ({}, ONE_READY)
        over.set()
        await load
