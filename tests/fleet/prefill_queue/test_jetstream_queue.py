"""The prefill queue over a real NATS server: kills, restarts, and one effect for each prompt."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.request import urlopen

import numpy as np
import pytest
from tests.lib.server_process import ServerProcess, free_ports, nats_server

from pigou.config import ConfigError
from pigou.control.pull_queue.config import PullQueueConfig
from pigou.control.pull_queue.prefill_queue import PrefillItem, ServiceTable
from pigou.fleet.prefill_queue import publisher
from pigou.fleet.prefill_queue.broker import BrokerUnavailable, PoolBacklog, PrefillBroker
from pigou.fleet.prefill_queue.messages import (
    ClaimQuestion,
    MessageSigner,
    PrefillOffer,
    QueueAddress,
    QueuedPrefill,
)
from pigou.fleet.prefill_queue.publisher import (
    NobodyPulls,
    PrefillPublisher,
    PullWorker,
    UncomputedPrefill,
)
from pigou.fleet.prefill_queue.puller import PrefillPuller
from pigou.request import NEVER, SECOND
from pigou.wire.fleet_secret import FleetSecret
from pigou.wire.names import PullPool

pytest.importorskip("nats")
LEG = {"path": "/v1/completions", "wire_id": "w", "mark": "", "body": b"{}"}
Compute = Callable[[QueuedPrefill], Awaitable[tuple[int, bytes]]]


SECRET = FleetSecret.make()
SEAL = MessageSigner(SECRET)
POOL = PullPool.of("q", "tiny", "v1", SECRET)


class PullFleet:
    """A NATS server, one gateway, and workers that compute by a function."""

    def __init__(self, server: ServerProcess, stack: AsyncExitStack, options: str) -> None:
        self.server, self._stack = server, stack
        self.address = QueueAddress.parse(f"{server.url}/q{options}")
        self.seconds = np.ones((1, 8))  # of a prompt on each worker
        self.computed: list[tuple[str, str]] = []
        self.claims: list[tuple[str, str]] = []
        self.workers: dict[str, PullWorker] = {}
        config = PullQueueConfig(max_deliveries=2, max_bypass=3)
        broker = PrefillBroker(self.address)
        self.gateway = PrefillPublisher(broker, config, self._service, lambda: self.workers, SEAL)

    def _service(self, items: Sequence[PrefillItem], workers: Sequence[str]) -> ServiceTable:
        seconds = np.repeat(self.seconds[:, : len(workers)], len(items), axis=0)
        return ServiceTable(seconds, np.full(seconds.shape, 600))

    async def start(self, task: Awaitable[Any]) -> asyncio.Task[Any]:
        """Run something until the end of the test."""
        running = asyncio.ensure_future(task)
        self._stack.callback(running.cancel)
        await asyncio.sleep(0)
        return running  # type: ignore[return-value]

    async def worker(self, name: str, compute: Compute | None = None) -> asyncio.Task[Any]:
        """Start a worker that answers with its name."""

        async def answer(prompt: QueuedPrefill) -> tuple[int, bytes]:
            self.computed.append((prompt.request, name))
            return 200, name.encode()

        self.workers[name] = PullWorker(name, POOL)
        broker = PrefillBroker(self.address)
        puller = PrefillPuller(broker, name, compute or answer, POOL, signer=SEAL)
        task = await self.start(puller.run())
        while not all(await self.gateway._ask_pullers({name: self.workers[name]})):
            await asyncio.sleep(0.01)
        self.gateway._pulling[name] = True
        return task

    async def kill(self, worker: asyncio.Task[Any]) -> None:
        """Close a worker's connection, so that it says nothing more."""
        while not worker.done():  # Python 3.11's `wait_for` may swallow one cancellation
            worker.cancel()
            await asyncio.wait((worker,), timeout=1.0)

    def expect(self) -> None:
        """Have prompts wait for workers that do not pull yet."""
        self._stack.enter_context(patch.object(self.gateway, "_pulls", lambda _: True))

    async def prefill(
        self, request: str, deadline_s: float = 0.0, incarnation: int = 0
    ) -> PrefillOffer:
        """Have a prompt computed."""
        now = time.monotonic_ns()
        deadline = now + round(deadline_s * SECOND) if deadline_s else NEVER
        item = PrefillItem(request, 600, now, incarnation, deadline_ns=deadline)
        return await self.gateway.prefill(
            item, LEG, POOL, lambda worker: self.claims.append((request, worker))
        )

    async def until(self, met: Callable[[], bool | int], seconds: float = 60.0) -> None:
        """Wait until something is so."""
        async with asyncio.timeout(seconds):
            while not met():
                await asyncio.sleep(0.01)

    async def empty(self) -> None:
        """Wait until the broker has no prompt."""
        while await self.length():
            await asyncio.sleep(0.02)

    async def length(self) -> int:
        """Prompts that the broker has."""
        stream = self.gateway._broker.stream
        return (await stream.stream_info(self.address.names.stream)).state.messages


@asynccontextmanager
async def pull_fleet(folder: Path, options: str = "?lease_s=0.6") -> AsyncIterator[PullFleet]:
    with nats_server(folder) as server, patch.object(publisher, "_RETRY_S", 0.1):
        async with AsyncExitStack() as stack:
            fleet = PullFleet(server, stack, options)
            await fleet.start(fleet.gateway.run())
            await fleet.until(lambda: fleet.gateway._connected)  # kernels are compiled
            yield fleet


async def stuck(_: QueuedPrefill) -> tuple[int, bytes]:
    await asyncio.sleep(60)
    return 200, b""


def law(test: Callable[[Path], Awaitable[None]]) -> Callable[[Path], None]:
    """Run a test of a coroutine within 90 seconds."""

    def run(tmp_path: Path) -> None:
        async def timed() -> None:
            async with asyncio.timeout(90):
                await test(tmp_path)

        asyncio.run(timed())

    run.__name__, run.__doc__ = test.__name__, test.__doc__  # type: ignore[attr-defined]
    return run


@law
async def test_prompts_are_computed_once_each_and_the_queue_ends_empty(folder: Path) -> None:
    async with pull_fleet(folder, "?storage=memory") as fleet:
        for name in ("p0", "p1"):
            await fleet.worker(name)
        offers = await asyncio.gather(*(fleet.prefill(f"r{n}") for n in range(24)))
        assert {offer.request for offer in offers} == {f"r{n}" for n in range(24)}
        assert set(fleet.computed) <= set(fleet.claims)
        assert fleet.gateway.core.counts.acked == 24
        await fleet.empty()


@law
async def test_a_killed_workers_prompt_is_redelivered_within_the_lease(folder: Path) -> None:
    """TTFT goes on from the arrival."""
    async with pull_fleet(folder) as fleet:
        dead = await fleet.worker("p0", stuck)
        began = time.monotonic()
        prompt = await fleet.start(fleet.prefill("r0"))
        await fleet.until(lambda: len(fleet.claims))
        await fleet.kill(dead)
        await fleet.worker("p1")
        offer = await prompt
        assert offer.reply == b"p1"
        assert fleet.claims == [("r0", "p0"), ("r0", "p1")]
        assert time.monotonic() - began > 0.5
        assert fleet.gateway.core.counts.redelivered == 1


@law
async def test_a_worker_that_lives_keeps_its_prompt_beyond_the_lease(folder: Path) -> None:
    async with pull_fleet(folder, "?lease_s=1.5") as fleet:

        async def slow(_: QueuedPrefill) -> tuple[int, bytes]:
            await asyncio.sleep(2.5)
            return 200, b"slow"

        await fleet.worker("p0", slow)
        prompt = await fleet.start(fleet.prefill("r0"))
        await fleet.until(lambda: len(fleet.claims))
        await fleet.worker("p1")
        assert (await prompt).reply == b"slow"
        assert fleet.computed == []


@law
async def test_nothing_is_lost_when_the_server_is_killed_and_comes_back(folder: Path) -> None:
    async with pull_fleet(folder) as fleet:
        fleet.expect()
        prompts = [await fleet.start(fleet.prefill(f"r{n}")) for n in range(8)]
        for _ in range(3000):
            if await fleet.length() == 8:
                break
            await asyncio.sleep(0.02)
        fleet.server.kill()
        await asyncio.sleep(0.2)
        fleet.server.start()
        await fleet.worker("p0")
        offers = await asyncio.gather(*prompts)
        assert [offer.reply for offer in offers] == [b"p0"] * 8
        assert len(fleet.computed) == 8


@law
async def test_who_connects_again_leaves_no_connection_behind(folder: Path) -> None:
    (port,) = free_ports(1)
    with nats_server(folder, ("-m", str(port))) as server:
        broker = PrefillBroker(QueueAddress.parse(f"{server.url}/q"))
        for _ in range(2):  # as a worker does whose client is about to connect again itself
            await broker.connect()
        with urlopen(f"http://127.0.0.1:{port}/connz") as answer:
            assert json.load(answer)["num_connections"] == 1
        await broker.close()


@law
async def test_the_first_offer_counts_and_the_second_has_no_effect(folder: Path) -> None:
    async with pull_fleet(folder) as fleet:
        hold, counts = asyncio.Event(), []

        async def late(_: QueuedPrefill) -> tuple[int, bytes]:
            await hold.wait()
            return 200, b"late"

        await fleet.worker("p0", late)
        puller = PrefillPuller(PrefillBroker(fleet.address), "p0", late, POOL, signer=SEAL)
        await puller._broker.connect()
        prompt = await fleet.start(fleet.prefill("r0"))
        await fleet.until(lambda: len(fleet.claims))
        queued = QueuedPrefill("r0", 0, fleet.gateway._subject, "", "", "", 1, b"")
        for reply in (b"first", b"second"):
            counts.append(await puller._offer(queued, 200, reply))
        assert (await prompt).reply == b"first"
        assert counts == [True, False]
        hold.set()
        await fleet.empty()


@law
async def test_a_stream_that_is_deleted_is_made_again(folder: Path) -> None:
    """As that in memory is, when its server ends."""
    async with pull_fleet(folder, "?storage=memory") as fleet:
        await fleet.worker("p0")
        assert (await fleet.prefill("r0")).reply == b"p0"
        await fleet.gateway._broker.stream.delete_stream(fleet.address.names.stream)
        with pytest.raises(BrokerUnavailable):
            await fleet.prefill("r1")  # its prompt is computed where it is decoded
        for number in range(2, 99):
            with suppress(BrokerUnavailable):
                assert (await fleet.prefill(f"r{number}", deadline_s=60)).reply == b"p0"
                return
            await asyncio.sleep(0.05)
        raise AssertionError("nobody made the stream again")


@law
async def test_the_same_prompt_is_stored_once(folder: Path) -> None:
    async with pull_fleet(folder) as fleet:
        broker, subject = fleet.gateway._broker, POOL.prompt("g", "r0", 0)
        assert [await broker.publish(subject, "r0.0", b"x") for _ in range(3)] == [1, 1, 1]
        assert await fleet.length() == 1


@law
async def test_a_client_that_leaves_takes_its_prompt_back(folder: Path) -> None:
    async with pull_fleet(folder) as fleet:
        fleet.expect()
        prompts = [await fleet.start(fleet.prefill(name)) for name in ("r0", "r.1 >*")]
        while await fleet.length() < 2:
            await asyncio.sleep(0.02)
        prompts[1].cancel()
        while await fleet.length() == 2:
            await asyncio.sleep(0.02)
        await fleet.worker("p0")
        assert (await prompts[0]).request == "r0"
        assert fleet.computed == [("r0", "p0")]
        assert fleet.gateway.core.counts.cancelled == 1


@law
async def test_a_prompt_that_is_taken_back_and_queued_again_is_not_lost(folder: Path) -> None:
    """As the control plane does that recalls it; the broker may delete after it stored again."""
    async with pull_fleet(folder) as fleet:
        fleet.expect()
        broker, deleted = fleet.gateway._broker, asyncio.Event()
        delete = broker.delete

        async def late(subject: str, sequence: int) -> None:
            await asyncio.sleep(0.1)
            await delete(subject, sequence)
            deleted.set()

        async def recalled() -> PrefillOffer:
            with suppress(asyncio.CancelledError):
                return await fleet.prefill("r0")
            return await fleet.prefill("r0", deadline_s=60, incarnation=1)

        broker.delete = late  # type: ignore[method-assign]
        prompt = await fleet.start(recalled())
        await fleet.until(lambda: fleet.gateway._pending["r0"].copies)
        prompt.cancel()
        await deleted.wait()
        assert await fleet.length() == 1
        await fleet.worker("p0")
        assert (await prompt).incarnation == 1
        assert fleet.computed == [("r0", "p0")]


@law
async def test_what_the_broker_lost_is_stored_again_and_what_it_has_is_not(folder: Path) -> None:
    async with pull_fleet(folder, "?lease_s=0.2") as fleet:
        fleet.expect()
        prompts = [await fleet.start(fleet.prefill(name)) for name in ("r0", "r1")]
        pending, broker = fleet.gateway._pending, fleet.gateway._broker
        await fleet.until(lambda: all(prompt.copies == 1 for prompt in pending.values()))
        await broker.delete(pending["r0"].subject, pending["r0"].sequence)
        assert await fleet.length() == 1
        await fleet.until(lambda: pending["r0"].copies == 2)
        await asyncio.sleep(0.5)  # two leases more
        assert [pending[name].copies for name in ("r0", "r1")] == [2, 1]
        assert await fleet.length() == 2
        await fleet.worker("p0")
        await asyncio.gather(*prompts)
        assert sorted(fleet.computed) == [("r0", "p0"), ("r1", "p0")]


@law
async def test_who_takes_a_prompt_back_that_a_worker_has_loses_no_other(folder: Path) -> None:
    """As a purge of its subject did: the first of three was never delivered again."""
    async with pull_fleet(folder, "?lease_s=1") as fleet:
        fleet.expect()
        puller = PrefillBroker(fleet.address)
        await puller.connect()
        subscription = await puller.subscribe(POOL)
        prompts = [await fleet.start(fleet.prefill("r0"))]
        messages = await subscription.fetch(1, timeout=30)
        for name in ("r1", "r2"):
            prompts.append(await fleet.start(fleet.prefill(name)))
            messages += await subscription.fetch(1, timeout=30)
        prompts[1].cancel()
        while await fleet.length() > 2:
            await asyncio.sleep(0.02)
        await messages[2].ack()
        await messages[0].nak()
        (again,) = await subscription.fetch(1, timeout=30)
        assert again.subject == messages[0].subject
        await puller.close()


@law
async def test_what_the_broker_does_not_deliver_any_more_is_stored_again(folder: Path) -> None:
    async with pull_fleet(folder, "?lease_s=0.2") as fleet:
        fleet.expect()
        broker = fleet.gateway._broker
        backlog = PoolBacklog(1, ack_floor=1)
        with patch.object(broker, "backlog", lambda _: asyncio.sleep(0, backlog)):
            prompt = await fleet.start(fleet.prefill("r0"))
            await fleet.until(lambda: fleet.gateway._pending["r0"].copies == 2)
            assert await fleet.length() == 1
            await fleet.worker("p0")
            await prompt
            assert fleet.computed == [("r0", "p0")]


@law
async def test_prompts_outlive_a_server_that_keeps_none(folder: Path) -> None:
    async with pull_fleet(folder, "?storage=memory&lease_s=0.6") as fleet:
        begun: list[str] = []

        async def held(prompt: QueuedPrefill) -> tuple[int, bytes]:
            begun.append(prompt.request)
            return await stuck(prompt)

        await fleet.worker("p0", held)
        prompts = [await fleet.start(fleet.prefill(f"r{n}")) for n in range(4)]
        await fleet.until(lambda: len(begun) == 2)
        fleet.server.kill()
        fleet.server.start()
        await fleet.worker("p1")
        await asyncio.gather(*prompts[2:])
        assert {("r2", "p1"), ("r3", "p1")} <= set(fleet.computed)


@law
async def test_a_gateway_whose_connection_is_closed_under_it_makes_another(folder: Path) -> None:
    """As nats-py does at errors of the server."""
    async with pull_fleet(folder) as fleet:
        fleet.expect()
        prompt = await fleet.start(fleet.prefill("r0", deadline_s=60))
        await fleet.until(lambda: fleet.gateway._pending["r0"].copies)
        await fleet.gateway._broker.client.close()
        await fleet.worker("p0")
        assert (await prompt).reply == b"p0"


@law
async def test_a_deadline_is_answered_with_an_error(folder: Path) -> None:
    async with pull_fleet(folder) as fleet:
        fleet.expect()
        with pytest.raises(UncomputedPrefill, match="claimed by nobody") as raised:
            await fleet.prefill("r0", deadline_s=0.3)
        assert raised.value.expired
        await fleet.empty()


@law
async def test_a_prompt_that_ends_its_workers_is_a_dead_letter(folder: Path) -> None:
    async with pull_fleet(folder) as fleet:

        async def broken(_: QueuedPrefill) -> tuple[int, bytes]:
            return 500, b""

        await fleet.worker("p0", broken)
        with pytest.raises(UncomputedPrefill, match="ended its workers"):
            await fleet.prefill("r0")
        assert len(fleet.claims) == 2
        await fleet.empty()


@law
async def test_a_claim_that_is_not_worth_it_is_left_to_the_other_worker(folder: Path) -> None:
    async with pull_fleet(folder) as fleet:
        fleet.expect()
        fleet.seconds = np.array([[9.0, 0.1]])  # the second worker has the prefix
        fleet.workers |= {name: PullWorker(name, POOL) for name in ("p0", "p1")}

        async def alive(workers: Sequence[str]) -> list[bool]:
            return [True] * len(workers)

        with patch.object(fleet.gateway, "_ask_pullers", alive):  # p1 as well, which asks later
            await fleet.until(lambda: fleet.gateway._pulling.get("p1", False))
            await fleet.worker("p0")
            prompt = await fleet.start(fleet.prefill("r0"))
            await fleet.until(lambda: fleet.gateway.core.counts.left)
            await fleet.worker("p1")
            await prompt
        assert fleet.gateway.core.counts.left <= 3
        fleet.computed.clear()
        await fleet.prefill("r1")
        assert fleet.computed, "the bound of bypasses holds whoever asks"


@law
async def test_a_prompt_that_nobody_pulls_is_not_queued(folder: Path) -> None:
    """Of another version or without the secret, of workers that do not pull or are not known."""
    async with pull_fleet(folder) as fleet:
        began = time.monotonic()
        pools = [PullPool.of("q", "tiny", "v2", SECRET), PullPool.of("q", "tiny", "v1", None)]
        await fleet.worker("p0")
        await fleet.until(lambda: fleet.gateway._pulling.get("p0", False))
        fleet.workers |= {pool.key: PullWorker(pool.key, pool) for pool in pools}
        for pool in pools:
            item = PrefillItem("r0", 600, time.monotonic_ns())
            with pytest.raises(NobodyPulls):
                await fleet.gateway.prefill(item, LEG, pool, lambda _: None)
        del fleet.workers["p0"]
        with pytest.raises(NobodyPulls):
            await fleet.prefill("r0")
        assert time.monotonic() - began < 20.0
        assert fleet.computed == []
        assert not await fleet.gateway._broker.stored(">")


@law
async def test_a_queued_prompt_whose_last_worker_went_is_let_go(folder: Path) -> None:
    async with pull_fleet(folder) as fleet:
        dead = await fleet.worker("p0", stuck)
        prompts = [await fleet.start(fleet.prefill(f"r{n}")) for n in range(4)]
        await fleet.until(lambda: len(fleet.claims) == 2)
        await fleet.kill(dead)
        del fleet.workers["p0"]
        results = await asyncio.gather(*prompts, return_exceptions=True)
        assert [type(result) for result in results] == [NobodyPulls] * 4
        await fleet.empty()


@law
async def test_a_stranger_on_the_server_has_nothing_computed(folder: Path) -> None:
    async with pull_fleet(folder) as fleet:
        await fleet.worker("p0")
        stranger, subject = MessageSigner(FleetSecret.make()), POOL.prompt("g", "r0", 0)
        queued = QueuedPrefill("r0", 0, fleet.gateway._subject, "/", "", "", 1, b"")
        await fleet.gateway._broker.publish(subject, "r0", stranger.sign(queued))
        await fleet.empty()
        assert fleet.computed == []
        question = stranger.sign(ClaimQuestion("r0", 0, "p0", 1))
        with pytest.raises(BrokerUnavailable):
            await fleet.gateway._broker.ask(f"{fleet.gateway._subject}.claim", question, 0.2)


@law
async def test_without_a_broker_a_prompt_is_refused_at_once(folder: Path) -> None:
    broker = PrefillBroker(QueueAddress.parse("nats://127.0.0.1:9/q"))
    with pytest.raises(BrokerUnavailable, match="is not there"):
        await broker.connect()
    gateway = PrefillPublisher(broker, PullQueueConfig(), lambda *_: None, dict)  # type: ignore[arg-type]
    with pytest.raises(BrokerUnavailable):
        await gateway.prefill(PrefillItem("r0", 1, 0), LEG, POOL, lambda _: None)


@pytest.mark.parametrize(
    ("url", "message"),
    [("http://h:1/q", "write nats"), ("nats://h:1/", "write nats"), ("nats://h:1/a.b", "write"),
     ("nats://h:1/q?lease_s=0", "lease_s is 0"), ("nats://h:1/q?storage=tape", "storage"),
     ("nats://h:1/q?leas=1", "leas")],
)  # fmt: skip
def test_an_address_that_is_none_is_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QueueAddress.parse(url)
