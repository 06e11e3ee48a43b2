"""What strangers send does no harm: no crash, no read out of range, no wait without end."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import transfer_stand as stand
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples
from transfer_stand import ids, pull

from pigou.request import SECOND
from pigou.worker.kv_transfer.side_channel_protocol import (
    REPLIES,
    ChecksumsFrame,
    Confirm,
    Data,
    Decline,
    GrantFrame,
    Open,
    Refuse,
)
from pigou.worker.kv_transfer.transfer_params import TransferReason

SHARED = settings(
    max_examples=examples(40),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def framed(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


def encoded(frame: Any) -> bytes:
    return framed(msgspec.msgpack.encode(frame))


def say(port: int, data: bytes) -> bytes:
    """Send bytes, and return all that comes back until the end."""
    with socket.create_connection(("127.0.0.1", port), 10) as sock:
        sock.settimeout(10)
        with contextlib.suppress(OSError):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := sock.recv(65536):
                answer += part
        return answer


def reply(answer: bytes) -> Any:
    (length,) = struct.unpack("!I", answer[:4])
    return REPLIES.decode(answer[4 : 4 + length])


@pytest.fixture
def offered(make_sender: Any, make_receiver: Any) -> Iterator[SimpleNamespace]:
    """`port` of a sender with one offer, and an `opening` of it; at the end all must be well."""
    sender, _, released = make_sender(timeout=SECOND)
    params = sender.offer("r", ids(*range(10)), 160)
    receiver = make_receiver(stand.empty_store())
    opening = Open(
        engine=sender.engine_id,
        request="r",
        secret=params["remote_secret"],
        layout=params["remote_layout"],
        first=0,
        count=10,
        backend="tcp",
    )

    yield SimpleNamespace(port=sender.port, opening=opening)
    assert released == []
    assert sender.held == 1
    other = pull(receiver, sender.offer("healthy", ids(1), 16), ids(0))
    assert other.reason is TransferReason.OK


@SHARED
@given(data=st.binary(max_size=300), prefixed=st.booleans())
def test_garbage_to_the_side_channel_is_refused_and_harms_nobody(
    offered: Any, data: bytes, prefixed: bool
) -> None:
    answer = say(offered.port, framed(data) if prefixed else data)
    assert answer == b"" or isinstance(reply(answer), Refuse)


@SHARED
@given(
    st.dictionaries(
        st.sampled_from(["type", "engine", "request", "secret", "first", "count", "backend"]),
        st.none() | st.integers(-(2**70) % 2**63, 2**63) | st.text(max_size=20) | st.just("open"),
    )
)
def test_well_formed_frames_with_wild_fields_are_refused(
    offered: Any, fields: dict[str, Any]
) -> None:
    wild = msgspec.to_builtins(offered.opening) | fields
    wild["secret"] = str(wild["secret"]) + "!"
    assert isinstance(reply(say(offered.port, encoded(wild))), Refuse)


@pytest.mark.parametrize(
    ("first", "count"), [(0, 11), (10, 1), (-1, 2), (2**62, 1), (0, 2**62), (0, -1), (2**63 - 1, 1)]
)
def test_blocks_beyond_the_offer_are_refused(offered: Any, first: int, count: int) -> None:
    asked = msgspec.structs.replace(offered.opening, first=first, count=count)
    refused = reply(say(offered.port, encoded(asked)))
    assert isinstance(refused, Refuse)
    assert refused.reason == TransferReason.BAD_PARAMS


@pytest.mark.parametrize("field", ["engine", "secret", "request"])
def test_blocks_are_given_only_to_who_knows_the_secret(offered: Any, field: str) -> None:
    asked = msgspec.structs.replace(offered.opening, **{field: "guess"})
    for frame in (asked, Decline(asked.engine, asked.request, asked.secret)):
        refused = reply(say(offered.port, encoded(frame)))
        assert isinstance(refused, Refuse)
        assert refused.reason == TransferReason.UNKNOWN


def test_a_frame_beyond_the_limit_is_refused_before_it_is_read(offered: Any) -> None:
    refused = reply(say(offered.port, struct.pack("!I", 2**32 - 1) + b"x" * 100))
    assert isinstance(refused, Refuse)
    assert "at most" in refused.detail


def test_frames_out_of_turn_are_refused(offered: Any) -> None:
    for frame in ({"type": "renew"}, {"type": "done", "blocks": 3}):
        assert reply(say(offered.port, encoded(frame))).reason == TransferReason.PROTOCOL


def test_connections_that_say_nothing_are_ended_and_those_beyond_the_limit_turned_away(
    make_sender: Any, make_receiver: Any
) -> None:
    sender, _, _ = make_sender(timeout=SECOND // 2, max_connections=3)
    receiver = make_receiver(stand.empty_store())
    with contextlib.ExitStack() as stack:
        socks = [
            stack.enter_context(socket.create_connection(("127.0.0.1", sender.port), 5))
            for _ in range(3)
        ]
        stand.eventually(lambda: len(sender._links) == 3)
        params = sender.offer("r", ids(1), 16)
        assert pull(receiver, params, ids(0)).reason is TransferReason.BUSY
        assert socks[0].recv(1) == b""
        stand.eventually(lambda: not sender._links)
        assert pull(receiver, params, ids(0)).reason is TransferReason.OK


@contextlib.contextmanager
def impostor(*answers: bytes) -> Iterator[int]:
    """A sender that answers each frame it gets with the next of these, then closes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                with sock:
                    for answer in answers:
                        sock.recv(65536)
                        sock.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def grant(details: dict[str, Any] | None = None, count: int = 2) -> bytes:
    checksums = ChecksumsFrame(np.zeros(count, dtype="<u8").tobytes())
    return encoded(GrantFrame(details or {}, 1.0)) + encoded(checksums)


def shared(sender: Any, blocks: Any, **changes: Any) -> bytes:
    details = sender._exports["shm"].details(np.array(blocks, dtype=np.int32))
    return grant(details | changes)


@pytest.mark.parametrize(
    ("backend", "answer", "reason"),
    [
        ("tcp", lambda s: b"\xff" * 200, TransferReason.PROTOCOL),
        ("tcp", lambda s: framed(b"\x00" * 50), TransferReason.PROTOCOL),
        ("tcp", lambda s: grant(count=3), TransferReason.PROTOCOL),
        ("tcp", lambda s: grant(count=10**6), TransferReason.PROTOCOL),
        ("tcp", lambda s: encoded(GrantFrame({}, 1.0)) + encoded(Data(2)), TransferReason.PROTOCOL),
        ("tcp", lambda s: grant() + encoded(Data(1000)), TransferReason.PROTOCOL),
        ("tcp", lambda s: grant() + encoded(Data(-1)), TransferReason.PROTOCOL),
        ("tcp", lambda s: grant() + encoded(Data(0)), TransferReason.PROTOCOL),
        ("tcp", lambda s: grant() + encoded(Confirm(True)), TransferReason.PROTOCOL),
        ("tcp", lambda s: encoded(Refuse("no such reason", "x" * 100)), TransferReason.PROTOCOL),
        ("tcp", lambda s: grant() + encoded(Data(2)) + b"z" * 2 * 40_000, TransferReason.CORRUPT),
        ("shm", lambda s: grant(), TransferReason.PROTOCOL),
        ("shm", lambda s: shared(s, [0, 64]), TransferReason.PROTOCOL),
        ("shm", lambda s: shared(s, [-1, 0]), TransferReason.PROTOCOL),
        ("shm", lambda s: shared(s, [1, 2, 3]), TransferReason.PROTOCOL),
        ("shm", lambda s: shared(s, [1, 2], offset=2**40), TransferReason.UNREACHABLE),
        ("shm", lambda s: shared(s, [1, 2], offset=-1), TransferReason.UNREACHABLE),
        ("shm", lambda s: shared(s, [1, 2], name=b"../../etc/passwd"), TransferReason.UNREACHABLE),
        ("shm", lambda s: shared(s, [1, 2], name=b"\xff\xff"), TransferReason.UNREACHABLE),
        ("shm", lambda s: shared(s, [1, 2], key=b"another"), TransferReason.UNREACHABLE),
        ("shm", lambda s: shared(s, [1, 2]), TransferReason.CORRUPT),
        ("shm", lambda s: shared(s, [1, 2])[:-60], TransferReason.CUT),
    ],
)
def test_a_receiver_believes_no_sender(
    make_sender: Any, make_receiver: Any, backend: str, answer: Any, reason: TransferReason
) -> None:
    sender, _, _ = make_sender()
    params = sender.offer("r", ids(1, 2), 32)
    store = stand.empty_store()
    receiver = make_receiver(store, backends=(backend,))
    with impostor(answer(sender)) as port:
        outcome = pull(receiver, params | {"remote_port": port}, ids(4, 5))
    assert (outcome.reason, outcome.blocks) == (reason, 0)
    assert not store.as_bytes()[[i for i in range(stand.BLOCKS) if i not in (4, 5)]].any()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"remote_port": 0}, "remote_port"),
        ({"remote_port": "x"}, "remote_port"),
        ({"remote_host": None}, "remote_host"),
        ({"remote_num_tokens": -5}, "remote_num_tokens"),
        ({"remote_block_size": 0}, "remote_block_size"),
        ({"remote_backends": []}, "remote_backends"),
        ({"do_remote_prefill": False}, "do_remote_prefill"),
        ({"tp_size": 1}, "tp_size"),
    ],
)
def test_params_that_are_no_ticket_are_refused_by_field(
    make_sender: Any, make_receiver: Any, changes: dict[str, Any], word: str
) -> None:
    sender, _, _ = make_sender()
    receiver = make_receiver(stand.empty_store())
    outcome = pull(receiver, sender.offer("r", ids(1), 16) | changes, ids(0))
    assert (outcome.reason, outcome.blocks) == (TransferReason.BAD_PARAMS, 0)
    assert word in outcome.detail


@pytest.mark.parametrize("params", [None, [], "x", 3, {}, {"do_remote_prefill": True}])
def test_params_of_any_shape_are_answered(make_receiver: Any, params: object) -> None:
    outcome = pull(make_receiver(stand.empty_store()), params, ids(0))
    assert (outcome.reason, outcome.blocks) == (TransferReason.BAD_PARAMS, 0)


def test_more_blocks_than_were_offered_are_not_asked_for(
    make_sender: Any, make_receiver: Any
) -> None:
    sender, _, released = make_sender()
    receiver = make_receiver(stand.empty_store())
    outcome = pull(receiver, sender.offer("r", ids(1, 2), 32), ids(0, 1), first=1)
    assert outcome.reason is TransferReason.BAD_PARAMS
    stand.eventually(lambda: released == ["r"])
