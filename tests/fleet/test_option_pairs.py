"""Each pair of registry, queue, bus, secret and version: two processes derive the same names.

Workers and gateways are the real ones, in this process, over one NATS server: all of them use the
same queue and the same bus, and only those that belong together find each other.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import pytest
from tests.fleet.harness import WATCH
from tests.lib.server_process import nats_server

from pigou.config import ControlConfig
from pigou.fleet.config import AttachedWorker
from pigou.fleet.prefill_queue.messages import QueueAddress
from pigou.fleet.registry.registration import RegistrationConfig
from pigou.fleet.serve import Serving
from pigou.fleet.supervisor import FleetSetup
from pigou.gateway.config import GatewayConfig
from pigou.request import Role
from pigou.wire.fleet_secret import FleetSecret
from pigou.wire.names import advertised
from pigou.worker.config import WorkerConfig
from pigou.worker.process import Registrar, WorkerServer
from pigou.worker.startup.build import transfer_config
from pigou.worker.startup.profiling import prepare

pytest.importorskip("nats")
SLEEP = {"executor": "sleep", "sleep_base": 1_000_000, "rehearse": 0, "threads": 1, "port": 0,
         "served_model_name": "a/model.of:these tests", "drain": 0.1}  # fmt: skip


@dataclass
class Deployment:
    """A prefill worker that registers and pulls, and a decode worker that does neither."""

    secret: FleetSecret | None
    version: str
    bucket: str
    urls: dict[Role, str]


@asynccontextmanager
async def worker(
    role: Role, secret: FleetSecret | None, version: str, registry: str = "", queue: str = ""
) -> AsyncIterator[str]:
    """Run a worker as `pigou worker` does; yield its port's URL by another name of loopback."""
    config = WorkerConfig(role=role, deployment_version=version, **SLEEP)  # type: ignore[arg-type]
    parts = await asyncio.to_thread(prepare, config)
    registrar: Registrar | None = None
    if registry:
        from pigou.fleet.prefill_queue.puller import PullingWorker
        from pigou.fleet.registry.registration import WorkerRegistrar

        config = msgspec.structs.replace(config, host="0.0.0.0")
        at = RegistrationConfig(registry=registry, lease=30.0, advertise="127.0.0.2")
        known = WorkerRegistrar(at, secret)
        registrar = PullingWorker(QueueAddress.parse(queue), secret, known)
    server = WorkerServer(config, parts, secret, registrar, "127.0.0.2" if registry else "")
    running = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(60):
            while server._listener is None:
                await asyncio.sleep(0.01)
        yield f"http://localhost:{server._listener.sockets[0].getsockname()[1]}"
    finally:
        server.stop()
        server.stop()
        await running


@asynccontextmanager
async def gateway(
    made: Deployment, nats: str, *, registered: bool, pulls: bool, bus: bool
) -> AsyncIterator[Serving]:
    from pigou.fleet.nats_connection import NatsAddress
    from pigou.fleet.peers.bus import NatsBus
    from pigou.fleet.registry.registry import open_registry

    roles = [Role.DECODE] if registered else [Role.PREFILL, Role.DECODE]
    serving = Serving(
        GatewayConfig(port=0, strict=False), ControlConfig(policy="least-loaded"),
        FleetSetup(
            workers=[AttachedWorker(id=r.value, url=made.urls[r], role=r) for r in roles],
            watch=WATCH, secret=made.secret,
            registry=open_registry(made.bucket, made.secret) if registered else None,
            prefill_queue=f"{nats}/q" if pulls else "",
        ),
    )  # fmt: skip
    if bus:
        serving.join_peers(NatsBus(NatsAddress.parse([nats], "peers"), "fleet"))
    try:
        await serving.start()
        async with asyncio.timeout(60):
            while len(serving.plane_driver.upstreams) < 2:
                await asyncio.sleep(0.02)
        yield serving
    finally:
        await serving.stop()


async def check(session: aiohttp.ClientSession, serving: Serving, number: int) -> None:
    """A prompt is computed by the prefill worker, pushed or pulled."""
    url = f"http://127.0.0.1:{serving.port}/v1/completions"
    body = {"model": SLEEP["served_model_name"], "max_tokens": 2, "ignore_eos": True,
            "prompt": [number + 1, *range(300, 380)]}  # fmt: skip
    async with asyncio.timeout(60):
        while True:  # the worker may be about to connect to the queue
            async with session.post(url, json=body) as response:
                assert response.status == 200, await response.text()
                if "x-pigou-prefill-worker" in response.headers:
                    break
    queue = serving.plane_driver.prefill_queue
    assert queue is None or queue._publisher.core.counts.acked == 1  # type: ignore[attr-defined]


async def cross(folder: Path) -> None:
    async with AsyncExitStack() as stack:
        nats = stack.enter_context(nats_server(folder)).url
        session = await stack.enter_async_context(aiohttp.ClientSession())
        numbers = itertools.count()
        # Any two values of secret, version and queue meet once.
        for secret, version, pulls in (
            (FleetSecret.make(), "v1", True), (FleetSecret.make(), "", False),
            (None, "v1", False), (None, "", True),
        ):  # fmt: skip
            bucket = f"{nats}/bucket-{next(numbers)}"
            own = secret, version
            urls = {
                Role.PREFILL: await stack.enter_async_context(
                    worker(Role.PREFILL, *own, registry=bucket, queue=f"{nats}/q")
                ),
                Role.DECODE: await stack.enter_async_context(worker(Role.DECODE, *own)),
            }
            made = Deployment(secret, version, bucket, urls)
            async with AsyncExitStack() as pair:
                gateways = [
                    await pair.enter_async_context(
                        gateway(made, nats, registered=registered, pulls=pulls,
                                bus=secret is not None)
                    )
                    for registered in (True, False)
                ]  # fmt: skip
                for serving in gateways:
                    await check(session, serving, next(numbers))
                if secret is not None:
                    await heard(*gateways)


async def heard(one: Serving, other: Serving) -> None:
    """Both gateways name both workers alike, however they came to know them."""
    assert one.peers is not None
    assert other.peers is not None
    async with asyncio.timeout(60):
        while other.peers.name not in one.peers.health()["peers"]:
            await asyncio.sleep(0.02)
    assert set(one.peers._ids) == set(other.peers._ids)
    assert len(one.peers._ids) == 2
    assert one.peers.rejected == other.peers.rejected == 0


def test_names_of_registry_queue_bus_secret_and_version_agree(tmp_path: Path) -> None:
    asyncio.run(asyncio.wait_for(cross(tmp_path), 120))


def test_a_worker_tells_receivers_of_its_kv_the_address_that_it_registers() -> None:
    config = WorkerConfig(host="0.0.0.0")
    assert transfer_config(config, ("tcp",), "10.0.0.7").advertise == "10.0.0.7"
    assert transfer_config(config, ("tcp",)).advertise == advertised("0.0.0.0")
