"""Dynamo's event plane on the wire (ZMQ): envelopes, and what becomes of requests.

A message has four frames: topic; publisher id and sequence number, 8 bytes each, big-endian; and a
body of one version byte (1), the length of what follows (4 bytes, big-endian), and a MessagePack
map with `publisher_id`, `sequence`, `published_at` (ms), `topic` and `payload`, bytes which are
MessagePack again. Read off the wire of Dynamo 1.4.2 and 1.6.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

#: Topic of what becomes of requests.
SEQUENCES = "active_sequences_events"
_VERSION = 1
_HEADER = 5


class WireError(ValueError):
    """A message is not what Dynamo sends."""


class Life(StrEnum):
    """What became of a request on a worker."""

    ADDED = "AddRequest"
    PREFILLED = "MarkPrefillCompleted"
    FREED = "Free"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class SequenceEvent:
    """One fact about one request.

    Attributes:
        request: Dynamo's id of it.
        worker: id of the worker that it is on.
        rank: data-parallel rank there.
        life: what happened.
        teller: id of the router that says so; the worker's own id where the worker does.
    """

    request: str
    worker: int
    rank: int
    life: Life
    teller: int

    @property
    def own(self) -> bool:
        """Whether the worker itself says it."""
        return self.teller == self.worker


class Envelope(msgspec.Struct, frozen=True):
    """What surrounds a payload.

    Attributes:
        publisher_id: whose numbers `sequence` are.
        sequence: rises by one with each message of the publisher.
        published_at: milliseconds since 1970.
        topic: of the payload.
        payload: MessagePack.
    """

    publisher_id: int
    sequence: int
    published_at: int
    topic: str
    payload: bytes


class _Worker(msgspec.Struct):
    worker_id: int
    dp_rank: int = 0


class _Event(msgspec.Struct):
    request_id: str
    worker: _Worker
    data: str | dict[str, Any]
    router_id: int = -1


class _Batch(msgspec.Struct):
    events: list[_Event]


_envelope = msgspec.msgpack.Decoder(Envelope)
_batch = msgspec.msgpack.Decoder(_Batch)


def envelope(frames: Sequence[bytes]) -> Envelope:
    """Read a message of the event plane.

    Raises:
        WireError: it is none, or of another version.
    """
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
    """Read the payload of the topic `SEQUENCES`.

    Raises:
        WireError: it is none.
    """
    try:
        batch = _batch.decode(payload)
    except msgspec.MsgspecError as error:
        raise WireError(f"the events of requests: {error}") from error
    return tuple(
        SequenceEvent(
            each.request_id, each.worker.worker_id, each.worker.dp_rank, _life(each.data),
            each.router_id,
        )
        for each in batch.events
    )  # fmt: skip


def _life(data: str | dict[str, Any]) -> Life:
    name = data if isinstance(data, str) else next(iter(data), "")
    try:
        return Life(name)
    except ValueError:
        return Life.OTHER
