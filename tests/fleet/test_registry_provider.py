"""Registered workers behind a gateway: what the registry says of them, and what is told to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from tests.fleet.harness import WATCH, Client, text, until
from tests.fleet.registry.entries import entry
from tests.gateway.stub import Script, Stub

from pigou.config import ControlConfig
from pigou.fleet.registry.discovery import RegistryView, ViewConfig
from pigou.fleet.registry.entry import WorkerEntry
from pigou.fleet.registry.record_store import MemoryStore
from pigou.fleet.registry.registry import Registry
from pigou.fleet.serve import Serving
from pigou.fleet.sources.registered import RegistryProvider
from pigou.fleet.supervisor import FleetSetup
from pigou.gateway.config import GatewayConfig
from pigou.request import Role
from pigou.wire.fleet_secret import FleetSecret

SECRET = FleetSecret("s" * 32)
Work = Callable[["Discovered"], Any]


class Discovered:
    """A gateway on a registry, and scripted workers.

    Attributes:
        registry: as workers and other gateways write it.
        client: asks the gateway.
        stubs: by the names of their workers.
    """

    def __init__(self, registry: Registry, serving: Serving, client: Client) -> None:
        self.registry, self.serving, self.client = registry, serving, client
        self.stubs: dict[str, Stub] = {}
        self._runners: dict[str, Any] = {}

    @property
    def provider(self) -> RegistryProvider:
        provider = self.serving.supervisor.registered
        assert provider is not None
        return provider

    async def worker(self, name: str, **fields: Any) -> WorkerEntry:
        """Start a scripted worker, and register it."""
        stub = Stub(name, Role.BOTH, script=Script(delay_s=0.02))
        self._runners[name], self.stubs[name] = await stub.start(), stub
        made = entry(name, f"incarnation-{name}", **{
            "role": Role.BOTH, "url": stub.url, "ttl_s": 60.0, **fields})  # fmt: skip
        stub.about = {"incarnation": made.incarnation}
        return await self.registry.register(made)

    async def up(self, *names: str) -> dict[str, dict[str, Any]]:
        """Wait until exactly these workers are up; return the rows."""
        return await until(
            self.client, lambda rows: {n for n, r in rows.items() if r["state"] == "up"} == {*names}
        )

    async def kill(self, name: str) -> None:
        await self._runners.pop(name).cleanup()

    async def close(self) -> None:
        for name in list(self._runners):
            await self.kill(name)


@asynccontextmanager
async def discovered() -> AsyncIterator[Discovered]:
    store = MemoryStore()
    serving = Serving(
        GatewayConfig(port=0, strict=False), ControlConfig(),
        FleetSetup(watch=WATCH, secret=SECRET, registry=Registry(store, SECRET)),
    )  # fmt: skip
    provider = serving.supervisor.registered
    assert provider is not None
    config = ViewConfig(coalesce_s=0.02, probe_s=0.1)
    provider.discovery.view = RegistryView(config)
    session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30))
    fleet = None
    try:
        await serving.start()
        client = Client(f"http://127.0.0.1:{serving.port}", session)
        fleet = Discovered(Registry(store, SECRET), serving, client)
        yield fleet
    finally:
        await session.close()
        await serving.stop()
        if fleet is not None:
            await fleet.close()


def run(work: Work) -> None:
    async def main() -> None:
        async with discovered() as fleet:
            await work(fleet)

    asyncio.run(main())


def test_workers_are_found_used_and_shown() -> None:
    async def work(fleet: Discovered) -> None:
        await fleet.worker("w0")
        await fleet.worker("w1", version="v1")
        rows = await fleet.up("w0", "w1")
        upstreams = fleet.serving.plane_driver.upstreams
        assert upstreams["w1"].worker.version == "v1"  # by which KV is not mixed
        assert {(row["kind"], row["pool"]) for row in rows.values()} == {
            ("registered", "both.registered")
        }
        assert text(await fleet.client.reply(max_tokens=5))
        async with fleet.client.session.get(fleet.client.url + "/health") as response:
            health = (await response.json())["registry"]
        assert health == {"stale": False, "entries": 2, "suspects": 0}
        async with fleet.client.session.get(fleet.client.url + "/metrics") as response:
            page = await response.text()
        assert 'pigou_registry_entries{model_name="stub"} 2.0' in page

    run(work)


def test_a_suspect_gets_nothing_new_its_stream_goes_on_and_it_may_come_back() -> None:
    async def work(fleet: Discovered) -> None:
        w0, w1 = await fleet.worker("w0"), await fleet.worker("w1")
        await fleet.up("w0", "w1")
        streams = [asyncio.create_task(fleet.client.reply(max_tokens=60)) for _ in range(4)]
        await asyncio.sleep(0.3)
        began = {name: len(stub.seen) for name, stub in fleet.stubs.items()}
        assert all(began.values())
        await fleet.registry.leave(w1)  # as its lease ends
        rows = await fleet.up("w0")
        assert rows["w1"]["note"].startswith("suspect")
        for _ in range(6):
            await fleet.client.reply(max_tokens=1)
        assert len(fleet.stubs["w1"].seen) == began["w1"]
        for stream in streams:
            assert text(await stream)
        assert fleet.stubs["w1"].cancelled == 0
        await fleet.registry.register(w1)
        rows = await fleet.up("w0", "w1")
        assert rows["w1"]["restarts"] == 0
        await fleet.registry.leave(w0)
        await fleet.up("w1")
        await fleet.client.reply(max_tokens=1)
        assert len(fleet.stubs["w1"].seen) > began["w1"]

    run(work)


def test_a_killed_worker_is_left_at_once_and_forgotten_when_its_lease_ends() -> None:
    """Dynamo issue 732: a killed component got requests until its lease ended."""

    async def work(fleet: Discovered) -> None:
        await fleet.worker("w0")
        w1 = await fleet.worker("w1")
        await fleet.up("w0", "w1")
        await fleet.kill("w1")
        replies = await asyncio.gather(*(fleet.client.reply(max_tokens=3) for _ in range(8)))
        assert all(text(reply) for reply in replies)
        await fleet.registry.leave(w1)
        await until(fleet.client, lambda rows: set(rows) == {"w0"})

    run(work)


def test_another_worker_at_a_known_address_is_not_taken_for_the_old_one() -> None:
    """SGLang issues 26842 and 30270; vLLM router issue 279."""

    async def work(fleet: Discovered) -> None:
        await fleet.worker("w0")
        w1 = await fleet.worker("w1")
        await fleet.up("w0", "w1")
        fleet.stubs["w1"].about = {"incarnation": "incarnation-other"}
        await fleet.registry.leave(w1)
        await until(fleet.client, lambda rows: set(rows) == {"w0"})
        await fleet.registry.register(w1)  # a late word of the old one
        await until(fleet.client, lambda rows: len(rows) == 2)
        await asyncio.sleep(0.3)
        await fleet.up("w0")

    run(work)


def test_the_last_decoder_serves_on_while_it_answers() -> None:
    async def work(fleet: Discovered) -> None:
        w0 = await fleet.worker("w0")
        await fleet.up("w0")
        await fleet.registry.leave(w0)
        await asyncio.sleep(0.3)
        assert fleet.provider.status().suspects == ["w0 (incarnat)"]
        assert text(await fleet.client.reply(max_tokens=2))
        await fleet.worker("w1")
        await fleet.up("w1")  # the suspect gets nothing new from now on
        assert text(await fleet.client.reply(max_tokens=2))
        assert len(fleet.stubs["w1"].seen) == 1

    run(work)


def test_a_request_waits_while_one_worker_takes_over_from_the_last() -> None:
    """Dynamo issue 13622: 404 and 503 between the last old worker and the first new one."""

    async def work(fleet: Discovered) -> None:
        await fleet.worker("w0")
        await fleet.up("w0")
        await fleet.worker("w1")
        await fleet.registry.update(
            entry("w0", "incarnation-w0", role=Role.BOTH, url=fleet.stubs["w0"].url, ttl_s=60.0,
                  epoch=1, draining=True)
        )  # fmt: skip
        replies = []
        for _ in range(20):
            replies.append(text(await fleet.client.reply(max_tokens=1)))
        assert all(replies)
        await until(fleet.client, lambda rows: set(rows) == {"w1"})

    run(work)


def test_a_role_that_another_gateway_wrote_is_followed() -> None:
    async def work(fleet: Discovered) -> None:
        w0 = await fleet.worker("w0")
        await fleet.worker("w1")
        await fleet.up("w0", "w1")
        flipped = entry("w0", w0.incarnation, role=Role.PREFILL, url=w0.url, ttl_s=60.0, epoch=1)
        await fleet.registry.update(flipped)
        rows = await until(fleet.client, lambda rows: rows["w0"]["role"] == "prefill")
        assert rows["w0"]["pool"] == "prefill.registered"
        await asyncio.sleep(0.2)
        (there, _) = (await fleet.registry.relist()).entries
        assert there.epoch == 1, "what is followed is not written again"

    run(work)


def test_a_flip_and_a_drain_of_this_gateway_are_written_for_all() -> None:
    async def work(fleet: Discovered) -> None:
        await fleet.worker("w0")
        await fleet.worker("w1")
        await fleet.worker("w2")
        await fleet.up("w0", "w1", "w2")
        status, _ = await fleet.client.change("POST", "/workers/w0/flip", {"role": "prefill"})
        assert status < 300
        status, _ = await fleet.client.change("POST", "/workers/w1/drain", {})
        assert status < 300

        async def written() -> bool:
            entries = {own.worker: own for own in (await fleet.registry.relist()).entries}
            return entries["w0"].role is Role.PREFILL and entries["w1"].draining

        async with asyncio.timeout(60):
            while not await written():
                await asyncio.sleep(0.05)
        rows = await fleet.client.workers()
        assert set(rows) == {"w0", "w2"}
        pools = {pool.name: pool for pool in fleet.provider.pools}
        assert pools["both.registered"].gpus == 2
        assert "on their hosts" in fleet.serving.live_fleet.start_refusal("both.registered")

    run(work)
