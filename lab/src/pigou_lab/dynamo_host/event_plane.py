"""Dynamo's event plane over ZMQ: envelopes and sequence events (Dynamo 1.4.2 and 1.6.1).

A message has four frames: topic; publisher id; sequence number (both 8 bytes, big-endian); body.
The body is a version byte (1), a length (4 bytes, big-endian) and a MessagePack map with
`publisher_id`, `sequence`, `published_at` (ms), `topic` and `payload` (MessagePack again).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from pigou.small_file import read_bytes

#: Bytes of a file of discovery.
_MAX_FILE = 1 << 20

_log = logging.getLogger("pigou_lab.dynamo_host")
_CHANNELS = Path("v1") / "event_channels"
_LOOK_S = 0.2
#: A publisher counts the subscription only some time after the handshake.
_SETTLE_S = 0.1
#: Topic of what becomes of requests.
SEQUENCES = "active_sequences_events"
_VERSION = 1
_HEADER = 5


class WireError(ValueError):
    """A malformed message."""


class Life(StrEnum):
    """Lifecycle event of a request on a worker."""

    ADDED = "AddRequest"
    PREFILLED = "MarkPrefillCompleted"
    FREED = "Free"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class SequenceEvent:
    """One fact about one request."""

    request: str  # Dynamo's request id
    worker: int  # id of the worker that it is on
    rank: int  # data-parallel rank there
    life: Life
    teller: int  # id of the router that says so; the worker's own id where the worker does

    @property
    def own(self) -> bool:
        """Whether the worker itself says it."""
        return self.teller == self.worker


class Envelope(msgspec.Struct, frozen=True):
    """Envelope of a payload."""

    publisher_id: int  # publisher that counts `sequence`
    sequence: int  # rises by one with each message of the publisher
    published_at: int  # milliseconds since 1970
    topic: str
    payload: bytes


class _Worker(msgspec.Struct):
    worker_id: int
    dp_rank: int = 0


class _SequenceRecord(msgspec.Struct):
    request_id: str
    worker: _Worker
    data: str | dict[str, Any]
    router_id: int = -1


class _Batch(msgspec.Struct):
    events: list[_SequenceRecord]


_envelope = msgspec.msgpack.Decoder(Envelope)
_batch = msgspec.msgpack.Decoder(_Batch)


def envelope(frames: Sequence[bytes]) -> Envelope:
    """Decode a message of the event plane; raises WireError if malformed or of another version."""
    if len(frames) != 4:
        raise WireError(f"a message has {len(frames)} frames; Dynamo's have 4")
    body = frames[3]
    if len(body) < _HEADER or body[0] != _VERSION:
        shown = body[0] if body else "nothing"
        raise WireError(f"the body begins with {shown}; version {_VERSION} is understood")
    length = int.from_bytes(body[1:_HEADER], "big")
    if length != len(body) - _HEADER:
        raise WireError(f"the body says {length} bytes and has {len(body) - _HEADER}")
    try:
        return _envelope.decode(body[_HEADER:])
    except msgspec.MsgspecError as error:
        raise WireError(f"the envelope: {error}") from error


def sequence_events(payload: bytes) -> tuple[SequenceEvent, ...]:
    """Decode a payload of topic `SEQUENCES`; raises WireError if malformed."""
    try:
        batch = _batch.decode(payload)
    except msgspec.MsgspecError as error:
        raise WireError(f"the events of requests: {error}") from error
    return tuple(
        SequenceEvent(
            record.request_id, record.worker.worker_id, record.worker.dp_rank, _life(record.data),
            record.router_id,
        )
        for record in batch.events
    )  # fmt: skip


def _life(data: str | dict[str, Any]) -> Life:
    name = data if isinstance(data, str) else next(iter(data), "")
    try:
        return Life(name)
    except ValueError:
        return Life.OTHER


class _Config(msgspec.Struct):
    endpoint: str


class _Transport(msgspec.Struct):
    kind: str
    config: _Config


class _Channel(msgspec.Struct):
    topic: str
    transport: _Transport


def channels(folder: Path, topic: str = SEQUENCES) -> frozenset[str]:
    """Return the ZMQ addresses that publish a topic, from file discovery (`DYN_FILE_KV`)."""
    endpoints = set()
    for path in (folder / _CHANNELS).glob("*"):
        try:
            channel = msgspec.json.decode(read_bytes(path, _MAX_FILE), type=_Channel)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        if channel.topic == topic and channel.transport.kind == "Zmq":
            endpoints.add(channel.transport.config.endpoint)
    return frozenset(endpoints)


class EventPlane:
    """Passes every message of a topic to a sink, within `async with`; nothing is replayed."""

    def __init__(
        self,
        sink: Callable[[Envelope], object],
        *,
        folder: Path | None = None,
        endpoints: Iterable[str] = (),
        topic: str = SEQUENCES,
    ) -> None:
        """Raises ValueError without a discovery folder and without ZMQ addresses."""
        self.received = 0
        self.refused = 0
        self._named = frozenset(endpoints)
        if folder is None and not self._named:
            raise ValueError("give the discovery folder (DYN_FILE_KV), or the endpoints to join")
        self._sink = sink
        self._folder = folder
        self._topic = topic
        self._connected: set[str] = set()
        self._shaken: set[str] = set()
        self._unusable: set[str] = set()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.subscribe(topic)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._look()
        self._tasks = [
            asyncio.create_task(work) for work in (self._read(), self._follow(), self._watch())
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()

    @property
    def publishers(self) -> frozenset[str]:
        """Connected and connecting addresses."""
        return frozenset(self._connected)

    async def settled(self, min_publishers: int = 1, timeout_s: float = 10.0) -> int:
        """Wait until all known publishers connect; return their number. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while len(self._connected) < min_publishers or not self._connected <= self._shaken:
                await asyncio.sleep(_LOOK_S / 4)
        await asyncio.sleep(_SETTLE_S)
        return len(self._connected)

    def _look(self) -> None:
        endpoints = self._named
        if self._folder is not None:
            endpoints |= channels(self._folder, self._topic)
        for endpoint in endpoints - self._connected - self._unusable:
            try:
                self._socket.connect(endpoint)
            except zmq.ZMQError as error:
                self._unusable.add(endpoint)
                _log.warning("publisher %.100r is ignored: %s", endpoint, error)
                continue
            self._connected.add(endpoint)
        for endpoint in self._connected - endpoints:
            self._socket.disconnect(endpoint)
            self._connected.discard(endpoint)
            self._shaken.discard(endpoint)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self._look()

    async def _watch(self) -> None:
        while True:
            event = await recv_monitor_message(self._monitor)
            self._shaken.add(event["endpoint"].decode())

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            self.received += 1
            try:
                self._sink(envelope(frames))
            except WireError as error:
                self.refused += 1
                _log.warning("the event plane sent what is not understood: %s", error)
