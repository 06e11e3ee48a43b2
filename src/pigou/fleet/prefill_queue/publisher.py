"""The gateway's side: prompts are published, claims are priced, the first offer counts."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import msgspec
from nats.aio.msg import Msg
from nats.errors import Error

from pigou.background import Background
from pigou.control.pull_queue.claim_price import ServiceTable, cached_at, service_table, warm_up
from pigou.control.pull_queue.config import PullQueueConfig
from pigou.control.pull_queue.prefill_queue import (
    PrefillClaim,
    PrefillExpired,
    PrefillItem,
    PrefillQueue,
    QueueEffect,
)
from pigou.fleet.prefill_queue.broker import BrokerUnavailable, PrefillBroker
from pigou.fleet.prefill_queue.messages import (
    ALIVE,
    CLAIM,
    OFFER,
    ClaimAnswer,
    ClaimQuestion,
    MessageSigner,
    OfferAnswer,
    PrefillOffer,
    QueueAddress,
    QueuedPrefill,
    WorkerAlive,
)
from pigou.gateway.failure import Rejected
from pigou.gateway.metrics import NO_BROKER, NO_PULLER
from pigou.gateway.plane_driver import (
    LocalPrefill,
    PlaneDriver,
    PrefillLeg,
)
from pigou.gateway.proxy.upstream import Upstream
from pigou.request import SECOND, Request
from pigou.wire.errors import APIError
from pigou.wire.fleet_secret import FleetSecret
from pigou.wire.names import PullPool

_log = logging.getLogger("pigou.fleet")

#: Seconds between two looks at leases and deadlines, and two at the broker; its answer's timeout.
_TICK_S, _RETRY_S, _ANSWER_S = 0.05, 1.0, 2.0
#: Looks at the broker that fail in a row, after which another connection is made.
_MAX_FAILURES = 3
#: Prompts that are published again after one look; prompts among which none is looked for, as the
#: broker lists no more than twice as many.
_MAX_AGAIN, _MAX_SEARCHED = 100, 50_000
#: Seconds within which live workers begin to pull.
_SETTLE_S = 2.0
#: Redelivery delay of a returned prompt, min and max seconds.
_MIN_DELAY_S, _MAX_DELAY_S = 0.02, 0.25

#: Seconds and tokens of prompts on workers, by their ids.
QueueService: TypeAlias = Callable[[Sequence[PrefillItem], Sequence[str]], ServiceTable]


class UncomputedPrefill(APIError):
    """Nobody computes a prompt: its deadline passed (`expired`), or it is a dead letter."""

    def __init__(self, effect: QueueEffect) -> None:
        self.expired = isinstance(effect, PrefillExpired)
        reason = "was claimed by nobody in time" if self.expired else "ended its workers"
        message = f"prompt {effect.item.request} {reason}."
        super().__init__(503 if self.expired else 502, message, retry_after=1)


class NobodyPulls(Exception):
    """No worker of this gateway pulls a prompt."""


class PullWorker(NamedTuple):
    """A prefill worker of this gateway, and its pull pool, if any."""

    id: str
    pool: PullPool


class _Pending(msgspec.Struct, eq=False):
    subject: str
    pool: PullPool
    message: bytes
    reply: asyncio.Future[PrefillOffer]
    on_claim: Callable[[str], None]
    delivery: tuple[str, int] = "", 0  # claim: worker, and the broker's delivery count
    copies: int = 0  # copies stored at the broker so far
    sequence: int = 0  # sequence number of the last copy
    unpulled: int = 0  # consecutive checks without a puller in its pool


class PrefillPublisher:
    """Publishes one gateway's prompts to the broker; `PrefillQueue` prices each worker's claim."""

    def __init__(
        self, broker: PrefillBroker, config: PullQueueConfig, service: QueueService,
        workers: Callable[[], Mapping[str, PullWorker]], signer: MessageSigner | None = None,
    ) -> None:  # fmt: skip
        self._signer = signer or MessageSigner()
        lease_s = broker.address.lease_s
        self.core = PrefillQueue(msgspec.structs.replace(config, lease_s=lease_s))
        self._broker, self._service, self._workers = broker, service, workers
        self._id = secrets.token_hex(8)
        self._subject = broker.address.names.gateway(self._id)
        self._pulling: dict[str, bool] = {}  # by incarnation: last answer
        self._unpulled: dict[PullPool, float] = {}  # since when; never once that was logged
        self._known: set[str] = set()  # ids of workers known to the core
        self._pending: dict[str, _Pending] = {}
        self._deletions: set[asyncio.Future[None]] = set()
        self._connected = self._ended = False
        self.length = 0

    async def run(self) -> None:
        """Connect, as often as it takes, and let time pass, until cancelled."""
        await asyncio.to_thread(warm_up)
        # A task of its own: its client may swallow a cancellation.
        talk = Background().start("prefill queue broker", self._talk)
        try:
            while True:
                await asyncio.sleep(_TICK_S)
                self._apply(self.core.tick(time.monotonic_ns()))
        finally:
            self._connected, self._ended = False, True
            talk.cancel()
            await self._broker.close()

    async def _talk(self) -> None:
        """Connect, and look at the broker every second, as its client may be closed for good."""
        failures, searched_s = _MAX_FAILURES, 0.0
        while not self._ended:
            try:
                if failures >= _MAX_FAILURES or self._broker.client.is_closed:
                    await self._broker.connect()
                    await self._broker.client.subscribe(f"{self._subject}.*", cb=self._receive)
                    self._connected, failures = True, 1  # it is yet to answer
                await self._ask_self()
                await self._look_for_pullers()
                if failures or time.monotonic() - searched_s >= self.core.config.lease_s:
                    searched_s = time.monotonic()
                    await self._restore()
                failures = 0
            except (BrokerUnavailable, Error):
                failures += 1
            await asyncio.sleep(_RETRY_S)

    async def _ask_self(self) -> None:
        """Ask as a worker does: questions reach this gateway. Raises BrokerUnavailable."""
        question = self._signer.sign(ClaimQuestion("", 0, "", 0))
        await self._broker.ask(f"{self._subject}.{CLAIM}", question, _ANSWER_S)

    async def _restore(self) -> None:
        """Republish waiting prompts that the broker lost, or below the ack floor."""
        waiting = [
            pair for pair in self._pending.items() if pair[1].copies and self._is_unclaimed(*pair)
        ]
        if not waiting or len(self._pending) > _MAX_SEARCHED:
            return
        stored = await self._broker.stored(self._broker.address.names.prompts_of(self._id))
        pools = {pending.pool for _, pending in waiting}
        floors = {pool: (await self._broker.backlog(pool)).ack_floor for pool in pools}
        lost = [
            (request, pending)
            for request, pending in waiting
            if pending.subject not in stored or pending.sequence <= floors[pending.pool]
        ]
        for request, pending in lost[:_MAX_AGAIN]:
            if self._is_unclaimed(request, pending):
                if pending.subject in stored:
                    await self._broker.delete(pending.subject, pending.sequence)
                pending.delivery = "", 0  # the broker counts from 1 again
                await self._publish(pending)

    async def _look_for_pullers(self) -> None:
        """Poll pullers and backlog; end prompts without a puller twice in a row."""
        workers = self._workers()
        self._pulling = dict(zip(workers, await self._ask_pullers(workers), strict=True))
        self._update_workers(time.monotonic_ns())
        pools = {worker.pool for worker in workers.values()}
        backlogs = [await self._broker.backlog(pool) for pool in pools]
        self.length = sum(backlog.prompts for backlog in backlogs)
        for request, pending in list(self._pending.items()):
            idle = self._is_unclaimed(request, pending) and not self._pulls(pending.pool)
            pending.unpulled = pending.unpulled + 1 if idle else 0
            if pending.unpulled > 1:
                pending.reply.set_exception(NobodyPulls)
                self.core.cancel(request)
                self._delete(pending)

    async def _ask_pullers(self, workers: Mapping[str, PullWorker]) -> list[bool]:
        async def ask(incarnation: str, pool: PullPool) -> bool:
            try:
                data = await self._broker.ask(
                    pool.puller(incarnation), self._signer.sign(WorkerAlive("")), _ANSWER_S
                )
                return self._signer.verify(data, WorkerAlive).worker == incarnation
            except (BrokerUnavailable, msgspec.MsgspecError):
                return False

        answers = (ask(incarnation, worker.pool) for incarnation, worker in workers.items())
        return await asyncio.gather(*answers)

    def _pulls(self, pool: PullPool) -> bool:
        workers = self._workers().items()
        return any(self._pulling.get(name) for name, worker in workers if worker.pool == pool)

    async def _await_puller(self, pool: PullPool) -> None:
        """Return where a worker pulls from a pool, new ones asked first; raise NobodyPulls."""
        new = {
            incarnation: worker
            for incarnation, worker in self._workers().items()
            if worker.pool == pool and incarnation not in self._pulling
        }
        if new:
            self._pulling |= zip(new, await self._ask_pullers(new), strict=True)
        if self._pulls(pool):
            self._unpulled.pop(pool, None)
            return
        now_s = time.monotonic()
        if now_s - self._unpulled.setdefault(pool, now_s) >= _SETTLE_S:
            self._unpulled[pool] = math.inf
            _log.warning(
                "no prefill worker of this gateway pulls from queue %s (pool %s): prompts are "
                "computed at their decode workers; start prefill workers of the same model, "
                "version and fleet secret with --prefill-queue", pool.queue, pool.key,
            )  # fmt: skip
        raise NobodyPulls

    def _is_unclaimed(self, request: str, pending: _Pending) -> bool:
        awaited = self._pending.get(request) is pending and not pending.reply.done()
        return awaited and not self.core.claimant(request)

    async def _publish(self, pending: _Pending) -> None:
        id_ = f"{pending.subject}.{pending.copies}"
        pending.sequence = await self._broker.publish(pending.subject, id_, pending.message)
        pending.copies += 1

    async def prefill(
        self, item: PrefillItem, leg: Mapping[str, Any], pool: PullPool,
        on_claim: Callable[[str], None],
    ) -> PrefillOffer:  # fmt: skip
        """Have a pulling worker compute a prompt; return the first offer. Cancel it to withdraw.

        `on_claim` gets the worker's id at each claim. Raises UncomputedPrefill if it expired or is
        a dead letter, NobodyPulls if no worker pulls from the pool, BrokerUnavailable if it is not
        queued.
        """
        if not (self._connected and self._broker.client.is_connected):
            raise BrokerUnavailable("no prefill queue is connected")
        await self._await_puller(pool)
        request = item.request
        subject = pool.prompt(self._id, request, item.incarnation)
        message = QueuedPrefill(request, item.incarnation, self._subject, tokens=item.tokens, **leg)
        reply: asyncio.Future[PrefillOffer] = asyncio.get_running_loop().create_future()
        pending = _Pending(subject, pool, self._signer.sign(message), reply, on_claim)
        self._pending[request] = pending
        self.core.enqueue(item, time.monotonic_ns())
        try:
            await self._publish(pending)
            return await pending.reply
        finally:
            is_back = not pending.reply.done() or pending.reply.cancelled()
            if self._pending.get(request) is pending:
                del self._pending[request]
                if is_back:
                    self.core.cancel(request)
            if is_back:
                self._delete(pending)

    # --- what workers say -----------------------------------------------------------------------

    async def _receive(self, message: Msg) -> None:
        kind = message.subject.rpartition(".")[2]
        try:
            if kind == CLAIM:
                question = self._signer.verify(message.data, ClaimQuestion)
                await message.respond(self._signer.sign(self._claimed(question)))
            elif kind == OFFER:
                offer = self._signer.verify(message.data, PrefillOffer)
                await message.respond(self._signer.sign(OfferAnswer(self._take_offer(offer))))
            elif kind == ALIVE:
                alive = self._signer.verify(message.data, WorkerAlive)
                if (worker := self._workers().get(alive.worker)) is not None:
                    self.core.extend(worker.id, time.monotonic_ns(), alive.request)
        except (msgspec.MsgspecError, OSError):
            return  # strangers to the fleet get no answer

    def _claimed(self, question: ClaimQuestion) -> ClaimAnswer:
        now_ns, request = time.monotonic_ns(), question.request
        if question.worker:
            self._pulling[question.worker] = True
        known = self._update_workers(now_ns)
        pending = self._pending.get(request)
        if pending is None or self.core.incarnation(request) != question.incarnation:
            return ClaimAnswer("gone")
        worker = known.get(question.worker)
        if worker is None:
            return ClaimAnswer("later", _MAX_DELAY_S)
        repeated = pending.delivery == (worker, question.delivery)
        if repeated and self.core.claimant(request) == worker:
            return ClaimAnswer("begin")
        busy_s = [self.core.free_s(other, now_ns) for other in self.core.workers]
        delay_s = min((seconds for seconds in busy_s if seconds > 0.0), default=0.0)
        delay_s = min(max(delay_s, _MIN_DELAY_S), _MAX_DELAY_S)
        claim = self.core.claim_one(
            request, worker, now_ns, lambda items: self._service(items, self.core.workers), delay_s
        )
        if isinstance(claim, PrefillClaim):
            pending.delivery = worker, question.delivery
            pending.on_claim(worker)
            return ClaimAnswer("begin")
        if claim:
            self._apply(claim)
            return ClaimAnswer("gone")
        return ClaimAnswer("later", delay_s)

    def _take_offer(self, offer: PrefillOffer) -> bool:
        pending = self._pending.get(offer.request)
        if pending is None or pending.reply.done():
            return False
        if not self.core.ack(offer.request, offer.incarnation, time.monotonic_ns()):
            return False
        pending.reply.set_result(offer)
        return True

    def _update_workers(self, now_ns: int) -> Mapping[str, str]:
        workers = self._workers()
        known = {incarnation: worker.id for incarnation, worker in workers.items()}
        for worker in self._known - set(known.values()):
            self._apply(self.core.worker_down(worker, now_ns))
        self._known = set(known.values())
        for incarnation, worker in known.items():
            if self._pulling.get(incarnation, True):
                self.core.worker_up(worker)
            else:
                self.core.worker_stops(worker)
        return known

    def _apply(self, effects: Sequence[QueueEffect]) -> None:
        for effect in effects:
            pending = self._pending.get(effect.item.request)
            if pending is not None and not pending.reply.done():
                pending.reply.set_exception(UncomputedPrefill(effect))
                self._delete(pending)

    def _delete(self, pending: _Pending) -> None:
        """Delete a prompt at the broker; a puller would be told it is gone."""

        async def delete() -> None:
            with suppress(BrokerUnavailable):
                await self._broker.delete(pending.subject, pending.sequence)

        if pending.sequence:
            task = asyncio.ensure_future(delete())
            self._deletions.add(task)
            task.add_done_callback(self._deletions.discard)


class NatsPrefillQueue:
    """Prefill queue over NATS with priced claims; without the broker, prompts stay at decode."""

    def __init__(
        self, address: QueueAddress, plane_driver: PlaneDriver,
        secret: FleetSecret | None = None, config: PullQueueConfig | None = None, *,
        takes_unsigned: bool = False,
    ) -> None:  # fmt: skip
        self._plane_driver = plane_driver
        self._queue, self._secret = address.name, secret
        self._requests: dict[str, Request] = {}
        self._incarnations = 0
        self.config = config or PullQueueConfig()
        self._publisher = PrefillPublisher(
            PrefillBroker(address),
            self.config,
            self._service,
            self._workers,
            MessageSigner(secret, takes_unsigned=takes_unsigned),
        )
        self._max_wait_ns = round(address.max_age_s * SECOND)

    @property
    def length(self) -> int:
        """Waiting and claimed prompts of all gateways."""
        return self._publisher.length

    async def run(self) -> None:
        """Keep connected, until cancelled."""
        await self._publisher.run()

    async def prefill(
        self, request: Request, leg: PrefillLeg, on_claim: Callable[[str, int], None]
    ) -> bytes:
        """As `GatewayPrefillQueue.prefill`."""
        now_ns, plane = time.monotonic_ns(), self._plane_driver.plane
        wait_ns = min(plane.config.queue_timeout, self._max_wait_ns)
        self._incarnations += 1
        item = PrefillItem(
            request.id, request.prompt, request.arrival or now_ns, self._incarnations,
            min(request.deadline, now_ns + wait_ns), request.priority,
        )  # fmt: skip
        fields: dict[str, Any] = {"path": leg.path, "wire_id": leg.wire_id, "mark": leg.mark}
        fields |= {"body": msgspec.json.encode(leg.body), "traceparent": leg.traceparent}
        expected = self._plane_driver.upstreams.get(leg.worker)
        if expected is None:
            raise LocalPrefill(NO_PULLER)
        pool = self._pool(expected)
        self._requests[request.id] = request

        def claimed(worker: str) -> None:
            on_claim(worker, cached_at(plane, request, worker, time.monotonic_ns()))

        try:
            offer = await self._publisher.prefill(item, fields, pool, claimed)
        except BrokerUnavailable:
            raise LocalPrefill(NO_BROKER) from None
        except NobodyPulls:
            raise LocalPrefill(NO_PULLER) from None
        finally:
            if self._requests.get(request.id) is request:
                del self._requests[request.id]
        if offer.status != 200:
            raise Rejected(offer.status, offer.reply)
        return offer.reply

    def _service(self, items: Sequence[PrefillItem], workers: Sequence[str]) -> ServiceTable:
        requests = [self._requests[item.request] for item in items]
        return service_table(self._plane_driver.plane, requests, workers, time.monotonic_ns())

    def _pool(self, worker: Upstream) -> PullPool:
        secret = self._secret if worker.knows_secret else None
        return PullPool.of(self._queue, worker.engine.model, worker.worker.version, secret)

    def _workers(self) -> Mapping[str, PullWorker]:
        state, upstreams = self._plane_driver.plane.state, self._plane_driver.upstreams
        columns = state.columns
        return {
            upstreams[id_].engine.incarnation: PullWorker(id_, self._pool(upstreams[id_]))
            for row, id_ in enumerate(state.ids)
            if id_ in upstreams
            and upstreams[id_].engine.incarnation
            and columns.prefills[row]
            and not columns.decodes[row]
        }
