"""The gateway's side: prompts are published, claims are priced, the first offer counts."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import msgspec
from nats.aio.msg import Msg
from nats.errors import Error

from pigou.background import Background
from pigou.control.pull_queue.claim_price import warm_up
from pigou.control.pull_queue.config import PullQueueConfig
from pigou.control.pull_queue.messages import (
    PrefillClaim,
    PrefillExpired,
    PrefillItem,
    QueueEffect,
    ServiceTable,
)
from pigou.control.pull_queue.prefill_queue import PrefillQueue
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
    QueuedPrefill,
    WorkerAlive,
)

#: Seconds between two looks at leases and deadlines, and two at the broker; for an answer of it.
_TICK_S, _RETRY_S, _ANSWER_S = 0.05, 1.0, 2.0
#: Looks at the broker that fail in a row, after which another connection is made.
_MAX_FAILURES = 3
#: Prompts that are published again after one look; prompts among which none is looked for, as the
#: broker lists no more than twice as many.
_MAX_AGAIN, _MAX_SEARCHED = 100, 50_000
#: Seconds for which a prompt is given back, at least and at most.
_MIN_DELAY_S, _MAX_DELAY_S = 0.02, 0.25

#: Seconds and tokens of prompts on workers, by their ids.
QueueService: TypeAlias = Callable[[Sequence[PrefillItem], Sequence[str]], ServiceTable]


class UncomputedPrefill(Exception):
    """Nobody computes a prompt: it is expired, or a dead letter.

    Attributes:
        expired: whether its deadline passed; it is a dead letter otherwise.
    """

    def __init__(self, effect: QueueEffect) -> None:
        self.expired = isinstance(effect, PrefillExpired)
        reason = "was claimed by nobody in time" if self.expired else "ended its workers"
        super().__init__(f"prompt {effect.item.request} {reason}")


class _Pending(msgspec.Struct, eq=False):
    """A prompt whose first offer is awaited.

    `copies` are those that the broker has stored, one at a time, the last one at `sequence`.
    """

    subject: str
    version: str
    message: bytes
    reply: asyncio.Future[PrefillOffer]
    on_claim: Callable[[str], None]
    delivery: tuple[str, int] = "", 0  # of the claim: worker, and the broker's count
    copies: int = 0
    sequence: int = 0


class PrefillPublisher:
    """Publishes the prompts of one gateway, and decides who may compute them.

    The production core (`PrefillQueue`) knows this gateway's prompts and prices each claim; the
    broker keeps them, and hands them to whichever worker pulls.
    """

    def __init__(
        self, broker: PrefillBroker, config: PullQueueConfig, service: QueueService,
        workers: Callable[[], Mapping[str, str]], signer: MessageSigner | None = None,
    ) -> None:  # fmt: skip
        """Prepare for `run`.

        Args:
            broker: of the queue.
            config: of claims; leases are the broker's.
            service: what prompts take.
            workers: ids of the prefill workers, by the addresses of their servers.
            signer: of the fleet's messages.
        """
        self._signer = signer or MessageSigner()
        lease_s = broker.address.lease_s
        self.core = PrefillQueue(msgspec.structs.replace(config, lease_s=lease_s))
        self._broker, self._service, self._workers = broker, service, workers
        self._id = secrets.token_hex(8)
        self._subject = f"{broker.address.name}.gateway.{self._id}"
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
        """Connect, and look at the broker every second: it answers, and holds what waits.

        The client connects again by itself, but a server's error may close it for good. What
        waits is looked for once a lease, and after each failure.
        """
        failures, searched_s = _MAX_FAILURES, 0.0
        while not self._ended:
            try:
                if failures >= _MAX_FAILURES or self._broker.client.is_closed:
                    await self._broker.connect()
                    await self._broker.client.subscribe(f"{self._subject}.*", cb=self._receive)
                    self._connected, failures = True, 1  # it is yet to answer
                self.length = await self._broker.length()
                await self._ask_self()
                if failures or time.monotonic() - searched_s >= self.core.config.lease_s:
                    searched_s = time.monotonic()
                    await self._restore()
                failures = 0
            except (BrokerUnavailable, Error):
                failures += 1
            await asyncio.sleep(_RETRY_S)

    async def _ask_self(self) -> None:
        """Ask as a worker does: questions reach this gateway.

        Raises:
            BrokerUnavailable: they do not.
        """
        question = self._signer.sign(ClaimQuestion("", 0, "", 0))
        await self._broker.ask(f"{self._subject}.{CLAIM}", question, _ANSWER_S)

    async def _restore(self) -> None:
        """Publish again what waits and nobody would ever pull: the broker has it no more.

        Or it does not deliver it, as its sequence number is below the workers' ack floor.

        Raises:
            BrokerUnavailable: it does not answer.
        """
        waiting = [
            pair for pair in self._pending.items() if pair[1].copies and self._is_unclaimed(*pair)
        ]
        if not waiting or len(self._pending) > _MAX_SEARCHED:
            return
        stored = await self._broker.stored(self._broker.address.subjects_of(self._id))
        versions = {pending.version for _, pending in waiting}
        floors = {version: await self._broker.ack_floor(version) for version in versions}
        lost = [
            (request, pending)
            for request, pending in waiting
            if pending.subject not in stored or pending.sequence <= floors[pending.version]
        ]
        for request, pending in lost[:_MAX_AGAIN]:
            if self._is_unclaimed(request, pending):
                if pending.subject in stored:
                    await self._broker.delete(pending.subject, pending.sequence)
                pending.delivery = "", 0  # the broker counts from 1 again
                await self._publish(pending)

    def _is_unclaimed(self, request: str, pending: _Pending) -> bool:
        """Whether a prompt is awaited and nobody has claimed it."""
        awaited = self._pending.get(request) is pending and not pending.reply.done()
        return awaited and not self.core.claimant(request)

    async def _publish(self, pending: _Pending) -> None:
        """Have the broker store a prompt, once however often this fails.

        Raises:
            BrokerUnavailable: it may not be stored.
        """
        id_ = f"{pending.subject}.{pending.copies}"
        pending.sequence = await self._broker.publish(pending.subject, id_, pending.message)
        pending.copies += 1

    async def prefill(
        self, item: PrefillItem, leg: Mapping[str, Any], version: str,
        on_claim: Callable[[str], None],
    ) -> PrefillOffer:  # fmt: skip
        """Have whichever worker pulls it compute a prompt; return the first offer.

        Cancelled, it takes the prompt back, wherever it is.

        Args:
            item: the prompt; times are of `time.monotonic_ns`.
            leg: path, wire_id, mark and body of `QueuedPrefill`.
            version: of the workers that may compute it.
            on_claim: called with the worker's id at each claim.

        Raises:
            UncomputedPrefill: it expired, or is a dead letter.
            BrokerUnavailable: it could not be queued.
        """
        if not self._connected:
            raise BrokerUnavailable("no prefill queue is connected yet")
        request, address = item.request, self._broker.address
        subject = address.subject(version, self._id, request, str(item.incarnation))
        message = QueuedPrefill(request, item.incarnation, self._subject, tokens=item.tokens, **leg)
        reply: asyncio.Future[PrefillOffer] = asyncio.get_running_loop().create_future()
        pending = _Pending(subject, version, self._signer.sign(message), reply, on_claim)
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
                worker = self._workers().get(alive.worker, "")
                self.core.extend(worker, time.monotonic_ns(), alive.request)
        except (msgspec.MsgspecError, OSError):
            return  # who is not of the fleet gets no answer

    def _claimed(self, question: ClaimQuestion) -> ClaimAnswer:
        """Decide whether a worker is to compute the prompt that it pulled."""
        now_ns, request = time.monotonic_ns(), question.request
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
        claim = self.core.claim_one(request, worker, now_ns, self._law, delay_s)
        if isinstance(claim, PrefillClaim):
            pending.delivery = worker, question.delivery
            pending.on_claim(worker)
            return ClaimAnswer("begin")
        if claim:
            self._apply(claim)
            return ClaimAnswer("gone")
        return ClaimAnswer("later", delay_s)

    def _take_offer(self, offer: PrefillOffer) -> bool:
        """Take in an offer; return whether it is the first."""
        pending = self._pending.get(offer.request)
        if pending is None or pending.reply.done():
            return False
        if not self.core.ack(offer.request, offer.incarnation, time.monotonic_ns()):
            return False
        pending.reply.set_result(offer)
        return True

    def _law(self, items: Sequence[PrefillItem]) -> ServiceTable:
        return self._service(items, self.core.workers)

    def _update_workers(self, now_ns: int) -> Mapping[str, str]:
        """Tell the core which workers there are; return their ids by address."""
        known = self._workers()
        for worker in set(self.core.workers) - set(known.values()):
            self._apply(self.core.worker_down(worker, now_ns))
        for worker in known.values():
            self.core.worker_up(worker)
        return known

    def _apply(self, effects: Sequence[QueueEffect]) -> None:
        """Answer what is expired, and dead letters, with an error."""
        for effect in effects:
            pending = self._pending.get(effect.item.request)
            if pending is not None and not pending.reply.done():
                pending.reply.set_exception(UncomputedPrefill(effect))
                self._delete(pending)

    def _delete(self, pending: _Pending) -> None:
        """Have the broker forget a prompt; else who pulls it is told that it is gone."""

        async def delete() -> None:
            with suppress(BrokerUnavailable):
                await self._broker.delete(pending.subject, pending.sequence)

        if pending.sequence:
            task = asyncio.ensure_future(delete())
            self._deletions.add(task)
            task.add_done_callback(self._deletions.discard)
