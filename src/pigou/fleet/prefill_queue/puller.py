"""The worker's side: a prefill worker pulls the smallest batch that saturates it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import aiohttp
import msgspec
import nats.errors
from nats.aio.msg import Msg
from nats.errors import Error
from nats.js import JetStreamContext

from pigou.background import Background
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
from pigou.tracing.trace_context import TRACEPARENT
from pigou.wire.bodies import read_page
from pigou.wire.fleet_secret import TENANT, FleetSecret
from pigou.wire.names import WILD, PullPool, deployment_version, url_host
from pigou.worker.process import Registrar

#: Computes a prompt at this worker: status and body of its server's reply.
ComputePrompt: TypeAlias = Callable[[QueuedPrefill], Awaitable[tuple[int, bytes]]]
#: Seconds that a gateway is waited for, before a prompt is given back for so long, or another try
#: to connect or to offer.
_ANSWER_S, _RETRY_S = 2.0, 0.2
#: Seconds of one pull, after which the connection is looked at again.
_PULL_S = 1.0
#: Timeout in seconds for stopping the puller.
_END_S = 1.0


class PrefillPuller:
    """Pulls prompts for one incarnation of a worker, and renews their leases at every third."""

    def __init__(
        self, broker: PrefillBroker, worker: str, compute: ComputePrompt, pool: PullPool, *,
        batch_tokens: int = 512, signer: MessageSigner | None = None,
    ) -> None:  # fmt: skip
        self._signer = signer or MessageSigner()
        self._broker, self._worker, self._compute = broker, worker, compute
        self._pool, self._batch_tokens = pool, batch_tokens
        self._under_way: list[int] = []  # tokens of prompts being computed
        self._computed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    def stop(self) -> None:
        """Stop pulling; `run` ends once pulled prompts are computed."""
        self._stopping = True

    async def run(self) -> None:
        """Connect, as often as it takes, and pull until `stop`, or until cancelled."""
        subscription: JetStreamContext.PullSubscription | None = None
        try:
            while not self._stopping:
                try:
                    if subscription is None:
                        if not self._broker.client.is_connected:
                            await self._broker.connect()
                            presence = self._pool.puller(self._worker)
                            await self._broker.client.subscribe(presence, cb=self._answer)
                        subscription = await self._broker.subscribe(self._pool)
                    await self._pull(subscription)
                except (BrokerUnavailable, Error, OSError, msgspec.MsgspecError):
                    subscription = None
                    await asyncio.sleep(_RETRY_S)
            while self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            await self._broker.close()

    async def _answer(self, message: Msg) -> None:
        if not self._stopping:
            with suppress(Error, OSError):
                await message.respond(self._signer.sign(WorkerAlive(self._worker)))

    async def _pull(self, subscription: JetStreamContext.PullSubscription) -> None:
        # One is pulled beyond those that saturate the worker: it begins when they end. The broker
        # serves idle workers first, who have waited for longer.
        while sum(self._under_way[:-1]) >= self._batch_tokens:
            self._computed.clear()
            await self._computed.wait()
        try:
            (message,) = await subscription.fetch(1, timeout=_PULL_S)
        except (nats.errors.TimeoutError, TimeoutError):
            return
        try:
            prompt = self._signer.verify(message.data, QueuedPrefill)
        except msgspec.MsgspecError:
            await message.term()  # unsigned, or another version of the protocol
            return
        if await self._may_begin(message, prompt):
            self._under_way.append(prompt.tokens)
            task = asyncio.create_task(self._serve(message, prompt))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _may_begin(self, message: Msg, prompt: QueuedPrefill) -> bool:
        """Ask the gateway for the claim; release the prompt if refused."""
        delivery = message.metadata.num_delivered or 1
        question = ClaimQuestion(prompt.request, prompt.incarnation, self._worker, delivery)
        try:
            data = await self._broker.ask(
                f"{prompt.gateway}.{CLAIM}", self._signer.sign(question), _ANSWER_S
            )
        except BrokerUnavailable:  # it may be about to connect again
            await message.nak(delay=_RETRY_S)
            return False
        answer = self._signer.verify(data, ClaimAnswer)
        if answer.verdict == "later":
            await message.nak(delay=answer.delay_s)
        elif answer.verdict == "gone":
            await message.ack()
        return answer.verdict == "begin"

    async def _serve(self, message: Msg, prompt: QueuedPrefill) -> None:
        alive = asyncio.create_task(self._stay_alive(message, prompt))
        try:
            try:
                status, reply = await self._compute(prompt)
            finally:
                self._under_way.remove(prompt.tokens)
                self._computed.set()
            if status >= 500 or status in (408, 429):  # another worker may do better
                await message.nak(delay=_RETRY_S)
            else:
                await self._offer(prompt, status, reply)
                await message.ack()
        except (BrokerUnavailable, Error, OSError, msgspec.MsgspecError):
            return  # it is delivered again
        finally:
            alive.cancel()

    async def _offer(self, prompt: QueuedPrefill, status: int, reply: bytes) -> bool:
        """Offer KV until the gateway answers, for a lease at most; return whether it takes it."""
        offer = PrefillOffer(prompt.request, prompt.incarnation, self._worker, status, reply)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._broker.address.lease_s
        while True:
            try:
                data = await self._broker.ask(
                    f"{prompt.gateway}.{OFFER}", self._signer.sign(offer), _ANSWER_S
                )
                return self._signer.verify(data, OfferAnswer).counts
            except BrokerUnavailable:
                if loop.time() > until_s:
                    raise
                await asyncio.sleep(_RETRY_S)

    async def _stay_alive(self, message: Msg, prompt: QueuedPrefill) -> None:
        while True:
            await asyncio.sleep(self._broker.address.lease_s / 3)
            with suppress(Error, OSError):
                await message.in_progress()
                subject = f"{prompt.gateway}.{ALIVE}"
                await self._broker.client.publish(
                    subject, self._signer.sign(WorkerAlive(self._worker, prompt.request))
                )


class PullingWorker:
    """Registrar that pulls prompts while its worker serves; may wrap another."""

    def __init__(
        self, address: QueueAddress, secret: FleetSecret | None, other: Registrar | None = None
    ) -> None:
        self._address, self._secret, self._other = address, secret, other
        self._url = ""
        self._session: aiohttp.ClientSession | None = None
        self._puller: PrefillPuller | None = None
        self._task: asyncio.Task[None] | None = None

    async def ready(self, about: dict[str, Any], stop: Callable[[], None]) -> None:
        """Begin to pull."""
        if self._other is not None:
            await self._other.ready(about, stop)
        own = urlsplit(str(about["url"]))
        host = own.hostname or ""
        self._url = f"http://{url_host('127.0.0.1' if host in WILD else host)}:{own.port}"
        pool = PullPool.of(
            self._address.name, str(about["model"]), deployment_version(about), self._secret
        )
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        puller = self._puller = PrefillPuller(
            PrefillBroker(self._address), str(about["incarnation"]), self._compute, pool,
            signer=MessageSigner(self._secret),
        )  # fmt: skip
        self._task = Background().start("prefill queue", puller.run)

    async def draining(self) -> None:
        """Stop pulling, and compute pulled prompts."""
        if self._puller is not None:
            self._puller.stop()
        if self._other is not None:
            await self._other.draining()

    async def leave(self) -> None:
        """Disconnect."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,), timeout=_END_S)
        if self._session is not None:
            await self._session.close()
        if self._other is not None:
            await self._other.leave()

    async def _compute(self, prompt: QueuedPrefill) -> tuple[int, bytes]:
        assert self._session is not None
        headers = {"content-type": "application/json", "x-request-id": prompt.wire_id}
        if prompt.traceparent:
            headers[TRACEPARENT] = prompt.traceparent
        if self._secret is not None:
            headers["authorization"] = f"Bearer {self._secret.token}"
            if prompt.mark:
                headers[TENANT] = prompt.mark
        url = self._url + prompt.path
        try:
            async with self._session.post(url, data=prompt.body, headers=headers) as r:
                return r.status, await read_page(r)
        except (aiohttp.ClientError, OSError):
            return 503, b""
