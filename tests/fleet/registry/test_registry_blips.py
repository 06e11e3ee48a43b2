"""A registry whose server goes away, and comes back: nobody restarts, and nobody is taken away."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from tests.fleet.registry.backends import Backend, Kubernetes, Served, server
from tests.fleet.registry.entries import entry

from pigou.fleet.nats_connection import NatsAddress, ReconnectBackoff, connect_nats
from pigou.fleet.registry.discovery import (
    Discovery,
    EntryChanged,
    RegistryView,
    ViewConfig,
    ViewEffect,
    WorkerDeparted,
    WorkerRegistered,
    WorkerSuspected,
)
from pigou.fleet.registry.entry import WorkerEntry
from pigou.fleet.registry.record_store import MemoryStore, RegistryUnavailable
from pigou.fleet.registry.registration import LeaseKeeper, Registration
from pigou.fleet.registry.registry import Registry
from pigou.request import Role

QUICK = ReconnectBackoff(min_s=0.1, max_s=0.3)


class Fleet:
    """Two registered workers, and a gateway that follows the registry.

    Attributes:
        effects: of the gateway's view, without probes.
        alive: workers that answer probes.
    """

    def __init__(self, made: Backend, ttl_s: float) -> None:
        self.effects: list[ViewEffect] = []
        self.alive = {"w0", "w1"}
        self._registries = [Registry(made.client()) for _ in range(3)]
        self.workers = [
            Registration(
                self._registries[number], entry(f"w{number}", ttl_s=ttl_s),
                keeper=LeaseKeeper(ttl_s, number, QUICK),
            )
            for number in range(2)
        ]  # fmt: skip
        config = ViewConfig(coalesce_s=0.05, probe_s=0.1, backoff=QUICK)
        self.discovery = Discovery(
            self._registries[2], self.effects.append, self._lives, RegistryView(config)
        )
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Fleet:
        for name, run in (("w0", self.workers[0].run), ("w1", self.workers[1].run),
                          ("gateway", self.discovery.run)):  # fmt: skip
            self.tasks[name] = asyncio.create_task(run())
        await self.until(lambda: len(self.discovery.view.entries) == 2)
        return self

    async def __aexit__(self, *raised: object) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        for registry in self._registries:
            await registry.close()

    async def _lives(self, asked: WorkerEntry) -> bool:
        return asked.worker in self.alive

    async def until(self, law: object, seconds: float = 60.0) -> None:
        async with asyncio.timeout(seconds):
            while not law():  # type: ignore[operator]
                await asyncio.sleep(0.02)


def check_blip(made: Backend, stop: object, start: object, away_s: float) -> None:
    """Let the server be away for longer than a lease: the fleet's view must not change."""

    async def main() -> None:
        async with made, Fleet(made, 2.0) as fleet:
            registered = list(fleet.effects)
            assert [type(effect) for effect in registered] == [WorkerRegistered] * 2
            began = time.monotonic()
            await stop()  # type: ignore[operator]
            await fleet.until(lambda: fleet.discovery.view.stale)
            assert len(fleet.discovery.view.entries) == 2
            with pytest.raises(RegistryUnavailable):
                await fleet._registries[2].relist()
            await asyncio.sleep(max(0.0, away_s - (time.monotonic() - began)))
            await start()  # type: ignore[operator]
            await fleet.until(lambda: not fleet.discovery.view.stale)
            await fleet.until(lambda: all(own.keeper.registered for own in fleet.workers))
            snapshot = await fleet._registries[2].relist()
            assert {own.worker for own in snapshot.entries} == {"w0", "w1"}
            assert fleet.effects == registered, "0 restarts, 0 workers taken away"
            assert not any(task.done() for task in fleet.tasks.values())
            assert fleet.discovery.status().outages == 1

    asyncio.run(main())


@pytest.mark.parametrize("scheme", ["nats", "etcd"])
def test_a_server_that_is_killed_and_comes_back_changes_nothing(
    scheme: str, tmp_path: Path
) -> None:
    """Dynamo issue 3493: a blip of seconds restarted every service."""
    pytest.importorskip({"nats": "nats", "etcd": "aetcd"}[scheme])
    with server(scheme, tmp_path) as process:

        async def stop() -> None:
            process.kill()

        async def start() -> None:
            await asyncio.to_thread(process.start)

        check_blip(Served(process, scheme), stop, start, away_s=2.2)


def test_an_api_server_that_is_away_for_a_while_changes_nothing() -> None:
    made = Kubernetes()
    check_blip(made, made.fake.stop, made.fake.start, away_s=0.2)


def test_events_that_are_lost_are_made_up_for_by_the_next_snapshot() -> None:
    """SGLang issue 32322: deletions got lost, the watch was open, and nobody noticed."""

    async def main() -> None:
        made = Kubernetes()
        async with made, Fleet(made, 10.0) as fleet:
            made.fake.muted = True
            fleet.alive.discard("w1")
            fleet.tasks.pop("w1").cancel()
            made.pod("w1", ready=False)
            await asyncio.sleep(0.3)
            assert len(fleet.discovery.view.entries) == 2
            now = fleet.discovery.view.next_ns()
            snapshot = await fleet._registries[2].relist()  # as it is read after 30 s
            effects = fleet.discovery.view.snapshot(now, snapshot.entries)
            assert [type(effect) for effect in effects] == [WorkerSuspected]

    asyncio.run(main())


class Lossy(MemoryStore):
    """Records of this process, with a watch that is open and silent."""

    async def watch(self, wake: object) -> None:
        await asyncio.Event().wait()


class Shared(Backend):
    """One store for all clients."""

    ttl_s = 1.0

    def __init__(self, store: MemoryStore) -> None:
        self.store = store

    def client(self) -> MemoryStore:
        return self.store

    async def lapse(self, *_: object) -> None:
        raise NotImplementedError


def test_a_killed_worker_is_suspect_when_its_lease_ends_and_gone_when_it_does_not_answer() -> None:
    async def main() -> None:
        made = Shared(MemoryStore())
        async with Fleet(made, 1.0) as fleet:
            fleet.tasks.pop("w0").cancel()  # as SIGKILL: it says nothing
            await fleet.until(lambda: fleet.discovery.view.suspects)
            await asyncio.sleep(0.2)
            kinds = [type(effect) for effect in fleet.effects[2:]]
            assert kinds == [WorkerSuspected], "it answers, so that its streams go on"
            fleet.alive.discard("w0")
            await fleet.until(lambda: len(fleet.discovery.view.entries) == 1)
            assert type(fleet.effects[-1]) is WorkerDeparted

    asyncio.run(main())


def test_an_emptied_registry_is_filled_again_by_its_workers() -> None:
    async def main() -> None:
        made = Shared(MemoryStore())
        async with Fleet(made, 1.5) as fleet:
            registered = list(fleet.effects)
            for key, record in (await made.store.records()).items():
                await made.store.delete(key, record)
            await fleet.until(lambda: all(own.keeper.lapses for own in fleet.workers))
            await fleet.until(lambda: len(made.store._records) == 2)
            await asyncio.sleep(0.3)
            assert fleet.effects == registered

    asyncio.run(main())


def test_a_change_by_a_gateway_reaches_the_worker_and_its_next_change_goes_on_from_there() -> None:
    async def main() -> None:
        made = Shared(MemoryStore())
        async with Fleet(made, 1.0) as fleet:
            worker = fleet.workers[0]
            flipped = entry("w0", ttl_s=1.0, epoch=1, role=Role.PREFILL)
            await Registry(made.store).update(flipped)
            await fleet.until(lambda: worker.entry == flipped)
            await worker.change(draining=True)
            await fleet.until(lambda: len(fleet.effects) == 4)
            last = fleet.effects[-1]
            assert isinstance(last, EntryChanged)
            assert (last.entry.epoch, last.entry.role) == (2, Role.PREFILL)
            assert last.entry.draining

    asyncio.run(main())


def test_steps_of_the_wall_clock_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        made = Shared(MemoryStore())
        async with Fleet(made, 3.0) as fleet:
            registered, real = list(fleet.effects), time.time
            for step_s in (1e6, -1e6):
                monkeypatch.setattr(time, "time", lambda step_s=step_s: real() + step_s)
                monkeypatch.setattr(time, "time_ns", lambda step_s=step_s: int(
                    (real() + step_s) * 1e9))  # fmt: skip
                fleet.discovery.wake()
                await asyncio.sleep(0.25)
            assert fleet.effects == registered
            assert not any(own.keeper.lapses for own in fleet.workers)

    asyncio.run(main())


def test_relists_and_ended_watches_leave_no_consumer_on_nats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nats_store = pytest.importorskip("pigou.fleet.registry.nats_store")
    monkeypatch.setattr(nats_store, "_CONSUMER_S", 0.3)

    async def main() -> None:
        with server("nats", tmp_path) as nats:
            made = Served(nats, "nats")
            registries = [Registry(made.client()) for _ in range(2)]
            await registries[0].register(entry("w0", ttl_s=30.0))
            bucket = made.url.rpartition("/")[2]
            client = await connect_nats(NatsAddress.parse([nats.url], "test"), None)

            async def consumers() -> int:
                return len(await client.jetstream().consumers_info(f"KV_{bucket}"))

            for _ in range(5):
                assert [found.worker for found in (await registries[1].relist()).entries] == ["w0"]
                woken = asyncio.Event()
                task = asyncio.create_task(registries[1].watch(woken.set))
                await woken.wait()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            async with asyncio.timeout(60):
                while await consumers():
                    await asyncio.sleep(0.05)
            await registries[1].relist()
            assert not await consumers()
            for each in (*registries, client):
                await each.close()

    asyncio.run(main())
