"""The switch between frontends: nothing dropped, whatever the regime or the frontends do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from tests.peers.dynamo_fakes import FakeFrontend, ScriptedSteering

from pigou.config import ConfigError
from pigou.control.routing_controller import Parameters
from pigou.control.saturation.regime import Regime
from pigou_lab.dynamo_host.switch import Frontend, Switch, serve

COLD, WARM = Parameters(0.0, 1.0), Parameters(0.7, 1.0)


class Scene:
    """A switch before two fake frontends, and a client."""

    def __init__(self, cold: FakeFrontend, warm: FakeFrontend) -> None:
        self.cold, self.warm = cold, warm
        self.control = ScriptedSteering()
        self.switch = Switch([Frontend(cold.url, COLD), Frontend(warm.url, WARM)], self.control)
        self.url = ""
        self.session: aiohttp.ClientSession

    async def stream(self, **fields: Any) -> list[bytes]:
        body = {"stream": True, **fields}
        async with self.session.post(self.url + "/v1/completions", json=body) as reply:
            assert reply.status == 200
            assert reply.content_type == "text/event-stream"
            return (await reply.read()).split(b"\n\n")[:-1]


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    async with FakeFrontend("cold") as cold, FakeFrontend("warm") as warm:
        found = Scene(cold, warm)
        runner = await serve(found.switch, "127.0.0.1", 0)
        found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as found.session:
            yield found
        await runner.cleanup()


def whole(name: str) -> list[bytes]:
    return [b"data: %d %b" % (i, name.encode()) for i in range(4)] + [b"data: [DONE]"]


async def test_requests_go_to_the_frontend_of_the_regime() -> None:
    async with scene() as one:
        assert await one.stream() == whole("cold")
        one.control.to(Regime.TRANSITION)
        assert await one.stream() == whole("warm")
        one.control.to(Regime.BELOW)
        assert await one.stream() == whole("cold")
        assert (len(one.cold.requests), len(one.warm.requests)) == (2, 1)
        assert one.control.heard == ["arrived", "first", "ended"] * 3


async def test_a_regime_without_its_own_frontend_takes_the_nearest() -> None:
    async with scene() as one:
        one.control.to(Regime.SATURATED)
        assert await one.stream() == whole("warm")


async def test_a_request_in_flight_ends_where_it_began() -> None:
    async with scene() as one:
        one.cold.gate.clear()
        old = [asyncio.create_task(one.stream()) for _ in range(8)]
        while len(one.cold.requests) < 8:
            await asyncio.sleep(0.01)
        one.control.to(Regime.TRANSITION)
        assert await one.stream() == whole("warm")
        state = one.switch.status()
        assert [each["inflight"] for each in state["frontends"]] == [8, 0]
        assert state["active"] == one.warm.url
        one.cold.gate.set()
        assert await asyncio.gather(*old) == [whole("cold")] * 8


async def test_no_request_is_dropped_while_the_regime_flaps() -> None:
    async with scene() as one:
        done = asyncio.Event()

        async def flap() -> None:
            while not done.is_set():
                below = one.control.regime is Regime.BELOW
                one.control.to(Regime.TRANSITION if below else Regime.BELOW)
                await asyncio.sleep(0.002)

        flapping = asyncio.create_task(flap())
        found = await asyncio.gather(*(one.stream(number=i) for i in range(200)))
        done.set()
        await flapping
        assert all(each in (whole("cold"), whole("warm")) for each in found)
        assert len(one.cold.requests) + len(one.warm.requests) == 200
        assert min(len(one.cold.requests), len(one.warm.requests)) > 0
        text = one.switch.meters.exposition().decode()
        assert "pigou_game_retried_requests_total 0.0" in text


async def test_a_frontend_that_is_gone_costs_no_request() -> None:
    async with scene() as one:
        await one.cold.stop()
        assert await one.stream() == whole("warm")
        assert await one.stream() == whole("warm")
        [cold, warm] = one.switch.status()["frontends"]
        assert (cold["failed"], warm["failed"], warm["sent"]) == (1, 0, 2)


async def test_a_frontend_that_fails_before_it_answers_costs_no_request() -> None:
    async with scene() as one:
        one.cold.break_after = 0
        assert await one.stream() == whole("warm")


async def test_a_stream_that_breaks_is_seen_to_break() -> None:
    async with scene() as one:
        one.cold.break_after = 2
        with pytest.raises(aiohttp.ClientPayloadError):
            await one.stream()
        assert len(one.warm.requests) == 0


async def test_no_frontend_at_all_is_told() -> None:
    async with scene() as one:
        await one.cold.stop()
        await one.warm.stop()
        async with one.session.post(one.url + "/v1/completions", json={}) as reply:
            assert reply.status == 502
            assert "No frontend answers" in (await reply.json())["message"]
        assert one.control.heard == ["arrived", "left"]


async def test_a_client_that_leaves_ends_its_request_at_the_frontend() -> None:
    async with scene() as one:
        one.cold.gate.clear()
        async with one.session.post(one.url + "/v1/completions", json={"stream": True}) as reply:
            await reply.content.readany()
            reply.close()
        async with asyncio.timeout(60):
            while one.cold.cut == 0 or one.switch.status()["frontends"][0]["inflight"]:
                await asyncio.sleep(0.01)


async def test_refusals_and_other_routes_pass_as_they_are() -> None:
    async with scene() as one:
        async with one.session.post(
            one.url + "/v1/completions", json={"status": 400}, headers={"x-tenant-id": "a"}
        ) as reply:
            assert reply.status == 400
            assert await reply.json() == {"from": "cold"}
        assert {k.lower(): v for k, v in one.cold.headers[0].items()}["x-tenant-id"] == "a"
        async with one.session.get(one.url + "/v1/models") as reply:
            assert reply.headers["x-from"] == "cold"
        async with one.session.get(one.url + "/nothing") as reply:
            assert reply.status == 404
        async with one.session.get(one.url + "/v1/realtime", headers={"upgrade": "x"}) as reply:
            assert reply.status == 404


async def test_state_and_metrics_tell_the_regime() -> None:
    async with scene() as one:
        one.control.to(Regime.TRANSITION)
        await one.stream()
        async with one.session.get(one.url + "/switch") as reply:
            state = await reply.json()
        assert state["regime"] == "transition"
        assert state["wanted"] == {"temperature": 0.7, "overlap_weight": 1.0}
        async with one.session.get(one.url + "/metrics") as reply:
            text = await reply.text()
        assert "pigou_game_router_temperature 0.7" in text
        assert "pigou_game_saturation_state 1.0" in text


def test_frontends_are_read_or_refused() -> None:
    found = Frontend.parse("http://h:1/,temperature=0.7,overlap-weight=0.1")
    assert found == Frontend("http://h:1", Parameters(0.7, 0.1))
    for text in ("h:1,temperature=0", "http://h", "http://h,temp=1", "http://h,temperature=x",
                 "http://h,temperature=-1"):  # fmt: skip
        with pytest.raises(ConfigError):
            Frontend.parse(text)
    with pytest.raises(ConfigError, match="two or more"):
        Switch([found], ScriptedSteering())
    with pytest.raises(ConfigError, match="same setting"):
        Switch([found, found], ScriptedSteering())
