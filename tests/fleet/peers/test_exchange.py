"""What gateways send one another over a bus, and what does not count."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pigou.config import ConfigError, ControlConfig
from pigou.control.messages import WorkerUp
from pigou.control.peers.bookings import PeerState, PredictedPrompt, ResendRequest, WorkerBookings
from pigou.control.plane import ControlPlane
from pigou.fleet.nats_connection import public_address
from pigou.fleet.peers.bus import BusError, PeersConfig
from pigou.fleet.peers.exchange import (
    MAX_SKEW_MS,
    PeerEnvelope,
    PeerEnvelopeError,
    PeerExchange,
    PeerMetrics,
)
from pigou.gateway.auth.budgets import BudgetLedger, read_budgets
from pigou.gateway.auth.keys import NO_KEY
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.proxy.upstream import Engine
from pigou.request import NEVER, SECOND, Request, Worker
from pigou.wire.errors import APIError
from pigou.wire.fleet_secret import FleetSecret

SECRET = FleetSecret("a secret of one fleet")


class MemoryHub:
    """Buses of one process; `down` refuses connections, `drops` loses messages."""

    def __init__(self) -> None:
        self.takes: list[Callable[[bytes], None]] = []
        self.down = self.drops = False
        self.tries = 0

    def bus(self) -> MemoryBus:
        return MemoryBus(self)


class MemoryBus:
    def __init__(self, hub: MemoryHub) -> None:
        self.hub, self.take = hub, None
        self.connected = False

    @property
    def closed(self) -> bool:
        return not self.connected

    async def connect(self, take: Callable[[bytes], None], again: Callable[[], None]) -> None:
        self.hub.tries += 1
        if self.hub.down:
            raise BusError("memory: it is down")
        self.take = take
        self.hub.takes.append(take)
        self.connected = True

    async def publish(self, topic: str, data: bytes) -> None:
        if not self.hub.drops:
            for take in self.hub.takes:
                if take != self.take:
                    take(data)

    async def close(self) -> None:
        self.connected = False


class Upstreams:
    """Stands for the upstream of a worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.engine = Engine(incarnation="one process")


def node(
    hub: MemoryHub, worker: str, secret: FleetSecret = SECRET, budgets: BudgetLedger | None = None
) -> PeerExchange:
    """A gateway that calls the one worker `worker`, and reaches it at an address of its own."""
    plane = ControlPlane(ControlConfig())
    driver = PlaneDriver(plane)
    served = Worker(worker, f"http://{worker}:8000")
    plane.observe(WorkerUp(served), time.monotonic_ns())
    driver.upstreams[worker] = Upstreams(served)  # type: ignore[assignment]
    return PeerExchange(driver, hub.bus(), secret, budgets=budgets)


@asynccontextmanager
async def linked(hub: MemoryHub) -> AsyncIterator[tuple[PeerExchange, PeerExchange]]:
    """Run two gateways with one worker, which know of each other."""
    a, b = node(hub, "w0"), node(hub, "w0")
    for exchange in (a, b):
        exchange.start()
    await until(lambda: a.health()["peers"] == [b.name])
    yield a, b
    for exchange in (a, b):
        await exchange.stop()


def streams(exchange: PeerExchange) -> list[int]:
    found: list[int] = exchange._plane_driver.plane.state.columns.decode_requests.tolist()
    return found


def submit(exchange: PeerExchange, name: str) -> None:
    exchange._plane_driver.plane.submit(Request(name, 100, 8), time.monotonic_ns())


async def until(law: Callable[[], bool]) -> None:
    for _ in range(6000):
        if law():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never held")


def test_bookings_reach_the_other_gateway_whatever_it_calls_the_worker() -> None:
    async def run() -> None:
        hub = MemoryHub()
        a, b = node(hub, "attached-0"), node(hub, "w7")
        for exchange in (a, b):
            exchange.start()
        submit(a, "r1")
        await until(lambda: streams(b) == [1])
        assert a.health()["peers"] == [b.name]
        assert b.health()["bus"] == "up"
        await a.stop()
        await until(lambda: streams(b) == [0])
        assert b.health()["peers"] == []
        await b.stop()

    asyncio.run(run())


def test_a_gateway_that_joins_hears_what_was_sent_before() -> None:
    async def run() -> None:
        hub = MemoryHub()
        a, b = node(hub, "w0"), node(hub, "w0")
        a.start()
        submit(a, "r1")
        await asyncio.sleep(0.1)
        b.start()
        await until(lambda: streams(b) == [1])
        for exchange in (a, b):
            await exchange.stop()

    asyncio.run(run())


def test_a_key_has_its_budget_once_at_all_gateways_also_after_one_left() -> None:
    async def run() -> None:
        hub, ledgers = MemoryHub(), [
            BudgetLedger(read_budgets(["minute.requests=2"]), (), False, lambda: SECOND)
            for _ in "ab"
        ]  # fmt: skip
        a, b = (node(hub, "w0", budgets=ledger) for ledger in ledgers)

        def ask(ledger: BudgetLedger) -> None:
            quota = SimpleNamespace(bill=None, bills=[0], worker_s=0.0)
            stats = SimpleNamespace(prompt_tokens=5, completion_tokens=5)
            request: Any = SimpleNamespace(
                load=(1, 10), quota=quota, stats=stats, metered=None, budget_headers={}
            )
            with ledger.spending(NO_KEY, request, {}, lambda _: lambda: 0.0):
                pass

        def used(ledger: BudgetLedger) -> float:
            budgets = ledger.of(NO_KEY)
            assert budgets is not None
            return next(iter(budgets.states("", SECOND))).used

        a.start()
        ask(ledgers[0])
        await asyncio.sleep(0.1)
        b.start()
        await until(lambda: used(ledgers[1]) == 1)
        ask(ledgers[1])
        await until(lambda: used(ledgers[0]) == 2)
        assert ledgers[0].changes(9) == ()  # each is told once
        await a.stop()
        for ledger in ledgers:
            with pytest.raises(APIError, match=r"minute\.requests"):
                ask(ledger)
        await b.stop()

    asyncio.run(run())


def test_a_bus_that_a_server_closed_is_connected_anew() -> None:
    async def run() -> None:
        hub = MemoryHub()
        async with linked(hub) as (a, b):
            await a._bus.close()
            submit(a, "r1")
            await until(lambda: streams(b) == [1])

    asyncio.run(run())


def test_lost_messages_are_made_good_once_the_bus_brings_them_again() -> None:
    async def run() -> None:
        hub = MemoryHub()
        async with linked(hub) as (a, b):
            hub.drops = True
            for number in range(3):
                submit(a, f"r{number}")
                await asyncio.sleep(0.05)
            assert streams(b) == [0]
            hub.drops = False
            submit(a, "r3")
            await until(lambda: streams(b) == [4])
            await until(lambda: b.health()["gaps"] == 1)

    asyncio.run(run())


def test_a_bus_that_is_down_is_tried_again_and_nobody_waits_for_it() -> None:
    async def run() -> None:
        hub = MemoryHub()
        hub.down = True
        a, b = node(hub, "w0"), node(hub, "w0")
        for exchange in (a, b):
            exchange.start()
        submit(a, "r1")
        await until(lambda: hub.tries >= 3)
        assert a.health()["bus"] == "down"
        assert streams(a) == [1]
        hub.down = False
        await until(lambda: streams(b) == [1])
        for exchange in (a, b):
            await exchange.stop()

    asyncio.run(run())


def test_a_bus_that_swallows_the_cancellation_does_not_keep_a_gateway_from_its_end() -> None:
    """As NATS's client does while it flushes."""

    async def run() -> None:
        exchange, publishes = node(MemoryHub(), "w0"), asyncio.Event()

        async def publish(topic: str, data: bytes) -> None:
            publishes.set()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.02)

        exchange._bus.publish = publish  # type: ignore[method-assign]
        exchange.start()
        await publishes.wait()
        async with asyncio.timeout(60):
            await exchange.stop()
        assert exchange._task is not None
        assert exchange._task.done()

    asyncio.run(run())


def test_who_does_not_know_the_secret_changes_nothing_and_is_counted() -> None:
    async def run() -> None:
        hub = MemoryHub()
        a, thief = node(hub, "w0"), node(hub, "w0", FleetSecret("another fleet's secret"))
        for exchange in (a, thief):
            exchange.start()
        submit(thief, "r1")
        await until(lambda: a.rejected > 0)
        assert streams(a) == [0]
        assert a.health()["peers"] == []
        values = {m.name: m.samples[0].value for m in PeerMetrics(a).collect()}
        assert values["pigou_peer_rejected"] == a.rejected
        for exchange in (a, thief):
            await exchange.stop()

    asyncio.run(run())


STATE = PeerState(
    "g", 3, (WorkerBookings("w", 1, 2, 3),), (),
    (PredictedPrompt("w", np.array([1, 2**64 - 1], dtype=np.uint64)),), {"h": (4, 5)},
)  # fmt: skip


def test_an_envelope_brings_a_message_back_as_it_was() -> None:
    envelope = PeerEnvelope(SECRET)
    found = envelope.open(envelope.sign(STATE, 1000), 2000)
    assert isinstance(found, PeerState)
    assert found.prompts[0].keys.tolist() == [1, 2**64 - 1]
    assert (found.seq, found.workers, found.heard) == (3, STATE.workers, STATE.heard)
    ask = ResendRequest("g", "h", 1, 2)
    assert envelope.open(envelope.sign(ask, 0), 0) == ask


@pytest.mark.parametrize("place", [0, 31, 32, 40, -1])
def test_a_changed_message_does_not_count(place: int) -> None:
    envelope = PeerEnvelope(SECRET)
    data = bytearray(envelope.sign(STATE, 1000))
    data[place] ^= 1
    with pytest.raises(PeerEnvelopeError, match="not made with this fleet's secret"):
        envelope.open(bytes(data), 1000)


def test_a_recorded_message_does_not_count_later() -> None:
    envelope = PeerEnvelope(SECRET)
    with pytest.raises(PeerEnvelopeError, match="61 s ago"):
        envelope.open(envelope.sign(STATE, 1000), 1000 + MAX_SKEW_MS + 1000)


@pytest.mark.parametrize("data", [b"", b"x", b"x" * 40, b"\0" * 4096])
def test_noise_does_not_count(data: bytes) -> None:
    with pytest.raises(PeerEnvelopeError):
        PeerEnvelope(SECRET).open(data, 0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peers": "http://h:1"}, "write nats://HOST:PORT"),
        ({"peers": "nats://"}, "write nats://HOST:PORT"),
        ({"peers": "nats://h", "subject": "a.*"}, "letters, digits"),
    ],
)
def test_addresses_and_subjects_of_no_bus_are_refused(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PeersConfig(**values)


def test_passwords_are_in_no_log() -> None:
    assert public_address("nats://me:secret@host:4222") == "nats://host:4222"
    assert public_address("nats://host:4222") == "nats://host:4222"
    assert public_address("me:secret@host:4222/queue?lease=2") == "host:4222/queue?lease=2"


def test_a_change_of_the_manifest_reaches_all_gateways_and_those_that_join() -> None:
    async def run() -> None:
        hub = MemoryHub()
        async with linked(hub) as (a, b):
            a._caches.change("t", "corpus", "c", "2", 1, NEVER)
            key = ("t", "corpus", "c")
            await until(lambda: key in b._caches.manifest.entries)
            assert not a._caches.changed
            joins = node(hub, "w0")
            joins.start()
            assert not joins._caches.in_touch()  # a change could be unknown here
            await until(lambda: key in joins._caches.manifest.entries)
            hub.drops = True
            a._caches.change("t", "corpus", "c", "3", 1, NEVER)
            await until(lambda: not a._caches.changed)
            hub.drops = False
            await until(lambda: b._caches.manifest.entries[key].version == "3")
            await until(lambda: b._caches.in_touch())
            b._bus.connected = False  # type: ignore[misc]
            assert not b._caches.in_touch()  # so that nothing is found
            b._bus.connected = True  # type: ignore[misc]
            await joins.stop()

    asyncio.run(run())
