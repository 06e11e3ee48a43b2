"""Laws of the start: clients are told the stage at once, and nobody waits in a queue for it."""

from __future__ import annotations

import asyncio
import threading

import aiohttp
import pytest
from tests.fleet.harness import SLEEP, WATCH
from tests.lib.forked_python import Forks
from tests.lib.local_workers import local_workers

from pigou.config import ControlConfig
from pigou.fleet import serve
from pigou.fleet.config import FleetError
from pigou.fleet.serve import Serving
from pigou.fleet.supervisor import FleetSetup
from pigou.gateway.config import GatewayConfig
from pigou.gateway.startup_shutdown import STARTING_RETRY_AFTER_S, Startup
from pigou.wire.errors import APIError


def test_a_request_before_the_first_worker_is_told_the_stage() -> None:
    told: list[tuple[str, str]] = []
    startup = Startup(lambda part, stage: told.append((part, stage)))
    startup.check(can_serve=False)  # nothing starts: requests queue as ever
    startup.active = True
    startup.report("decode-0", "loading the model")
    startup.report("decode-0", "loading the model")
    assert told == [("decode-0", "loading the model")]
    with pytest.raises(APIError, match="decode-0: loading the model") as error:
        startup.check(can_serve=False)
    assert (error.value.status, error.value.retry_after) == (503, STARTING_RETRY_AFTER_S)
    startup.check(can_serve=True)


async def test_requests_while_kernels_are_compiled_get_503_and_workers_start_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = threading.Event()
    monkeypatch.setattr(serve, "warm_up", lambda _: compiled.wait(200))
    stages: list[tuple[str, str]] = []
    waiting = asyncio.Event()

    def on_stage(part: str, stage: str) -> None:
        stages.append((part, stage))
        if part == "both-0" and "kernels" in stage and "compiling" not in stage:
            waiting.set()

    workers = local_workers(0, 0, 1, SLEEP, ["cpu"])
    serving = Serving(
        GatewayConfig(port=0),
        ControlConfig(),
        FleetSetup(workers=workers, watch=WATCH, forks=Forks()),
        on_stage=on_stage,
    )
    starting = asyncio.create_task(serving.start())
    try:
        # The worker is there before the kernels are: it was started beside their compilation.
        await asyncio.wait_for(waiting.wait(), 200)
        body = {"prompt": "x", "max_tokens": 1}
        async with aiohttp.ClientSession(f"http://127.0.0.1:{serving.port}") as session:
            async with session.post("/v1/completions", json=body) as response:
                error = (await response.json())["error"]
                assert response.status == 503
                assert response.headers["retry-after"] == str(STARTING_RETRY_AFTER_S)
                assert "starting" in error["message"]
                assert "both-0: waiting for the gateway's kernels" in error["message"]
            async with session.get("/health") as response:
                assert response.status == 503
            async with session.get("/workers") as response:
                rows = (await response.json())["workers"]
                assert rows[0]["state"] == "starting"
                assert rows[0]["note"] == "waiting for the gateway's kernels"
            compiled.set()
            await starting
            async with session.post("/v1/completions", json=body) as response:
                assert response.status == 200
        assert ("gateway", "ready") in stages
        assert ("both-0", "ready") in stages
    finally:
        compiled.set()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await serving.stop()


async def test_a_fleet_that_fails_to_start_does_not_wait_for_the_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = threading.Event()
    monkeypatch.setattr(serve, "warm_up", lambda _: compiled.wait(200))
    workers = local_workers(0, 0, 1, ["--block-size", "0"], ["cpu"])
    serving = Serving(
        GatewayConfig(port=0), ControlConfig(), FleetSetup(workers=workers, watch=WATCH)
    )
    try:
        with pytest.raises(FleetError, match="block-size"):
            await serving.start()
        assert not compiled.is_set()
    finally:
        compiled.set()
        await serving.stop()
