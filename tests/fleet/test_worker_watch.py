"""Laws of liveness over whole fleets: slow workers are left alone, hung ones are replaced."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web
from tests.fleet.harness import PROMPT, SLEEP, WATCH, Client, running, text
from tests.fleet.test_attached_member import attached, until
from tests.gateway.stub import Script, Stub, whole_text

#: A worker that does not progress for a second is hung, and 10 ms for each token of its step.
QUICK = msgspec.structs.replace(WATCH, hang=1.0)
#: A prompt of 100 tokens takes 4 seconds: four times the limit, tokens included twice.
SLOW_PREFILL = (*SLEEP, "--sleep-prefill-rate", "25")


@dataclass
class Beating(Stub):
    """A worker of Pigou that says of its engine what it is told to."""

    engine: dict[str, Any] = field(default_factory=lambda: {"busy": False, "beats": 0})
    moves: bool = False

    async def _tell(self, request: web.Request) -> web.Response:
        if request.path != "/health":
            return await super()._tell(request)
        self.engine["beats"] += self.moves
        return web.json_response({"status": "ok", "engine": self.engine}, status=self.health)


async def restarts(client: Client) -> int:
    return sum(row["restarts"] for row in (await client.workers()).values())


async def test_a_prefill_that_outlasts_the_limit_kills_no_worker() -> None:
    async with running(0, 0, 1, watch=QUICK, arguments=SLOW_PREFILL) as (_, client):
        assert text(await client.reply(prompt=list(range(300, 400)), max_tokens=2))
        assert await restarts(client) == 0


async def test_a_whole_reply_that_outlasts_the_limit_kills_no_worker() -> None:
    async with running(0, 0, 1, watch=QUICK) as (_, client):
        status, reply = await client.post(
            "/v1/completions", prompt=PROMPT, max_tokens=100, ignore_eos=True
        )
        assert (status, reply["usage"]["completion_tokens"]) == (200, 100)
        assert await restarts(client) == 0


async def test_a_stream_that_brings_nothing_does_not_condemn_an_engine_that_works() -> None:
    stub = Beating("a", script=Script(held=asyncio.Event()), moves=True)
    stub.engine["busy"] = True
    async with attached(stub, watch=msgspec.structs.replace(WATCH, hang=0.4)) as (_, client):
        task = asyncio.create_task(client.reply(max_tokens=3, ignore_eos=None))
        begun = stub.engine["beats"]
        while stub.engine["beats"] < begun + 10:  # looks, five times the limit together
            await asyncio.sleep(0.05)
        stub.script.held.set()  # type: ignore[union-attr]
        assert text(await task) == whole_text(3)
        assert await restarts(client) == 0


async def test_a_whole_reply_of_a_stock_server_with_still_counters_is_waited_for() -> None:
    held = asyncio.Event()
    stubs = [Stub(name, stock=True, script=Script(held=held)) for name in "ab"]
    async with attached(*stubs, watch=msgspec.structs.replace(WATCH, hang=0.4)) as (_, client):
        task = asyncio.create_task(client.post("/v1/completions", prompt="a", max_tokens=3))
        await asyncio.sleep(2.0)  # five times the limit
        assert [row["state"] for row in (await client.workers()).values()] == ["up", "up"]
        held.set()
        assert (await task)[0] == 200
        assert await restarts(client) == 0
        assert sum(len(stub.seen) for stub in stubs) == 1, "it was not sent again"


async def test_a_stream_of_a_stock_server_with_still_counters_goes_on_elsewhere() -> None:
    stuck = Stub("a", stock=True, script=Script(hang_after=1, times=1))
    well = Stub("b", stock=True, script=stuck.script)
    async with attached(stuck, well, watch=msgspec.structs.replace(WATCH, hang=0.4)) as (_, client):
        assert text(await client.reply(max_tokens=3, ignore_eos=None, temperature=0))


async def test_an_engine_that_says_itself_that_it_stands_still_is_left() -> None:
    stuck = Beating("a", script=Script(hang_after=1), engine={"busy": True, "beats": 5})
    well = Beating("b", script=Script(hang_after=1, times=0))
    watch = msgspec.structs.replace(WATCH, hang=0.5)
    async with attached(stuck, well, watch=watch) as (_, client):
        await until(client, lambda rows: rows["a"]["restarts"] or rows["a"]["state"] == "down")
        assert (await client.workers())["b"]["state"] == "up"
        assert text(await client.reply(max_tokens=4, ignore_eos=None)) == whole_text(4)


async def test_workers_that_stand_still_together_for_a_while_are_left_alone() -> None:
    async with running(0, 0, 2) as (_, client):
        expected = text(await client.reply())
        task = asyncio.create_task(client.reply())
        pids = [row["pid"] for row in (await client.workers()).values()]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(2 * WATCH.failures * (WATCH.every + WATCH.timeout))
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        assert text(await task) == expected
        rows = (await client.workers()).values()
        assert [(row["restarts"], row["pid"]) for row in rows] == [(0, pid) for pid in pids]


async def test_one_worker_that_is_stopped_is_replaced_and_its_stream_goes_on() -> None:
    async with running(0, 0, 2) as (_, client):
        expected = text(await client.reply())
        chunks: list[dict[str, Any]] = []
        async for chunk in client.stream():
            chunks.append(chunk)
            if len(chunks) == 3:
                rows = (await client.workers()).values()
                os.kill(next(r["pid"] for r in rows if r["decode_requests"]), signal.SIGSTOP)
        assert text(chunks) == expected
        await until(client, lambda rows: sum(row["restarts"] for row in rows.values()) == 1)
