"""Laws of a local fleet: whatever dies or hangs, clients get their streams, and no orphan stays."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import msgspec
import psutil
import pytest
from tests.fleet.harness import PROMPT, SLEEP, WATCH, Client, running, text
from tests.lib.forked_python import Forks, Popen

from pigou.config import ControlConfig
from pigou.fleet.config import FleetError, LocalWorker
from pigou.fleet.serve import Serving
from pigou.fleet.supervisor import FleetSetup
from pigou.gateway.config import GatewayConfig
from pigou.request import Role

#: Prompts go to the prefill worker.
SPLITS = ControlConfig(policy="least-loaded")


async def busy(client: Client, role: str) -> int:
    """Return the pid of a worker of this role that has requests under way."""
    for _ in range(6000):
        rows = await client.workers()
        for row in rows.values():
            if row["role"] == role and (row["decode_requests"] or row["prefill_requests"]):
                return int(row["pid"])
        await asyncio.sleep(0.01)
    raise AssertionError(f"no {role} worker became busy")


async def settled(client: Client, restarts: int) -> None:
    """Wait until all workers are up again, and nothing weighs on them."""
    for _ in range(600):
        rows = (await client.workers()).values()
        idle = all(
            r["state"] == "up" and not r["decode_requests"] and not r["prefill_requests"]
            for r in rows
        )
        if idle and sum(r["restarts"] for r in rows) >= restarts:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"the fleet did not settle: {rows}")


@pytest.mark.slow
async def test_killed_and_hung_workers_break_no_stream_and_come_back() -> None:
    async with running(1, 2, 0, control=SPLITS) as (_, client):
        expected = text(await client.reply())

        # The decode worker dies after any number of chunks, which the client already has.
        killed = 0
        for k in (0, 1, 5, 12, 20):
            chunks = []
            async for chunk in client.stream():
                if not chunks:
                    pid = await busy(client, "decode")
                if len(chunks) == k:
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
                chunks.append(chunk)
            assert text(chunks) == expected
            await settled(client, killed)

        # The prefill worker dies while it computes.
        task = asyncio.create_task(client.reply(prompt=PROMPT * 40))
        os.kill(await busy(client, "prefill"), signal.SIGKILL)
        assert len(text(await task)) > 0
        await settled(client, killed + 1)

        # A worker that is stopped answers nothing: it is killed, and its stream goes on.
        chunks = []
        async for chunk in client.stream():
            if len(chunks) == 3:
                os.kill(await busy(client, "decode"), signal.SIGSTOP)
            chunks.append(chunk)
        assert text(chunks) == expected
        await settled(client, killed + 2)

        # A reply that is not streamed is made again.
        task2 = asyncio.create_task(
            client.post("/v1/completions", prompt=PROMPT, max_tokens=24, ignore_eos=True)
        )
        os.kill(await busy(client, "decode"), signal.SIGKILL)
        status, reply = await task2
        assert (status, reply["choices"][0]["text"]) == (200, expected)


async def test_the_only_worker_comes_back_for_those_that_wait() -> None:
    async with running(0, 0, 1) as (_, client):
        expected = text(await client.reply())
        chunks = []
        async for chunk in client.stream():
            if len(chunks) == 4:
                os.kill(await busy(client, "both"), signal.SIGKILL)
            chunks.append(chunk)
        assert text(chunks) == expected


async def test_kv_events_of_workers_reach_the_index() -> None:
    async with running(1, 1, 0, control=SPLITS) as (serving, client):
        await client.reply(prompt=PROMPT * 4)
        for _ in range(1200):
            rows = await client.workers()
            if rows["prefill-0"]["cached_blocks"] and rows["decode-0"]["cached_blocks"]:
                break
            await asyncio.sleep(0.05)
        else:
            raise AssertionError(f"no KV events: {rows}")
        assert not any(row["gaps"] for row in rows.values())
        assert serving.plane_driver.plane.index.cache("prefill-0").held


async def test_a_fleet_under_twice_its_capacity_sheds_and_serves() -> None:
    control = ControlConfig(max_inflight=4, max_queued=4)
    async with running(0, 0, 1, control=control) as (_, client):
        asked = [
            client.session.post(
                client.url + "/v1/completions",
                json={"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True},
            )
            for _ in range(16)
        ]
        responses = await asyncio.gather(*asked)
        served = [r for r in responses if r.status == 200]
        shed = [r for r in responses if r.status == 503]
        assert len(served) + len(shed) == 16
        assert 8 <= len(served) < 16, "more than fit at once only where some ended meanwhile"
        for response in shed:
            assert int(response.headers["retry-after"]) >= 1
            assert (await response.json())["error"]["type"] == "ServiceUnavailableError"
        await settled(client, 0)


async def test_a_worker_that_never_comes_up_fails_the_start_with_its_last_words() -> None:
    worker = LocalWorker(id="w", role=Role.BOTH, arguments=("--block-size", "0"))
    serving = Serving(
        GatewayConfig(port=0),
        ControlConfig(),
        FleetSetup(workers=[worker], watch=WATCH, forks=Forks()),
    )
    with pytest.raises(FleetError, match="--block-size is 0"):
        await serving.start()
    await serving.stop()


@pytest.mark.parametrize("number", [
    signal.SIGKILL, signal.SIGHUP, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)
])  # fmt: skip
def test_no_worker_outlives_the_gateway(number: signal.Signals) -> None:
    if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("SIGHUP is ignored here, as under nohup")
    worker = {"id": "w", "role": "both", "arguments": SLEEP}
    settings = {"workers": [worker], "attach": [], "gateway": {"port": 0}, "control": {},
                "watch": msgspec.to_builtins(WATCH)}  # fmt: skip
    process = Popen(
        [sys.executable, "-m", "tests.e2e.launch", json.dumps(settings)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith('{"port"')
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(number)
        process.wait(60)
        deadline = time.monotonic() + 60
        while any(_runs(child) for child in children):
            assert time.monotonic() < deadline, "a worker is left"
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
