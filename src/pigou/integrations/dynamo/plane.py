"""A subscriber to Dynamo's event plane over ZMQ."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from pigou.integrations.dynamo.events import SEQUENCES, Envelope, WireError, envelope

_log = logging.getLogger("pigou.integrations.dynamo")
_CHANNELS = Path("v1") / "event_channels"
_LOOK_S = 0.2
#: A publisher counts the subscription only some time after the handshake.
_SETTLE_S = 0.1


class _Config(msgspec.Struct):
    endpoint: str


class _Transport(msgspec.Struct):
    kind: str
    config: _Config


class _Channel(msgspec.Struct):
    topic: str
    transport: _Transport


def channels(folder: Path, topic: str = SEQUENCES) -> frozenset[str]:
    """Return the ZMQ addresses that publish a topic, as file discovery (`DYN_FILE_KV`) lists them.

    Files that are being written, and publishers of other transports, are passed over.
    """
    found = set()
    for path in (folder / _CHANNELS).glob("*"):
        try:
            channel = msgspec.json.decode(path.read_bytes(), type=_Channel)
        except (OSError, msgspec.MsgspecError):
            continue
        if channel.topic == topic and channel.transport.kind == "Zmq":
            found.add(channel.transport.config.endpoint)
    return frozenset(found)


class EventPlane:
    """Hands every message of a topic to a sink, within `async with`.

    Publishers are found in a discovery folder, and followed as they come and go, or named. Nothing
    is replayed: what was published before a publisher was connected is not seen.

    Attributes:
        received: messages so far.
        refused: messages that were not understood.
    """

    def __init__(
        self,
        sink: Callable[[Envelope], object],
        *,
        folder: Path | None = None,
        endpoints: Iterable[str] = (),
        topic: str = SEQUENCES,
    ) -> None:
        """Prepare.

        Args:
            sink: called with each message; raises `WireError` for one that it cannot read.
            folder: of file discovery.
            endpoints: ZMQ addresses, where discovery is not by files.
            topic: to subscribe to.

        Raises:
            ValueError: neither a folder nor an endpoint is given.
        """
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
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.subscribe(topic)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._look()
        self._tasks = [
            asyncio.create_task(each) for each in (self._read(), self._follow(), self._watch())
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
        """Addresses that it is connected to, or connects to."""
        return frozenset(self._connected)

    async def settled(self, least: int = 1, timeout_s: float = 10.0) -> int:
        """Wait until every known publisher, and at least so many, is connected; return how many.

        Raises:
            TimeoutError: they were not in time.
        """
        async with asyncio.timeout(timeout_s):
            while len(self._connected) < least or not self._connected <= self._shaken:
                await asyncio.sleep(_LOOK_S / 4)
        await asyncio.sleep(_SETTLE_S)
        return len(self._connected)

    def _look(self) -> None:
        found = self._named
        if self._folder is not None:
            found |= channels(self._folder, self._topic)
        for endpoint in found - self._connected:
            self._socket.connect(endpoint)
            self._connected.add(endpoint)
        for endpoint in self._connected - found:
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
