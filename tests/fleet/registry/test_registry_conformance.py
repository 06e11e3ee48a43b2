"""Laws of the registry that hold over all its backends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from tests.fleet.registry.backends import Backend, File, Kubernetes, Memory, Served, server
from tests.fleet.registry.entries import entry
from tests.lib.server_process import ServerProcess

from pigou.fleet.registry.entry import WorkerEntry, write_entry
from pigou.fleet.registry.registry import EntryConflict, LeaseLost, Registry
from pigou.request import Role
from pigou.wire.fleet_secret import FleetSecret

SECRET = FleetSecret("s" * 32)
_IN_PROCESS: dict[str, Callable[[Path], Backend]] = {
    "memory": lambda _: Memory(), "file": File, "k8s": lambda _: Kubernetes()
}  # fmt: skip


@pytest.fixture(scope="module", params=["memory", "file", "nats", "etcd", "k8s"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, ServerProcess | None]]:
    """Run the server of a backend, if it has one, for all tests."""
    scheme = request.param
    if scheme in _IN_PROCESS:
        yield scheme, None
        return
    pytest.importorskip({"nats": "nats", "etcd": "aetcd"}[scheme])
    with server(scheme, tmp_path_factory.mktemp(scheme)) as process:
        yield scheme, process


@pytest.fixture
def run(place: tuple[str, ServerProcess | None], tmp_path: Path) -> Callable[..., None]:
    """Run a test's coroutine with a backend, and two clients of it: a worker's, a gateway's."""
    scheme, process = place

    def runs(work: Callable[[Backend, Registry, Registry], Awaitable[None]]) -> None:
        async def main() -> None:
            backend = _IN_PROCESS[scheme](tmp_path) if process is None else Served(process, scheme)
            async with backend as made:
                clients = [Registry(made.client(), SECRET) for _ in range(2)]
                try:
                    await work(made, *clients)
                finally:
                    for client in clients:
                        await client.close()

        asyncio.run(main())

    return runs


def leased(made: Backend, worker: str = "w0", incarnation: str = "incarnation-a",
           **fields: object) -> WorkerEntry:  # fmt: skip
    return entry(worker, incarnation, ttl_s=made.ttl_s, **fields)


@asynccontextmanager
async def watching(registry: Registry, woken: asyncio.Event) -> AsyncIterator[None]:
    """Watch a registry; `woken` is set by changes after it began."""
    task = asyncio.create_task(registry.watch(woken.set))
    await asyncio.sleep(0.2)
    woken.clear()
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def test_what_is_registered_is_listed_and_leaves_by_its_own_word(run: Callable[..., None]) -> None:
    async def work(made: Backend, worker: Registry, gateway: Registry) -> None:
        w0, w1 = leased(made), leased(made, "w1")
        assert await worker.register(w0) == w0
        await worker.register(w1)
        assert (await gateway.relist()).entries == (w0, w1)
        await worker.leave(w0)
        assert (await gateway.relist()).entries == (w1,)

    run(work)


def test_a_lease_that_nobody_renews_ends_and_a_renewed_one_goes_on(
    run: Callable[..., None],
) -> None:
    """A gateway's change does not renew it; the name is free for another incarnation then."""

    async def work(made: Backend, worker: Registry, gateway: Registry) -> None:
        w0, w1, woken = leased(made), leased(made, "w1"), asyncio.Event()
        flipped = leased(made, epoch=1, role=Role.PREFILL)
        await worker.register(w0)
        await worker.register(w1)
        await gateway.update(flipped)
        assert await worker.renew(w0) == flipped
        async with watching(gateway, woken):
            await made.lapse(gateway, "w0", lambda: worker.renew(w1))
            await asyncio.wait_for(woken.wait(), 60)
        assert (await gateway.relist()).entries == (w1,)
        with pytest.raises(LeaseLost):
            await worker.renew(w0)
        again = leased(made, incarnation="incarnation-b")
        assert await worker.register(again) == again
        assert (await gateway.relist()).entries == (again, w1)
        with pytest.raises(EntryConflict):
            await worker.register(w0)

    run(work)


def test_a_live_worker_is_never_replaced_by_another_incarnation(run: Callable[..., None]) -> None:
    async def work(made: Backend, worker: Registry, gateway: Registry) -> None:
        first, second = leased(made), leased(made, incarnation="incarnation-b", epoch=5)
        await worker.register(first)
        for write in (gateway.register, gateway.renew, gateway.update):
            with pytest.raises(EntryConflict, match="worker-id"):
                await write(second)
        await gateway.leave(second)
        assert (await gateway.relist()).entries == (first,)

    run(work)


def test_an_older_epoch_never_replaces_a_newer_one(run: Callable[..., None]) -> None:
    async def work(made: Backend, worker: Registry, gateway: Registry) -> None:
        w0 = leased(made)
        flipped = leased(made, epoch=2, role=Role.PREFILL)
        await worker.register(w0)
        await gateway.update(flipped)
        with pytest.raises(EntryConflict, match="epoch 2"):
            await worker.update(leased(made, epoch=1, draining=True))
        with pytest.raises(EntryConflict, match="epoch 2"):
            await worker.update(leased(made, epoch=2))
        assert await worker.renew(w0) == flipped
        assert await worker.register(w0) == flipped
        assert (await worker.relist()).entries == (flipped,)

    run(work)


def test_of_two_that_change_one_epoch_one_wins(run: Callable[..., None]) -> None:
    async def work(made: Backend, worker: Registry, gateway: Registry) -> None:
        await worker.register(leased(made))
        tries = [
            client.update(leased(made, epoch=1, role=role))
            for client, role in ((worker, Role.PREFILL), (gateway, Role.BOTH))
        ]
        results = await asyncio.gather(*tries, return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == [
            "EntryConflict", "WorkerEntry",
        ]  # fmt: skip

    run(work)


def test_an_update_of_what_is_gone_brings_nothing_back(run: Callable[..., None]) -> None:
    async def work(made: Backend, worker: Registry, gateway: Registry) -> None:
        await worker.register(leased(made))
        await worker.leave(leased(made))
        with pytest.raises(LeaseLost):
            await gateway.update(leased(made, epoch=1))
        assert (await gateway.relist()).entries == ()

    run(work)


@pytest.mark.parametrize("signed_by", [None, FleetSecret("x" * 32)])
def test_entries_that_the_fleet_did_not_sign_are_ignored_counted_and_in_nobodys_way(
    run: Callable[..., None], signed_by: FleetSecret | None
) -> None:
    async def work(made: Backend, worker: Registry, gateway: Registry) -> None:
        forged = leased(made, incarnation="incarnation-x")
        store = made.client()
        await store.put("w0", write_entry(forged, signed_by), made.ttl_s, None)
        snapshot = await gateway.relist()
        assert (snapshot.entries, snapshot.ignored) == ((), 1)
        await worker.register(leased(made))
        assert (await gateway.relist()).entries == (leased(made),)
        await store.close()

    run(work)


def test_a_watch_wakes_for_a_new_worker_a_change_and_one_that_leaves(
    run: Callable[..., None],
) -> None:
    async def work(made: Backend, worker: Registry, gateway: Registry) -> None:
        woken = asyncio.Event()
        async with watching(gateway, woken):
            for change in (
                worker.register(leased(made)), worker.update(leased(made, epoch=1)),
                worker.leave(leased(made, epoch=1)),
            ):  # fmt: skip
                woken.clear()
                await change
                await asyncio.wait_for(woken.wait(), 60)

    run(work)
