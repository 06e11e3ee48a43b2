"""Exchange between gateways: signed messages of their bookings."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pigou.control.messages import PeerGone, PeerReport
from pigou.control.peers.bookings import PeerState, ResendRequest, SyncMessage
from pigou.control.peers.sync import PeerPublisher, PeerReceiver
from pigou.fleet.nats_connection import ReconnectBackoff
from pigou.fleet.peers.bus import BusError, PeerBus
from pigou.gateway.auth.budgets import BudgetLedger
from pigou.gateway.caches.layers import Caches
from pigou.gateway.plane_driver import PlaneDriver
from pigou.request import SECOND
from pigou.wire.fleet_secret import FleetSecret
from pigou.wire.names import worker_name

#: Use of the fleet secret whose key signs messages.
_USE = "gateway-peers"
_TAG, _TIME = 32, 8
#: Milliseconds by which the clocks of two hosts may differ; older messages are repetitions.
MAX_SKEW_MS = 60_000
_log = logging.getLogger("pigou.fleet")
#: Seconds between two messages with changes, and between two looks at who fell silent.
PUBLISH_S, LOOK_S = 0.02, 0.1
#: Seconds after a greeting from which cached artifacts may be served again.
_IN_TOUCH_S = 1.0
#: Timeout in seconds for stopping the exchange.
_END_S = 1.0
#: Between tries to reach the bus.
_BACKOFF = ReconnectBackoff(min_s=0.25, max_s=7.5, jitter=1.0)


class PeerEnvelopeError(ValueError):
    """A rejected message; the text says why."""


class PeerEnvelope:
    """Signs and verifies messages: HMAC-SHA256 over time and message, valid for a minute.

    Sequence numbers make a replay within that time harmless.
    """

    def __init__(self, secret: FleetSecret) -> None:
        self._secret = secret
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_words)
        self._decoder: msgspec.msgpack.Decoder[SyncMessage] = msgspec.msgpack.Decoder(
            PeerState | ResendRequest, dec_hook=_array
        )

    def sign(self, message: SyncMessage, unix_ms: int) -> bytes:
        """Return a message as it is sent at a time, in milliseconds since 1970."""
        body = unix_ms.to_bytes(_TIME, "big") + self._encoder.encode(message)
        return self._secret.sign(_USE, body) + body

    def open(self, data: bytes, unix_ms: int) -> SyncMessage:
        """Return the message, at a time in milliseconds since 1970. Raises PeerEnvelopeError."""
        tag, body = data[:_TAG], data[_TAG:]
        if not self._secret.verifies(_USE, body, tag):
            raise PeerEnvelopeError("it was not made with this fleet's secret")
        sent_ms = int.from_bytes(body[:_TIME], "big")
        if abs(unix_ms - sent_ms) > MAX_SKEW_MS:
            raise PeerEnvelopeError(f"it was made {(unix_ms - sent_ms) / 1000:.0f} s ago")
        try:
            return self._decoder.decode(body[_TIME:])
        except (msgspec.DecodeError, ValueError) as error:
            raise PeerEnvelopeError(f"it is not understood: {error}") from error


def _words(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value, dtype="<u8").tobytes()
    raise NotImplementedError(f"a message cannot hold {type(value).__name__}")


def _array(_: Any, value: Any) -> Any:
    if not isinstance(value, bytes) or len(value) % 8:
        raise ValueError("keys are not 64-bit words")
    return np.frombuffer(value, dtype="<u8").astype(np.uint64)


class PeerExchange:
    """Publishes this gateway's changes on a bus, and applies other gateways'."""

    def __init__(
        self, plane_driver: PlaneDriver, bus: PeerBus, secret: FleetSecret,
        caches: Caches | None = None, budgets: BudgetLedger | None = None,
    ) -> None:  # fmt: skip
        self.name = f"{socket.gethostname().replace('.', '-')}-{secrets.token_hex(4)}"
        self.rejected = 0  # rejected messages
        self._plane_driver, self._bus = plane_driver, bus
        self._envelope = PeerEnvelope(secret)
        self._publisher = PeerPublisher(self.name, plane_driver.plane)
        self._receiver = PeerReceiver(self._publisher)
        self._caches, self._greeted = Caches() if caches is None else caches, math.inf
        self._publisher.manifest = self._caches.manifest
        self._publisher.changed = self._caches.changed
        self._caches.is_shared = True
        self._caches.in_touch = self._in_touch
        self._budgets = budgets
        if budgets is not None:
            budgets.is_shared = True
            self._publisher.new_spending = budgets.changes
            self._publisher.spending = budgets.own
        self._names: dict[str, str] = {}
        self._ids: dict[str, str] = {}
        self._outbox: list[SyncMessage] = []
        self._task: asyncio.Task[None] | None = None
        self._stopping = False

    def start(self) -> None:
        """Begin; the start of the fleet does not wait for the bus."""
        self._task = self._plane_driver.background.start("gateway peers", self._run)

    async def stop(self) -> None:
        """Announce departure and stop."""
        if self._task is None:
            return
        self._stopping = True  # for a bus whose client swallows the cancellation
        self._task.cancel()
        await asyncio.wait((self._task,), timeout=_END_S)
        await self._send(self._publisher.farewell())
        await self._bus.close()

    def health(self) -> dict[str, Any]:
        """Return the fields for `/health`."""
        receiver = self._receiver
        return {
            "bus": "up" if self._bus.connected else "down",
            "gateway": self.name,
            "peers": sorted(receiver.peers),
            "lag_s": receiver.lag_ns / SECOND,
            "staleness_s": receiver.staleness_ns(time.monotonic_ns()) / SECOND,
            "gaps": receiver.gaps,
            "snapshots": receiver.snapshots,
            "rejected": self.rejected,
        }

    async def _run(self) -> None:
        await self._plane_driver.compiled.wait()
        failures, rng, looked, again = 0, random.Random(), 0.0, 0.0
        while not self._stopping:
            if self._bus.closed and time.monotonic() >= again:
                failures = await self._connect(failures)
                again = time.monotonic() + _BACKOFF.wait_ns(max(1, failures), rng) / SECOND
            if self._bus.connected:
                await self._publish()
            if time.monotonic() - looked >= LOOK_S:
                looked = time.monotonic()
                self._look()
            await asyncio.sleep(PUBLISH_S)

    async def _connect(self, failures: int) -> int:
        try:
            await self._bus.connect(self._take, self._greet)
        except BusError as error:
            if not failures:
                _log.warning(
                    "the gateways' bus is down, and this gateway serves without it: %s", error
                )
            return failures + 1
        _log.info("gateway %s is on the bus", self.name)
        self._greet()
        return 0

    def _in_touch(self) -> bool:
        """True once the answers to a greeting must have come, while the bus is up."""
        return self._bus.connected and time.monotonic() > self._greeted + _IN_TOUCH_S

    def _greet(self) -> None:
        self._greeted = time.monotonic()
        self._outbox.append(self._receiver.hello())

    async def _publish(self) -> None:
        self._meet_workers()
        now = time.monotonic_ns()
        state = self._publisher.changes(
            now, self._receiver.heard(now), lambda worker: self._names.get(worker, "")
        )
        messages, self._outbox = self._outbox, []
        if state is not None:
            messages.append(state)
        for message in messages:
            await self._send(message)

    async def _send(self, message: SyncMessage) -> None:
        number = message.seq if isinstance(message, PeerState) else "ask"
        data = self._envelope.sign(message, time.time_ns() // 1_000_000)
        await self._bus.publish(f"{self.name}.{number}", data)

    def _take(self, data: bytes) -> None:
        try:
            message = self._envelope.open(data, time.time_ns() // 1_000_000)
        except PeerEnvelopeError as error:
            self.rejected += 1
            if self.rejected == 1:
                _log.warning("a message on the gateways' bus does not count: %s", error)
            return
        if isinstance(message, ResendRequest):
            if message.to in ("", self.name) and message.gateway != self.name:
                self._outbox += self._publisher.answer(message)
            return
        self._caches.merge(message.manifest)
        if self._budgets is not None:
            self._budgets.merge(message.gateway, message.seq, message.spending)
        observation, request = self._receiver.receive(message, time.monotonic_ns())
        if isinstance(observation, PeerReport):
            observation = self._in_own_ids(observation)
        if observation is not None:
            self._plane_driver.observe(observation)
        if request is not None:
            self._outbox.append(request)

    def _look(self) -> None:
        gone, requests = self._receiver.tick(time.monotonic_ns())
        for end in gone:
            _log.warning("gateway %s is silent, and counts as gone", end.gateway)
            self._plane_driver.observe(PeerGone(end.gateway))
        self._outbox += requests

    def _in_own_ids(self, report: PeerReport) -> PeerReport:
        ids, replace = self._ids, msgspec.structs.replace
        return replace(
            report,
            workers=tuple(
                replace(bookings, worker=ids[bookings.worker])
                for bookings in report.workers
                if bookings.worker in ids
            ),
            prompts=tuple(
                replace(prompt, worker=ids[prompt.worker])
                for prompt in report.prompts
                if prompt.worker in ids
            ),
        )

    def _meet_workers(self) -> None:
        upstreams = self._plane_driver.upstreams
        names = {
            name: worker_name(up.engine.incarnation, up.worker.url, socket.gethostname())
            for name, up in upstreams.items()
        }
        if names == self._names:
            return
        new = [name for name, shared in names.items() if self._names.get(name) != shared]
        self._names = names
        self._ids = {shared: name for name, shared in self._names.items()}
        for worker in new:
            for report in self._receiver.known(self._names[worker]):
                self._plane_driver.observe(self._in_own_ids(report))


class PeerMetrics(Collector):
    """Metrics of the exchange."""

    def __init__(self, exchange: PeerExchange) -> None:
        self._exchange = exchange

    def collect(self) -> Iterator[Metric]:
        """Yield the present values."""
        health = self._exchange.health()
        for name, about, value in (
            ("bus_up", "Whether the bus between gateways is connected.", health["bus"] == "up"),
            ("gateways", "Other gateways that are heard.", len(health["peers"])),
            ("lag_seconds", "Seconds that messages of other gateways take.", health["lag_s"]),
            (
                "staleness_seconds",
                "Age of the oldest gateway's last word.",
                health["staleness_s"],
            ),
        ):
            yield GaugeMetricFamily(f"pigou_peer_{name}", about, value=float(value))
        for name, about in (
            ("gaps", "Gaps in the messages of other gateways."),
            ("snapshots", "Snapshots of other gateways that came."),
            ("rejected", "Messages on the bus that did not count."),
        ):
            yield CounterMetricFamily(f"pigou_peer_{name}", about, value=health[name])
