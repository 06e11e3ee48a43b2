"""Classes and degraded modes of the gateway: what a request gets less, and how it is told."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from tests.fleet.harness import attached, until
from tests.gateway.stub import Fleet, Script, Stub, serving

from pigou.config import ConfigError
from pigou.control.degradation import Degradation, DegradedMode
from pigou.control.planner.config import PlannerConfig, RequestClassConfig
from pigou.fleet.config import DeclaredModel
from pigou.gateway.api import generation
from pigou.gateway.auth.keys import NO_KEY
from pigou.gateway.config import GatewayConfig
from pigou.objectives import PRESETS, Objectives
from pigou.request import SECOND

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SHORT = DegradedMode(name="max_tokens", limit=4, wait_s=1.0)
CACHED = DegradedMode(name="cached", wait_s=1.0)


async def ask(
    url: str, path: str = TEXT, never: bool = False, headers: dict[str, str] | None = None,
    **body: Any,
) -> tuple[int, str, Any]:  # fmt: skip
    """Return status, the header of degraded modes, and the reply."""
    prompt = {"prompt": "Hi"} if path == TEXT else {"messages": [{"role": "user", "content": "x"}]}
    sent = {"x-pigou-degraded": "never"} if never else headers or {}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + path, json=prompt | {"max_tokens": 9} | body, headers=sent) as reply,
    ):
        return reply.status, reply.headers.get("x-pigou-degraded", ""), await reply.json()


def turn(fleet: Fleet, *modes: DegradedMode, on: bool = True) -> None:
    fleet.plane_driver.degradation = Degradation(modes)
    fleet.plane_driver.degradation.update(SECOND, 2.0 if on else 0.0)
    fleet.plane_driver.degradation.update = lambda *_: None  # type: ignore[method-assign]


async def page(fleet: Fleet) -> str:
    async with aiohttp.ClientSession() as session, session.get(fleet.url + "/metrics") as reply:
        return await reply.text()


async def test_answers_are_shorter_in_the_mode_alone_and_never_where_it_is_forbidden() -> None:
    stub = Stub("w")
    async with serving(stub, degrade=(SHORT,)) as fleet:
        turn(fleet, SHORT, on=False)
        assert (await ask(fleet.url))[1] == ""
        status, _, reply = await ask(fleet.url, headers={"x-pigou-degraded": "maybe"})
        assert status == 400
        assert "it may be never" in reply["error"]["message"]
        turn(fleet, SHORT)
        _, said, reply = await ask(fleet.url)
        assert (said, reply["usage"]["completion_tokens"]) == ("max_tokens=4", 4)
        _, said, reply = await ask(fleet.url, CHAT, max_tokens=None, max_completion_tokens=8)
        assert (said, stub.seen[-1].body["max_completion_tokens"]) == ("max_tokens=4", 4)
        for quiet in (
            await ask(fleet.url, never=True),
            await ask(fleet.url, max_tokens=4),
            await ask(fleet.url, min_tokens=5),
            await ask(fleet.url, CHAT, response_format={"type": "json_object"}),
        ):
            assert quiet[:2] == (200, "")
        text = await page(fleet)
        assert 'pigou_requests_degraded_total{mode="max_tokens",model_name="stub"} 2.0' in text
        assert 'pigou_degraded_mode{mode="max_tokens",model_name="stub"} 1.0' in text


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ({"X-Pigou-Class": "voise"}, "x-pigou-class is 'voise'; it may be voice, night"),
        ({"X-Pigou-Class": "long"}, "it may be voice, night"),  # no class that is chosen by name
        ({"X-Pigou-Clas": "voice"}, "X-Pigou-Clas is no request header"),
        ({"X-Pigou-Degraded": "maybe"}, "it may be never"),
    ],
)
@pytest.mark.parametrize("path", [TEXT, CHAT, "/v1/embeddings"])
async def test_a_header_that_nothing_honours_is_refused(
    headers: dict[str, str], told: str, path: str
) -> None:
    classes = (
        RequestClassConfig(name="voice", preset="realtime"),
        RequestClassConfig(name="night", preset="batch", header="x-pigou-class=night"),
        RequestClassConfig(name="long", preset="document", min_prompt_tokens=9999),
    )
    objectives = Objectives(classes=tuple(one.workload_class for one in classes))
    async with serving(Stub("w"), objectives=objectives) as fleet:
        status, _, reply = await ask(fleet.url, path, headers=headers)
        assert (status, told in reply["error"]["message"]) == (400, True), reply
        assert (await ask(fleet.url, headers={"X-Pigou-Class": "night"}))[0] == 200
    async with serving(Stub("w")) as fleet:
        assert (await ask(fleet.url, path, headers=headers))[0] == 400


async def test_a_sampled_answer_comes_again_only_in_the_mode_and_within_its_tenure() -> None:
    stub = Stub("w")
    async with serving(stub, caches=("answer=1MiB",), degrade=(CACHED,)) as fleet:
        turn(fleet, CACHED, on=False)
        for _ in range(2):
            assert (await ask(fleet.url, temperature=0.7))[1] == ""
        assert len(stub.seen) == 2
        turn(fleet, CACHED)
        assert (await ask(fleet.url, temperature=0.7))[1] == "cached"
        assert (await ask(fleet.url, temperature=0.7, never=True))[1] == ""
        assert (await ask(fleet.url, temperature=0.8))[1] == ""
        assert (await ask(fleet.url, temperature=0.7, cache_salt="other"))[1] == ""
        assert len(stub.seen) == 5
        for _ in range(2):  # a greedy one is cached anyway
            assert (await ask(fleet.url, temperature=0))[1] == ""
        assert len(stub.seen) == 6


async def test_a_smaller_model_answers_and_classes_wait_for_their_own_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a whole fleet: presets, class header, cap, lanes; the smaller model keeps the payer."""
    monkeypatch.setattr(generation, "current_key", lambda: replace(NO_KEY, payer="acme"))
    big, small = (
        Stub("big", model="ant", script=Script(held=asyncio.Event())),
        Stub("s", model="bee"),
    )
    mode = DegradedMode(name="model", to="bee", wait_s=0.2, hold_s=60.0, classes="offline")
    planner = PlannerConfig(
        classes=(
            RequestClassConfig(name="offline", preset="batch", concurrency=1),
            RequestClassConfig(name="voice", preset="realtime", header="X-App=voice"),
        )
    )
    models = (DeclaredModel(name="ant"), DeclaredModel(name="bee"))
    async with attached(big, small, models=models, planner=planner, degrade=(mode,)) as running:
        serving, client = running
        await until(client, lambda rows: all(row["state"] == "up" for row in rows.values()))

        async def post(name: str, header: str) -> tuple[str, str, str]:
            body = {"model": "ant", "prompt": "x", "max_tokens": 2}
            url, headers = client.url + "/v1/completions", {header: name}
            async with client.session.post(url, json=body, headers=headers) as reply:
                said, named = (reply.headers.get(f"x-pigou-{n}", "") for n in ("degraded", "class"))
                return (await reply.json())["model"], said, named

        first = asyncio.create_task(post("offline", "X-Pigou-Class"))
        while not big.seen:
            await asyncio.sleep(0.01)
        second = asyncio.create_task(post("offline", "X-Pigou-Class"))  # its class has one stream
        third = asyncio.create_task(post("voice", "X-App"))  # another one passes
        while len(big.seen) < 2:
            await asyncio.sleep(0.01)
        degraded = ""
        while not degraded:
            async with client.session.get(client.url + "/metrics") as response:
                text = await response.text()
            degraded = 'pigou_degraded_mode{mode="model",model_name="ant"} 1.0'
            degraded = degraded if degraded in text else ""
        assert 'pigou_lane_requests{class="offline",lane="short",model_name="ant"} 1.0' in text
        assert await post("offline", "X-Pigou-Class") == ("bee", "model=bee", "offline")
        assert len(big.seen) == 2
        bee = serving.gateway.routing.find("bee").plane_driver
        assert bee.meter.work_by_tenant().keys() == {"acme"}
        assert big.script.held is not None
        big.script.held.set()
        assert [await one for one in (first, second)] == [("ant", "", "offline")] * 2
        assert await third == ("ant", "", "voice")
        async with client.session.get(client.url + "/metrics") as response:
            text = await response.text()
        assert 'pigou_class_requests_total{class="offline",model_name="bee"} 1.0' in text
        assert 'pigou_slo_limit_seconds{class="voice",latency="ttft",model_name="ant"} 0.15' in text


def test_a_preset_gives_what_a_class_does_not() -> None:
    voice = RequestClassConfig(name="voice", preset="realtime", itl=0.02, chunk=0).workload_class
    usual = PRESETS["realtime"]
    assert (voice.slo.ttft_s, voice.slo.itl_s) == (usual.slo.ttft_s, 0.02)
    assert (voice.chunk, voice.concurrency, voice.lane) == (0, usual.concurrency, "short")
    assert voice.header == "x-pigou-class=voice"
    assert RequestClassConfig(name="v", preset="chat", key="acme").workload_class.header == ""
    with pytest.raises(ConfigError, match="presets are realtime, chat, agent, document, batch"):
        RequestClassConfig(name="v", preset="chatty")


def test_modes_that_nothing_can_do_are_refused() -> None:
    with pytest.raises(ConfigError, match="give --cache answer"):
        GatewayConfig(degrade=(CACHED,))


async def test_a_smaller_model_must_be_one_of_the_gateways() -> None:
    with pytest.raises(ConfigError, match=r"to is 'bee'; it must be a model of --model-pool"):
        async with serving(Stub("w"), degrade=(DegradedMode(name="model", to="bee", shed=0.5),)):
            pass
