"""Pigou's gateway before Dynamo's mock workers, each one pinned behind a frontend."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from tests.e2e.fleet import Fleet

from benchmarks.lib.dynamo_mockers import NAME, Mockers, dynamo_home
from benchmarks.lib.peers import PeerMissing, shared
from benchmarks.lib.servers import LOOPBACK, free_ports
from pigou.gateway.proxy import reply_parsing
from pigou.gateway.proxy.migration import attempt_body
from pigou.gateway.request import GatewayRun, ParsedRequest
from pigou.lifecycle.migration import StreamState

live = [pytest.mark.dynamo, pytest.mark.slow, pytest.mark.timeout(240)]
WORKERS = 3
WATCH = {"timeout": 30.0, "failures": 10, "hang": 300.0}


def call(stream: bool = True, wants_ids: bool = False, **body: Any) -> GatewayRun:
    if stream:
        body["return_token_ids"] = True
    return GatewayRun.of(ParsedRequest(
        id="0a", wire_id="", chat=False, stream=stream, body=body, prompt_tokens=3, max_tokens=4,
        wants_ids=wants_ids,
    ))  # fmt: skip


def sent(one: GatewayRun) -> dict[str, Any]:
    found = attempt_body(one, StreamState(), stock=True, max_model_len=0, dynamo=True)
    return found.body


def test_dynamo_is_asked_for_token_ids_in_its_own_way() -> None:
    assert sent(call(prompt="a")) == {
        "prompt": "a", "nvext": {"extra_fields": ["completion_token_ids"]}
    }  # fmt: skip
    own = {"extra_fields": ["worker_id"], "cache_salt": "x"}
    found = sent(call(nvext=own))
    assert found["nvext"] == {**own, "extra_fields": ["worker_id", "completion_token_ids"]}
    assert own["extra_fields"] == ["worker_id"]


def test_what_a_client_asked_for_itself_is_dynamos_to_judge() -> None:
    one = call(wants_ids=True)
    assert sent(one) == {"return_token_ids": True}
    assert sent(call(stream=False, prompt="a")) == {"prompt": "a"}


def test_only_an_extension_of_token_ids_alone_is_cut() -> None:
    cut = reply_parsing.without_extension
    plain = b'{"id":"a","choices":[{"text":" \\",\\"nvext\\":{"}]}'
    added = plain[:-1] + b',"nvext":{"completion_token_ids":[5,6]}}'
    assert cut(plain) == plain
    assert cut(added) == plain
    more = plain[:-1] + b',"nvext":{"completion_token_ids":[5],"worker_id":{"a":[1]}}}'
    assert cut(more) == more


@dataclass
class Scene:
    """A gateway over pinned mock workers."""

    gateway: Fleet
    mockers: Mockers
    pins: list[int]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    try:
        shared()
        home = dynamo_home()
    except PeerMissing as missing:
        pytest.skip(str(missing))
    folder = tmp_path_factory.mktemp("dynamo-gateway")
    with Mockers.start(home, folder / "dynamo", WORKERS) as mockers:
        pins = mockers.instances()
        attach = [f"{mockers.url},pin={pin}" for pin in pins]
        control = {"policy": "toll"}
        fleet = Fleet.start(folder / "log", attach=attach, watch=WATCH, control=control)
        try:
            fleet.recovered()
            yield Scene(fleet, mockers, pins)
        finally:
            fleet.stop()


def body(seed: int, size: int = 8, **fields: Any) -> dict[str, Any]:
    generator = random.Random(seed)
    prompt = [generator.randrange(300, 1200) for _ in range(60)]
    return {"model": NAME, "prompt": prompt, "max_tokens": size, **fields}


class TestLive:
    pytestmark = live

    def test_streams_pass_and_their_tokens_are_counted(self, scene: Scene) -> None:
        before = scene.gateway.metric("pigou_generation_tokens_total")
        with ThreadPoolExecutor(8) as pool:
            told = list(pool.map(lambda n: scene.gateway.stream(**body(n)), range(24)))
        assert all(each.told[2] == "length" and each.text for each in told)
        assert all("nvext" not in str(each.chunks) for each in told)
        assert scene.gateway.metric("pigou_generation_tokens_total") - before == 24 * 8

    def test_each_request_is_served_by_the_worker_that_was_chosen(self, scene: Scene) -> None:
        served = {
            int(reply["nvext"]["worker_id"]["decode_worker_id"])
            for reply in (
                scene.gateway.complete(**body(n, nvext={"extra_fields": ["worker_id"]}))
                for n in range(18)
            )
        }
        assert served == set(scene.pins)

    def test_dynamos_refusals_reach_the_client(self, scene: Scene) -> None:
        reply = scene.gateway.post("/v1/completions", body(1, frobnicate=True))
        assert reply.status == 400
        assert "frobnicate" in str(reply.json)


def test_a_pin_before_what_is_no_dynamo_is_refused() -> None:
    import asyncio

    from aiohttp import web

    from pigou.config import ControlConfig
    from pigou.control.plane import ControlPlane
    from pigou.fleet.config import AttachedWorker, WatchConfig
    from pigou.fleet.hang_detection import HangArbiter
    from pigou.fleet.member import MemberSetup
    from pigou.fleet.sources.attached import ServerSource
    from pigou.gateway.plane_driver import PlaneDriver

    async def main() -> None:
        async def models(_: web.Request) -> web.Response:
            return web.json_response({"data": [{"id": "m", "owned_by": "vllm"}]})

        app = web.Application()
        app.router.add_get("/v1/models", models)
        runner = web.AppRunner(app)
        await runner.setup()
        port = free_ports(1)[0]
        await web.TCPSite(runner, LOOPBACK, port).start()
        spec = AttachedWorker.parse(f"http://{LOOPBACK}:{port},pin=7", 0)
        plane_driver = PlaneDriver(ControlPlane(ControlConfig()))
        setup = MemberSetup(plane_driver, WatchConfig(), HangArbiter(WatchConfig().hang))
        member = ServerSource(spec).member(setup)
        await asyncio.wait_for(member.run(), 60)
        assert "no frontend of Dynamo" in member.failed
        await runner.cleanup()

    asyncio.run(main())
