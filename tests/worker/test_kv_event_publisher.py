"""KV events over ZMQ: what a subscriber needs to know which blocks can be hit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import zmq
from tests.lib.kv_event_batch import KVEventBatch, decode_batch
from worker_process import Worker

from pigou.wire.kv_event_decoding import (
    END_OF_REPLAY,
    Cleared,
    Removed,
    Stored,
    sequence_frame,
    sequence_number,
)

SECONDS = 10_000


class Subscriber:
    def __init__(self, worker: Worker) -> None:
        source = worker.get("/kv_event_sources").json["0"]
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.SUBSCRIBE, source["topic"].encode())
        self.sub.connect(source["endpoint"])
        self.replay = self.context.socket(zmq.DEALER)
        self.replay.connect(source["replay_endpoint"])
        time.sleep(0.3)  # a subscription takes a moment to arrive

    def take(self) -> tuple[int, KVEventBatch]:
        assert self.sub.poll(SECONDS), "no event came"
        topic, number, payload = self.sub.recv_multipart()
        assert topic == b"kv"
        at = sequence_number(number)
        assert at is not None
        return at, decode_batch(payload)

    def past(self, start: int) -> list[tuple[int, KVEventBatch]]:
        self.replay.send_multipart([b"", sequence_frame(start)])
        found = []
        while True:
            assert self.replay.poll(SECONDS)
            empty, _, number, payload = self.replay.recv_multipart()
            assert empty == b""
            if number == END_OF_REPLAY:
                return found
            found.append((int.from_bytes(number, "big"), decode_batch(payload)))

    def close(self) -> None:
        self.context.destroy(linger=0)


def test_stored_blocks_carry_tokens_parents_and_salt(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker("--blocks", "64")
    subscriber = Subscriber(worker)
    prompt = [4 + i % 50 for i in range(40)]
    reply = worker.complete(prompt, max_tokens=12, cache_salt="aa", return_token_ids=True)
    tokens = prompt + reply["choices"][0]["token_ids"]
    events: list[Any] = []
    numbers = []
    while sum(len(event.hashes) for event in events) < 3:
        number, batch = subscriber.take()
        numbers.append(number)
        events += batch.events
    assert numbers == list(range(len(numbers)))
    first, second = events
    assert isinstance(first, Stored)
    assert (len(first.hashes), first.parent, first.salt) == (2, None, "aa")
    assert list(first.token_ids) == tokens[:32]
    assert isinstance(second, Stored)
    assert (second.parent, second.salt) == (first.hashes[-1], None)
    assert list(second.token_ids) == tokens[32:48]
    worker.complete(prompt, max_tokens=1, cache_salt="aa")  # a hit stores nothing
    worker.complete(prompt, max_tokens=1)  # no salt: other hashes
    _, batch = subscriber.take()
    other = batch.events[0]
    assert isinstance(other, Stored)
    assert list(other.token_ids) == tokens[:32]
    assert not set(other.hashes) & set(first.hashes)
    assert subscriber.past(0)[0][1].events == (first,)
    assert [number for number, _ in subscriber.past(2)] == [2]
    subscriber.close()


def test_handed_out_blocks_are_removed_and_a_reset_clears(
    start_worker: Callable[..., Worker],
) -> None:
    worker = start_worker("--blocks", "8")
    subscriber = Subscriber(worker)
    live: set[int | bytes] = set()
    for start in range(4, 84, 20):
        worker.complete([start + i for i in range(20)] * 4, max_tokens=2)
    worker.post("/reset_prefix_cache", b"")
    worker.settle()
    removed = 0
    cleared = False
    while not cleared:
        _, batch = subscriber.take()
        for event in batch.events:
            if isinstance(event, Stored):
                live |= set(event.hashes)
            elif isinstance(event, Removed):
                assert set(event.hashes) <= live
                live -= set(event.hashes)
                removed += len(event.hashes)
            cleared = cleared or isinstance(event, Cleared)
    assert removed
    assert len(live) <= 8
    subscriber.close()


def test_a_worker_without_events_names_no_source(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker("--no-kv-events")
    assert worker.get("/kv_event_sources").json == {}
    assert worker.complete([5] * 40, max_tokens=1)


def test_what_reaches_the_host_is_told_by_hashes_that_are_known(
    start_worker: Callable[..., Worker],
) -> None:
    worker = start_worker("--blocks", "64", "--tier", "host=64MB")
    subscriber = Subscriber(worker)
    worker.complete([4 + i % 50 for i in range(40)], max_tokens=1)
    events: list[Any] = []
    while not any(isinstance(each, Stored) and each.medium == "CPU" for each in events):
        events += subscriber.take()[1].events
    device, host = (each for each in events if isinstance(each, Stored))
    assert (host.hashes, list(host.token_ids), host.salt) == (device.hashes, [], None)
    subscriber.close()
