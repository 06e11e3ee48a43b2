"""A batch of KV events, decoded as a whole: what slices of it are compared with."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from pigou.wire.kv_event_decoding import EventError, WireEvent, read_event, shown


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    ts: float  # Unix time in seconds at the sender
    events: tuple[WireEvent, ...] = field(default_factory=tuple)
    rank: int | None = None  # data parallel rank; None when not said


def decode_batch(payload: bytes) -> KVEventBatch:
    """Decode a payload of vLLM, SGLang or Pigou, of either shape. Raises EventError."""
    try:
        raw = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise EventError(f"not MessagePack: {error}") from None
    if not isinstance(raw, list) or len(raw) < 2 or not isinstance(raw[1], list):
        raise EventError("a batch is [timestamp, [events], rank?]")
    if not isinstance(raw[0], int | float):
        raise EventError(f"timestamp is {shown(raw[0])}; it must be a number")
    events = tuple(event for item in raw[1] if (event := read_event(item)) is not None)
    rank = raw[2] if len(raw) > 2 and isinstance(raw[2], int) else None
    return KVEventBatch(float(raw[0]), events, rank)
