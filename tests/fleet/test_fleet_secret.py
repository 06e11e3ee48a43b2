"""A fleet's own workers know its secret and show it to nobody; attached ones prove it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import psutil
import pytest
from aiohttp import web
from tests.fleet.harness import SLEEP, WATCH, Client, running
from tests.gateway.stub import Stub
from tests.lib.forked_python import Forks

from pigou.config import ControlConfig
from pigou.fleet.config import AttachedWorker
from pigou.fleet.probe import fleet_key
from pigou.fleet.serve import Serving
from pigou.fleet.supervisor import FleetSetup
from pigou.fleet.worker_process import WorkerProcess
from pigou.gateway.config import GatewayConfig
from pigou.gateway.proxy.upstream import Engine, Upstream
from pigou.request import Role, Worker
from pigou.wire.fleet_secret import NONCE, PROOF, FleetSecret

SECRET = FleetSecret.make()


async def _status(url: str, key: str = "") -> int:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(url) as response:
        return response.status


async def test_local_workers_are_closed_and_nobody_can_read_their_secret() -> None:
    control = ControlConfig(policy="least-loaded")  # prompts go to the prefill worker
    async with running(1, 1, 0, control=control) as (_, client):
        assert (await client.post("/v1/completions", prompt="x" * 100, max_tokens=3))[0] == 200
        for row in (await client.workers()).values():
            assert await _status(row["url"] + "/metrics") == 401
            assert row["cached_blocks"] > 0  # its events were read
            process = psutil.Process(row["pid"])
            assert not [part for part in process.cmdline() if "secret" in part.lower()]
            environment = Path(f"/proc/{row['pid']}/environ").read_bytes()
            assert b"PIGOU_FLEET_SECRET=" not in environment


async def test_an_attached_worker_of_the_fleet_needs_no_key() -> None:
    process = await WorkerProcess.start("w", SLEEP, SECRET, forks=Forks())  # type: ignore[arg-type]
    serving = None
    try:
        url = (await process.ready(120))["url"]
        assert await _status(url + "/v1/models") == 401
        serving = Serving(
            GatewayConfig(port=0), ControlConfig(),
            FleetSetup(workers=[AttachedWorker(id="a", url=url)], watch=WATCH, secret=SECRET),
        )  # fmt: skip
        await serving.start()
        async with aiohttp.ClientSession() as session:
            client = Client(f"http://127.0.0.1:{serving.port}", session)
            body = {"prompt": "x" * 100, "max_tokens": 3}
            assert (await client.post("/v1/completions", **body))[0] == 200
            for _ in range(3000):
                if (await client.workers())["a"]["kv_events"]:
                    break
                await asyncio.sleep(0.02)
            assert (await client.workers())["a"]["cached_blocks"] > 0
    finally:
        if serving is not None:
            await serving.stop()
        await process.stop(0)


async def test_a_server_that_cannot_prove_the_secret_is_told_no_token() -> None:
    seen: list[dict[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(dict(request.headers))
        told = {PROOF: FleetSecret.make().proof(request.headers[NONCE])}
        return web.Response(status=401, headers=told)

    app = web.Application()
    app.router.add_get("/v1/models", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        port = runner.addresses[0][1]
        assert await fleet_key(f"http://127.0.0.1:{port}", SECRET) == ""
    finally:
        await runner.cleanup()
    assert len(seen) == 1
    assert SECRET.token not in str(seen)


async def test_health_and_load_are_asked_for_with_the_key_too() -> None:
    seen: list[tuple[str, str | None]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.path, request.headers.get("authorization")))
        return web.Response()

    app = web.Application()
    app.router.add_get("/{path}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    upstream = Upstream(Worker("a", url, Role.BOTH), Engine(), SECRET.token)
    try:
        for path in ("/health", "/metrics"):
            assert (await upstream.get(path, 5))[0] == 200
    finally:
        await upstream.close()
        await runner.cleanup()
    assert seen == [(path, f"Bearer {SECRET.token}") for path in ("/health", "/metrics")]


@pytest.mark.parametrize("stock", [False, True])
async def test_an_open_server_is_told_no_token(stock: bool) -> None:
    stub = Stub("a", stock=stock)
    runner = await stub.start()
    try:
        assert await fleet_key(stub.url, SECRET) == ""
    finally:
        await runner.cleanup()


async def test_a_server_that_is_away_is_told_no_token() -> None:
    assert await fleet_key("http://127.0.0.1:9", SECRET, timeout_s=2) == ""
