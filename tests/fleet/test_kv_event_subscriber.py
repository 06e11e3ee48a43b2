"""Laws of the subscriber: events arrive in order, once, and what is missed for good is told."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from pigou.fleet import kv_event_subscriber as events
from pigou.fleet.kv_event_subscriber import EventCursor, EventSubscriber
from pigou.fleet.probe import EventSource
from pigou.wire.kv_event_decoding import (
    END_OF_REPLAY,
    Removed,
    WireEvent,
    encode_batch,
    sequence_frame,
)


def payload(number: int) -> bytes:
    return encode_batch(0.0, [{"type": "BlockRemoved", "block_hashes": [number], "medium": "GPU"}])


class Publisher:
    """A publisher that can be told what it still remembers."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.pub = context.socket(zmq.PUB)
        self.router = context.socket(zmq.ROUTER)
        for each in (self.pub, self.router):
            each.setsockopt(zmq.LINGER, 0)
        self.ports = [s.bind_to_random_port("tcp://127.0.0.1") for s in (self.pub, self.router)]
        self.past: dict[int, bytes] = {}
        self.topic_in_replay = True

    async def send(self, number: int, silent: bool = False) -> None:
        self.past[number] = payload(number)
        if not silent:
            await self.pub.send_multipart([b"kv", sequence_frame(number), payload(number)])

    async def answer(self) -> None:
        while True:
            peer, _, start = await self.router.recv_multipart()
            topic = [b"kv"] if self.topic_in_replay else []
            for number, data in sorted(self.past.items()):
                if number >= int.from_bytes(start, "big"):
                    await self.router.send_multipart(
                        [peer, b"", *topic, sequence_frame(number), data]
                    )
            await self.router.send_multipart([peer, b"", *topic, END_OF_REPLAY, b""])


class Sink:
    """What the subscriber delivered: block hashes, and "lost"."""

    def __init__(self) -> None:
        self.seen: list[int | str | bytes] = []

    def apply(self, events: tuple[WireEvent, ...]) -> None:
        for event in events:
            assert isinstance(event, Removed)
            self.seen += event.hashes

    def lose(self) -> None:
        self.seen.append("lost")

    async def reaches(self, expected: list[int | str]) -> None:
        for _ in range(3000):
            if self.seen == expected:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"{self.seen} is not {expected}")


@asynccontextmanager
async def subscribed(
    past: list[int], replay: bool = True, topic: bool = True
) -> AsyncIterator[tuple[Publisher, Sink]]:
    context = zmq.asyncio.Context()
    publisher, sink = Publisher(context), Sink()
    publisher.topic_in_replay = topic
    for number in past:
        await publisher.send(number, silent=True)
    ports = publisher.ports
    source = EventSource(
        f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}" if replay else "", "kv"
    )
    tasks = [
        asyncio.create_task(publisher.answer()),
        asyncio.create_task(EventSubscriber(source, sink.apply, sink.lose).run()),
    ]
    await asyncio.sleep(0.3)  # a subscription takes a moment to reach the publisher
    try:
        yield publisher, sink
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context.destroy(linger=0)


async def test_live_events_are_taken_in_order() -> None:
    async with subscribed([]) as (publisher, sink):
        for number in range(5):
            await publisher.send(number)
        await sink.reaches([0, 1, 2, 3, 4])


@pytest.mark.parametrize("topic", [True, False])
async def test_past_events_are_asked_for_at_the_start(topic: bool) -> None:
    async with subscribed([0, 1, 2], topic=topic) as (publisher, sink):
        await publisher.send(3)
        await sink.reaches([0, 1, 2, 3])


async def test_a_gap_is_filled_by_replay() -> None:
    async with subscribed([]) as (publisher, sink):
        await publisher.send(0)
        await sink.reaches([0])
        await publisher.send(1, silent=True)
        await publisher.send(2)
        await publisher.send(3)
        await sink.reaches([0, 1, 2, 3])


async def test_a_gap_beyond_the_buffer_is_told() -> None:
    async with subscribed([]) as (publisher, sink):
        await publisher.send(0)
        await sink.reaches([0])
        publisher.past.clear()
        await publisher.send(5)
        await sink.reaches([0, "lost", 5])


async def test_without_a_replay_every_gap_is_told() -> None:
    async with subscribed([], replay=False) as (publisher, sink):
        await publisher.send(0)
        await publisher.send(2)
        await publisher.send(3)
        await sink.reaches([0, "lost", 2, 3])


async def test_what_waits_has_a_bound_in_bytes_and_nothing_beyond_it_is_lost() -> None:
    assert events._HIGH_WATER * events._MAX_MESSAGE_BYTES <= 2**28
    async with subscribed([], replay=False) as (publisher, sink):
        count = 20 * events._HIGH_WATER
        for number in range(count):  # the subscriber's loop does not run meanwhile
            frames = [b"kv", sequence_frame(number), payload(number)]
            zmq.Socket.send_multipart(zmq.Socket.shadow(publisher.pub.underlying), frames)
        await sink.reaches(list(range(count)))


async def test_garbage_is_read_more_and_more_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    sink = Sink()
    subscriber = EventSubscriber(EventSource("tcp://127.0.0.1:1", "", "kv"), sink.apply, sink.lose)
    with monkeypatch.context() as patch:
        patch.setattr(events.asyncio, "sleep", sleep)
        context = zmq.asyncio.Context()
        for number in range(12):
            await subscriber._take(context, [b"kv", sequence_frame(number), b"garbage"])
        garbage = [pause for pause in pauses if pause > 0]
        pauses.clear()
        for number in range(12, 24):
            await subscriber._take(context, [b"kv", sequence_frame(number), payload(number)])
        await subscriber._take(context, [b"only one frame"])
        context.destroy(linger=0)
    assert garbage[:4] == [0.01, 0.02, 0.04, 0.08]
    assert garbage[-1] == 0.2
    assert pauses[-1] == 0.01
    assert sink.seen == ["lost"] * 12 + list(range(12, 24))


async def test_a_number_that_falls_is_a_new_publisher() -> None:
    async with subscribed([]) as (publisher, sink):
        for number in range(3):
            await publisher.send(number)
        await sink.reaches([0, 1, 2])
        publisher.past.clear()
        await publisher.send(0)
        await sink.reaches([0, 1, 2, "lost", 0])


async def test_a_publisher_that_is_not_there_is_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_UNMET_S", 0.2)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # not listening: nobody answers there
        source = EventSource(f"tcp://127.0.0.1:{held.getsockname()[1]}", "", "kv")
        sink = Sink()
        task = asyncio.create_task(EventSubscriber(source, sink.apply, sink.lose).run())
        for _ in range(3000):
            if caplog.records:
                break
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert [source.endpoint in each.getMessage() for each in caplog.records] == [True]


async def test_a_publisher_that_is_there_is_not_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_UNMET_S", 3.0)
    async with subscribed([]) as (publisher, sink):
        await asyncio.sleep(3.2)
        await publisher.send(0)
        await sink.reaches([0])
    assert not caplog.records


async def test_a_publisher_that_answers_at_once_is_not_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = zmq.asyncio.Socket.connect

    def held(self: zmq.asyncio.Socket, address: str) -> object:
        connected = connect(self, address)
        time.sleep(0.3)  # the handshake is over before anything else runs
        return connected

    monkeypatch.setattr(zmq.asyncio.Socket, "connect", held)
    monkeypatch.setattr(events, "_UNMET_S", 0.5)
    async with subscribed([], replay=False):
        await asyncio.sleep(1.0)
    assert not caplog.records


def test_an_order_judges_every_number() -> None:
    assert EventCursor().judge(0) == "apply"
    assert EventCursor().judge(4) == "replay"
    assert [EventCursor(5).judge(n) for n in (5, 7, 4, 3, 0)] == [
        "apply", "replay", "skip", "restart", "restart",
    ]  # fmt: skip
