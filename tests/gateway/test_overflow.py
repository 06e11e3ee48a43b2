"""Overflow: a request that finds no worker free is served elsewhere, once, and not too early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.fleet.harness import Client, attached, text, until
from tests.gateway.stub import Script, Stub

from pigou.config import ControlConfig
from pigou.fleet.config import DeclaredModel
from pigou.gateway.config import Overflow

#: One stream at a time.
ONE = ControlConfig(max_inflight=1)


@asynccontextmanager
async def two(overflow: Overflow, **control: Any) -> AsyncIterator[tuple[Stub, Stub, Client]]:
    """Run a gateway of two models; the first overflows, and its worker holds what it gets."""
    full = Stub("full", model="ant", script=Script(held=asyncio.Event()))
    free = Stub("free", model="bee")
    models = (DeclaredModel(name="ant", overflow=overflow), DeclaredModel(name="bee"))
    async with attached(full, free, models=models, **control) as (_, client):
        await until(client, lambda rows: all(row["state"] == "up" for row in rows.values()))
        yield full, free, client


async def ask(client: Client, **body: Any) -> tuple[int, dict[str, str], Any]:
    wanted = {"model": "ant", "prompt": "x", "max_tokens": 2} | body
    async with client.session.post(client.url + "/v1/completions", json=wanted) as response:
        return response.status, dict(response.headers), await response.json()


async def test_a_request_that_waited_for_its_price_goes_to_the_other_model() -> None:
    async with two(Overflow(to="bee", price_s=0.3), control=ONE) as (full, free, client):
        first = asyncio.create_task(ask(client))
        while not full.seen:
            await asyncio.sleep(0.01)
        began = asyncio.get_running_loop().time()
        status, headers, reply = await ask(client)
        assert asyncio.get_running_loop().time() - began >= 0.3
        assert (status, reply["model"]) == (200, "bee")
        assert (headers["x-pigou-worker"], headers["x-pigou-overflow"]) == ("free", "ant")
        assert free.seen[-1].body["model"] == "bee"
        # A stream goes there as well, and one for several sequences.
        assert text(await client.reply(model="ant", max_tokens=3)) == " t0 t1 t2"
        status, _, reply = await ask(client, n=2)
        assert (status, len(reply["choices"])) == (200, 2)
        # One that is at its worker stays there, however long it takes.
        assert not first.done()
        assert full.script.held is not None
        full.script.held.set()
        status, headers, reply = await first
        assert (status, reply["model"]) == (200, "ant")
        assert "x-pigou-overflow" not in headers
        async with client.session.get(client.url + "/metrics") as response:
            page = await response.text()
        assert 'pigou_requests_overflowed_total{model_name="ant",to="bee"} 3.0' in page


async def test_what_is_refused_goes_at_once_and_bad_requests_go_nowhere() -> None:
    control = ControlConfig(max_inflight=1, max_queued=0)
    async with two(Overflow(to="bee", price_s=60.0), control=control) as (full, free, client):
        first = asyncio.create_task(ask(client))
        while not full.seen:
            await asyncio.sleep(0.01)
        status, _, reply = await asyncio.wait_for(ask(client), 60)
        assert (status, reply["model"]) == (200, "bee")
        before = len(free.seen)
        status, _, _ = await ask(client, cache_salt="")
        assert status == 400
        assert len(free.seen) == before
        first.cancel()


async def test_tenures_share_no_cached_prefix_in_another_fleet() -> None:
    far = Stub("far", model="ant")
    runner = await far.start()
    full = Stub("full", model="ant", script=Script(held=asyncio.Event()))
    models = (DeclaredModel(name="ant", overflow=Overflow(to=far.url, price_s=0.05)),)
    body = {"model": "ant", "prompt": "x", "max_tokens": 2}
    try:
        async with attached(full, models=models, control=ONE) as (_, client):
            url = client.url + "/v1/completions"
            held = [
                asyncio.create_task(
                    client.session.post(url, json=body, headers={"X-Pigou-Tenure-Principal": name})
                )
                for name in "abaab"
            ]
            while len(far.seen) < 4:
                await asyncio.sleep(0.01)
            salts = {request.body["cache_salt"] for request in far.seen}
            assert len(salts) == 2
            for task in held:
                task.cancel()
    finally:
        await runner.cleanup()


async def test_requests_go_to_another_fleet_and_do_not_overflow_there_again() -> None:
    far = Stub("far", model="ant")
    runner = await far.start()
    try:
        to = Overflow(to=far.url + "/v1", price_s=0.1, key="sesame")
        async with two(to, control=ONE) as (full, free, client):
            first = asyncio.create_task(ask(client))
            while not full.seen:
                await asyncio.sleep(0.01)
            status, headers, reply = await ask(client)
            assert (status, headers["x-pigou-overflow"]) == (200, "ant")
            assert reply["choices"][0]["text"] == " t0 t1"
            seen = far.seen[-1].headers
            assert (seen["x-pigou-overflow"], seen["authorization"]) == ("ant", "Bearer sesame")
            assert text(await client.reply(model="ant", max_tokens=3)) == " t0 t1 t2"
            # What overflowed from there waits here.
            url = client.url + "/v1/completions"
            body = {"model": "ant", "prompt": "x", "max_tokens": 2}
            again = asyncio.create_task(
                client.session.post(url, json=body, headers={"X-Pigou-Overflow": "ant"})
            )
            await asyncio.sleep(0.4)
            assert not again.done()
            await runner.cleanup()
            status, _, reply = await ask(client)
            assert status == 503
            assert "cannot be reached" in reply["error"]["message"]
            assert full.script.held is not None
            full.script.held.set()
            assert (await again).status == 200
            assert (await first)[0] == 200
            assert not free.seen
    finally:
        await runner.cleanup()
