"""Publishes KV events over ZMQ, and replays missed ones."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from typing import Any

import zmq
import zmq.asyncio

from pigou.background import Background
from pigou.config import ConfigError
from pigou.wire.fleet_secret import FleetSecret, secure_server
from pigou.wire.kv_event_decoding import END_OF_REPLAY, encode_batch, sequence_frame

log = logging.getLogger(__name__)

TOPIC = b"kv"
#: Batches kept for replay.
BUFFER = 10_000
#: Batches queued per slow subscriber before drops.
HIGH_WATER = 100_000


class EventPublisher:
    """A PUB socket for event batches, and a ROUTER socket for replays."""

    def __init__(
        self, endpoint: str, replay_endpoint: str, secret: FleetSecret | None = None
    ) -> None:
        """Bind both sockets (port `*` takes a free one); raises ConfigError if that fails."""
        self._encrypted = secret is not None
        self._context = zmq.asyncio.Context()
        self._pub = zmq.Socket(zmq.Context(self._context), zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        for socket in (self._pub, self._router):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
            if secret is not None:
                secure_server(socket, secret)
        self._bind(self._pub, "kv_events_endpoint", endpoint)
        self._bind(self._router, "kv_replay_endpoint", replay_endpoint)
        self.endpoint = _bound(self._pub)
        self.replay_endpoint = _bound(self._router)
        self._next = 0
        self._past: deque[tuple[bytes, bytes]] = deque(maxlen=BUFFER)
        self._task: asyncio.Task[None] | None = None

    def start(self, background: Background | None = None) -> None:
        """Start answering replays; requires a running event loop."""
        self._task = (background or Background()).start("KV event replay", self._replay)

    def publish(self, events: list[dict[str, Any]]) -> None:
        """Publish the events of a step, in wire format."""
        number, payload = sequence_frame(self._next), encode_batch(time.time(), events)
        self._next += 1
        self._past.append((number, payload))
        try:
            self._pub.send_multipart((TOPIC, number, payload), zmq.NOBLOCK)
        except zmq.Again:
            log.warning("KV events %d were not sent; they can be replayed", self._next - 1)

    def describe(self) -> dict[str, Any]:
        """Return this worker's entry in `GET /kv_event_sources`."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "buffer_steps": BUFFER,
            "hwm": HIGH_WATER,
            "topic": TOPIC.decode(),
            **({"encryption": "curve"} if self._encrypted else {}),
        }

    async def close(self) -> None:
        """Close both sockets."""
        if self._task is not None:
            self._task.cancel()
        self._end()

    def _bind(self, socket: zmq.Socket[Any], field: str, address: str) -> None:
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self._end()
            why = os.strerror(error.errno or 0)
            raise ConfigError(
                f"{field} is {address!r}, which cannot be bound ({why}); give a free ZMQ address, "
                "like tcp://127.0.0.1:5557, or tcp://127.0.0.1:* for any port"
            ) from None

    def _end(self) -> None:
        self._pub.close()
        self._router.close()
        self._context.term()

    async def _replay(self) -> None:
        while True:
            peer, *frames = await self._router.recv_multipart()
            if len(frames) != 2 or frames[0] or len(frames[1]) != 8:
                log.warning("a request for a replay has %d frames; it needs 2", len(frames))
                continue
            start: bytes = frames[1]
            for number, payload in list(self._past):
                if number >= start:
                    await self._router.send_multipart((peer, b"", TOPIC, number, payload))
            await self._router.send_multipart((peer, b"", b"", END_OF_REPLAY, b""))


def _bound(socket: zmq.Socket[Any]) -> str:
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.rstrip(b"\0").decode()
