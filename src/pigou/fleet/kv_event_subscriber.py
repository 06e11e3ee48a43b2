"""Subscribes to a worker's KV events, fills gaps by replay, and reports lost batches."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import zmq
import zmq.asyncio

from pigou.background import cancel
from pigou.fleet.probe import EventSource
from pigou.gateway.proxy.upstream import Upstream
from pigou.wire.bodies import REPLIES, ByteReservation, OverBudget
from pigou.wire.fleet_secret import secure_client
from pigou.wire.kv_event_decoding import (
    EventError,
    WireEvent,
    event_slices,
    polled_events,
    sequence_frame,
    sequence_number,
)

_log = logging.getLogger("pigou.fleet")

#: Batches that may wait here; further ones wait at the publisher, until it drops some, which a
#: replay then fills. Times `_MAX_MESSAGE_BYTES`, this is the memory that a publisher can take.
_HIGH_WATER = 16
_REPLAY_S = 5.0
#: CPU seconds of a slice that are long, and how often as long others run after it.
_LONG_S, _REST = 0.0005, 3
#: Pause in seconds after an invalid batch, doubled by each further one, and its maximum.
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.01, 0.2
#: Bytes of one message, beyond which ZMQ ends the connection; batches and bytes of one replay.
_MAX_MESSAGE_BYTES, _MAX_REPLAY_BATCHES = 2**24, 100_000
#: Bytes of one pushed load, and seconds between two.
_MAX_LOAD_BYTES, _LOAD_PAUSE_S = 4096, 0.01


#: Path of events that are polled; seconds between polls, after a failure, and for an answer, which
#: the server holds back for 2 s while it has none.
_EVENTS = "/kv_cache_events"
_POLL_S, _POLL_PAUSE_S, _POLL_TIMEOUT_S = 0.05, 1.0, 10.0
#: Seconds after which a publisher that nobody has met is reported.
_UNMET_S = 10.0
_NO_EVENTS = (
    "nobody publishes KV events at %s, so what is cached there is not seen; vLLM binds endpoints "
    "such as tcp://*:5557, and connects to all others"
)
_NO_LOAD = (
    "nobody pushes a load at %s, so /metrics is polled; give that server PIGOU_LOAD=tcp://*:PORT"
)

Apply = Callable[[tuple[WireEvent, ...]], None]
Lose = Callable[[], None]


@dataclass(slots=True)
class EventCursor:
    """Position in one publisher's sequence of batches."""

    next: int | None = None  # next batch number; None before the first

    def judge(self, number: int) -> str:
        """Return what to do with a batch: apply, replay (a gap), restart (publisher), or skip."""
        if self.next is None:
            return "apply" if number == 0 else "replay"
        if number == self.next:
            return "apply"
        if number > self.next:
            return "replay"
        return "skip" if number == self.next - 1 else "restart"


class EventSubscriber:
    """Reads the events of one publisher until it is cancelled."""

    def __init__(self, source: EventSource, apply: Apply, lose: Lose) -> None:
        self._source = source
        self._apply = apply  # gets the events of each batch, in order
        self._lose = lose  # called on lost batches, or a restarted publisher
        self._order = EventCursor()
        self._faults = 0

    async def run(self) -> None:
        """Subscribe until cancelled."""
        sizes = {zmq.RCVHWM: _HIGH_WATER, zmq.MAXMSGSIZE: _MAX_MESSAGE_BYTES}
        with zmq.asyncio.Context() as context:
            async with _subscribed(context, self._source, sizes, _NO_EVENTS) as socket:
                await self._catch_up(context, None)
                while True:
                    await self._take(context, await socket.recv_multipart())

    async def _take(self, context: zmq.asyncio.Context, frames: list[bytes]) -> None:
        try:
            _, sequence, payload = frames
            number = sequence_number(sequence)
        except (ValueError, EventError) as error:
            _log.warning("%s sent what is no KV event: %s", self._source.endpoint, error)
            await self._pause()
            return
        if number is None:
            return
        verdict = self._order.judge(number)
        if verdict == "restart":
            self._lose()
            self._order.next = None
            verdict = self._order.judge(number)
        if verdict == "replay" and not await self._catch_up(context, number):
            self._lose()
            verdict = "apply"
        if verdict == "apply":
            await self._accept(number, payload)

    async def _accept(self, number: int, payload: bytes) -> None:
        self._order.next = number + 1
        began_s = time.thread_time()
        try:
            for events in event_slices(payload):
                self._apply(events)
                await _rest(time.thread_time() - began_s)
                began_s = time.thread_time()
        except EventError as error:
            _log.warning("%s: batch %d: %s", self._source.endpoint, number, error)
        except Exception:
            _log.exception("%s: batch %d cannot be applied", self._source.endpoint, number)
        else:
            self._faults = max(0, self._faults - 1)
            await _rest(time.thread_time() - began_s)
            return
        self._lose()
        await self._pause()

    async def _pause(self) -> None:
        """Rest after a malformed batch, so garbage costs little."""
        pause_s = min(_MAX_PAUSE_S, _MIN_PAUSE_S * 2 ** min(self._faults, 30))
        self._faults += 1
        await asyncio.sleep(pause_s)

    async def _catch_up(self, context: zmq.asyncio.Context, until: int | None) -> bool:
        if not self._source.replay:
            return False
        with REPLIES.reserve() as held:
            return await self._replay(context, until, held)

    async def _replay(
        self, context: zmq.asyncio.Context, until: int | None, held: ByteReservation
    ) -> bool:
        wanted = self._order.next or 0
        batches = await self._past(context, wanted, held)
        if not batches or (until is not None and all(number != until for number, _ in batches)):
            return False
        if batches[0][0] > wanted:
            self._lose()
        for number, payload in batches:
            await self._accept(number, payload)
        return True

    async def _past(
        self, context: zmq.asyncio.Context, start: int, held: ByteReservation
    ) -> list[tuple[int, bytes]]:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        if self._source.secret is not None:
            secure_client(socket, self._source.secret)
        batches: list[tuple[int, bytes]] = []
        try:
            socket.connect(self._source.replay)
            async with asyncio.timeout(_REPLAY_S):
                await _send(socket, [b"", sequence_frame(start)])
                while True:
                    frames = await socket.recv_multipart()
                    # Older servers leave the topic out.
                    sequence, payload = frames[-2], frames[-1]
                    number = sequence_number(sequence)
                    if number is None:
                        return batches
                    held.grow(len(payload))
                    if len(batches) == _MAX_REPLAY_BATCHES:
                        raise EventError(f"it has over {_MAX_REPLAY_BATCHES} batches")
                    if number >= (batches[-1][0] + 1 if batches else start):
                        batches.append((number, payload))
        except (TimeoutError, EventError, OverBudget, IndexError, zmq.ZMQError) as error:
            _log.warning("%s: no replay: %s", self._source.replay, error or "no answer")
            return []
        finally:
            socket.close(0)


class EventPoller:
    """Polls a TensorRT-LLM server for KV events until cancelled; each answer empties its queue."""

    def __init__(self, upstream: Upstream, apply: Apply, lose: Lose) -> None:
        self._upstream, self._apply, self._lose = upstream, apply, lose
        self._next: dict[int, int] = {}  # id of the next event, by rank
        self._window = 0  # widest attention window so far: blocks of others are no whole prefix

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            try:
                status, page = await self._upstream.get(_EVENTS, _POLL_TIMEOUT_S, "POST")
                if status != 200:
                    raise EventError(f"it answered {status}")
                await self._take(page)
                await asyncio.sleep(_POLL_S)
            except (aiohttp.ClientError, OSError, TimeoutError, EventError) as error:
                # An answer that was lost took its events along.
                _log.warning("%s%s: %s", self._upstream.worker.url, _EVENTS, error or "no answer")
                self._lose()
                await asyncio.sleep(_POLL_PAUSE_S)

    async def _take(self, page: bytes) -> None:
        for polled in polled_events(page, self._upstream.worker.block_size):
            # Events are numbered from 0, the creation of the cache.
            if polled.id != self._next.get(polled.rank, 0):
                self._lose()
            self._next[polled.rank] = polled.id + 1
            self._window = max(self._window, polled.window)
            if polled.window == self._window and polled.events:
                self._apply(polled.events)
                await asyncio.sleep(0)


async def read_pushed_load(source: EventSource, take: Callable[[bytes], None]) -> None:
    """Take the newest load that a worker pushed, at most 100 in a second, until cancelled."""
    sizes = {zmq.CONFLATE: 1, zmq.MAXMSGSIZE: _MAX_LOAD_BYTES}  # older ones are dropped unread
    with zmq.asyncio.Context() as context:
        async with _subscribed(context, source, sizes, _NO_LOAD) as socket:
            while True:
                take(await socket.recv())
                await asyncio.sleep(_LOAD_PAUSE_S)


@asynccontextmanager
async def _subscribed(
    context: zmq.asyncio.Context,
    source: EventSource,
    sizes: dict[zmq.SocketOption, int],
    unmet: str,
) -> AsyncIterator[zmq.asyncio.Socket]:
    """Subscribe to a publisher (context); one that nobody meets is reported by `unmet`."""
    socket = context.socket(zmq.SUB)
    for option, value in {zmq.LINGER: 0, **sizes}.items():
        socket.setsockopt(option, value)
    if source.secret is not None:
        secure_client(socket, source.secret)
    socket.setsockopt_string(zmq.SUBSCRIBE, source.topic)
    # Watched before it connects: a handshake that nobody watches is not told of later.
    monitor = socket.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED)
    meeting = asyncio.create_task(_meet(monitor, source.endpoint, unmet))
    socket.connect(source.endpoint)
    try:
        yield socket
    finally:
        await cancel(meeting)
        socket.disable_monitor()
        socket.close(0)


async def _meet(monitor: zmq.asyncio.Socket, endpoint: str, unmet: str) -> None:
    """Report it when nobody publishes there: a subscriber by itself would wait in silence."""
    try:
        async with asyncio.timeout(_UNMET_S):
            await monitor.recv_multipart()
    except TimeoutError:
        _log.warning(unmet, endpoint)


async def _rest(spent_s: float) -> None:
    """Let others run; after long work for several times as long as it took."""
    await asyncio.sleep(0 if spent_s < _LONG_S else _REST * spent_s)


def _send(socket: zmq.asyncio.Socket, frames: list[bytes]) -> Awaitable[Any]:
    return socket.send_multipart(frames)
