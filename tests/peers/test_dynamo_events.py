"""The event plane's wire format and the ledger over it; no Dynamo needed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st
from tests.lib.foreign_files import scatter

from pigou_lab.dynamo_host.attribution import RequestLedger, request_id
from pigou_lab.dynamo_host.event_plane import (
    SEQUENCES,
    Envelope,
    EventPlane,
    Life,
    SequenceEvent,
    WireError,
    channels,
    envelope,
    sequence_events,
)

#: A message as a worker of Dynamo 1.6.1 sent it.
RECORDED = (
    b"active_sequences_events",
    b"\x00\x06\x84\xb2\xd7\xcf\xe6k",
    b"\x00\x00\x00\x00\x00\x00\x00\x01",
    b"\x01\x00\x00\x00\xf6\x85\xacpublisher_id\xcf\x00\x06\x84\xb2\xd7\xcf\xe6k\xa8sequence\x01"
    b"\xacpublished_at\xcf\x00\x00\x01\xa1\xfd}\xb9^\xa5topic\xb7active_sequences_events"
    b"\xa7payload\xc4\x97\x81\xa6events\x91\x85\xaarequest_id"
    b"\xd9$5ad5942a-47d2-45b9-ba37-23849f654205\xa6worker\x82\xa9worker_id\xcf6=8\xd7\xa3J\xbf\xa8"
    b"\xa7dp_rank\x00\xa4data\xb4MarkPrefillCompleted\xa9router_id\xcf6=8\xd7\xa3J\xbf\xa8"
    b"\xa9lora_name\xc0",
)
WORKER = 3908342550436167592
BIG = 2**64 - 1


def payload(*events: tuple[str, int, str, int]) -> bytes:
    body = [
        {"request_id": request, "worker": {"worker_id": worker, "dp_rank": 0},
         "data": {"AddRequest": {"token_sequence": [BIG]}} if data == "AddRequest" else data,
         "router_id": teller, "lora_name": None}
        for request, worker, data, teller in events
    ]  # fmt: skip
    return msgspec.msgpack.encode({"events": body})


def message(number: int, *events: tuple[str, int, str, int], publisher: int = 7) -> Envelope:
    return Envelope(publisher, number, 0, SEQUENCES, payload(*events))


def frames(found: Envelope) -> list[bytes]:
    packed = msgspec.msgpack.encode(found)
    return [
        found.topic.encode(), found.publisher_id.to_bytes(8, "big"),
        found.sequence.to_bytes(8, "big"), b"\x01" + len(packed).to_bytes(4, "big") + packed,
    ]  # fmt: skip


def test_a_recorded_message_is_read() -> None:
    found = envelope(RECORDED)
    assert (found.topic, found.sequence) == (SEQUENCES, 1)
    [event] = sequence_events(found.payload)
    assert event.request == "5ad5942a-47d2-45b9-ba37-23849f654205"
    assert (event.worker, event.rank, event.life) == (WORKER, 0, Life.PREFILLED)
    assert event.own


@given(st.lists(st.binary(max_size=80), max_size=5))
def test_what_is_no_message_is_refused(parts: list[bytes]) -> None:
    with pytest.raises(WireError):
        envelope(parts)


@given(st.binary(max_size=60))
def test_what_is_no_payload_is_refused(data: bytes) -> None:
    try:
        found = sequence_events(data)
    except WireError:
        return
    assert isinstance(found, tuple)


def test_another_version_is_refused() -> None:
    changed = b"\x02" + RECORDED[3][1:]
    with pytest.raises(WireError, match="begins with 2"):
        envelope([*RECORDED[:3], changed])


LIVES = ["AddRequest", "MarkPrefillCompleted", "Free"]


@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=4), st.integers(0, BIG), max_size=20),
    st.randoms(use_true_random=False),
)
def test_every_order_of_messages_gives_the_same_workers(truth: dict[str, int], shuffle) -> None:  # type: ignore[no-untyped-def]
    events = [(r, w, life, teller) for r, w in truth.items() for life in LIVES for teller in (1, w)]
    shuffle.shuffle(events)
    ledger = RequestLedger()
    for number, event in enumerate(events):
        ledger.take(message(number, event))
    assert {each: ledger[f"cmpl-{each}"].worker for each in truth} == truth
    assert all(ledger[each].own and ledger[each].freed for each in truth)
    assert ledger.match(f"chatcmpl-{each}" for each in truth).share == 1.0
    assert ledger.missed == 0


def test_a_request_that_moves_is_with_its_last_worker() -> None:
    ledger = RequestLedger()
    for worker in (1, 2, 1):
        ledger.apply(SequenceEvent("r", worker, 0, Life.ADDED, 99))
    assert ledger["r"].worker == 1
    assert sorted(ledger["r"].workers) == [1, 2]
    assert not ledger["r"].own


def test_lost_messages_are_counted_by_publisher() -> None:
    ledger = RequestLedger()
    for publisher, numbers in ((1, [5, 6, 9]), (2, [0, 1])):
        for number in numbers:
            ledger.take(message(number, ("r", 1, "Free", 1), publisher=publisher))
    assert ledger.missed == 2


def test_requests_nobody_told_of_are_missing() -> None:
    ledger = RequestLedger()
    ledger.take(message(0, ("a", 1, "AddRequest", 9)))
    found = ledger.match(["cmpl-a", "cmpl-b"])
    assert (found.requests, found.matched, found.missing) == (2, 1, ("b",))
    assert ledger.get("cmpl-b") is None


def test_memory_is_bounded_and_the_oldest_goes() -> None:
    ledger = RequestLedger(capacity=3)
    for number in range(5):
        ledger.apply(SequenceEvent(str(number), 1, 0, Life.ADDED, 2))
    assert len(ledger) == 3
    assert ledger.get("1") is None
    assert ledger["4"].worker == 1


@pytest.mark.parametrize("reply", ["cmpl-x-1", "chatcmpl-x-1", "x-1"])
def test_reply_ids_lose_their_prefix(reply: str) -> None:
    assert request_id(reply) == "x-1"


class Publisher:
    """A publisher of the event plane, listed in a discovery folder."""

    def __init__(self, folder: Path, number: int) -> None:
        self.socket = zmq.asyncio.Context.instance().socket(zmq.PUB)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.number = number
        self.sent = 0
        self.file = folder / "v1" / "event_channels" / f"topic%2F{number:x}"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        transport = {"kind": "Zmq", "config": {"endpoint": f"tcp://127.0.0.1:{port}"}}
        self.file.write_text(json.dumps({"topic": SEQUENCES, "transport": transport}))

    async def send(self, request: str) -> None:
        event = (request, self.number, "MarkPrefillCompleted", self.number)
        found = message(self.sent, event, publisher=self.number)
        await self.socket.send_multipart(frames(found))
        self.sent += 1

    def close(self) -> None:
        self.file.unlink()
        self.socket.close(linger=0)


async def until(condition) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


async def test_publishers_are_followed_as_they_come_and_go(tmp_path: Path) -> None:
    first = Publisher(tmp_path, 1)
    (first.file.parent / "half").write_text('{"topic": "acti')
    scatter(first.file.parent)
    odd = first.file.read_text().replace("tcp://127", "what://127")
    (first.file.parent / "odd").write_text(odd)
    ledger = RequestLedger()
    async with EventPlane(ledger.take, folder=tmp_path) as plane:
        assert await plane.settled() == 1
        await first.send("a")
        second = Publisher(tmp_path, 2)
        assert await plane.settled(2) == 2
        await second.send("b")
        await until(lambda: len(ledger) == 2)
        assert (ledger["a"].worker, ledger["b"].worker) == (1, 2)
        first.close()
        await until(lambda: len(plane.publishers) == 1)
        await second.send("c")
        await until(lambda: len(ledger) == 3)
        await second.socket.send_multipart([SEQUENCES.encode(), b"", b"", b"rubbish"])
        await until(lambda: plane.refused == 1)
    second.close()
    (second.file.parent / "odd").unlink()
    assert channels(tmp_path) == frozenset()


def test_a_plane_without_publishers_is_refused() -> None:
    with pytest.raises(ValueError, match="discovery folder"):
        EventPlane(print)
