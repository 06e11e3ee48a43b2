"""Batches of KV events, decoded bit by bit: no bit is more than some milliseconds of work.

A batch may come from a server that is attached, and be as large and as odd as it likes. So
values are counted before they are decoded, and what is long is decoded in parts.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import msgspec

from pigou.wire.kv_event_decoding import (
    MAX_HASH_BYTES,
    REMOVED_FIELDS,
    STORED_FIELDS,
    Cleared,
    EventError,
    Removed,
    Stored,
    Tokens,
    WireEvent,
    WireHash,
    check_blocks,
    read_block_size,
    read_event,
    read_hash,
    read_lora,
    read_salt,
    read_text,
    shown,
)
from pigou.wire.msgpack_walk import MessagePackError, Walk

#: Bytes of a batch, and blocks that are applied at once.
MAX_BATCH = 8 * 1024 * 1024
SLICE = 512
#: Bytes of an event that is decoded as a whole, and of a field of a larger one, but for arrays.
SMALL, _FIELD = 16 * 1024, 16 * 1024
#: Tokens that are decoded at once, and fields of an event.
_TOKENS, _MAX_FIELDS = 16 * 1024, 64
#: Most bytes of an integer, and of a hash with its header.
_INTEGER, _HASH = 9, MAX_HASH_BYTES + 5

_decoder = msgspec.msgpack.Decoder()
_token_decoder = msgspec.msgpack.Decoder(Tokens)

#: Where a value begins and ends.
_Span: TypeAlias = tuple[int, int]
#: Parts of events, and None where others should run.
_Parts: TypeAlias = Generator[WireEvent | None, None, None]


def event_slices(payload: bytes) -> Iterator[tuple[WireEvent, ...]]:
    """Decode a payload in slices, so that other tasks can run in between.

    Yields:
        Events in order, `SLICE` blocks of them at a time, about; none where others should run
        all the same.

    Raises:
        EventError: as `decode_batch`; the payload is longer than `MAX_BATCH`. Events before the
            fault have been yielded.
    """
    if len(payload) > MAX_BATCH:
        raise EventError(f"a batch of {len(payload)} bytes; at most {MAX_BATCH} work")
    events: list[WireEvent] = []
    blocks = 0
    try:
        for part in _batch(Walk(payload)):
            if part is not None:
                events.append(part)
                blocks += 1 if isinstance(part, Cleared) else max(1, len(part.hashes))
            if part is None or blocks >= SLICE or len(events) >= SLICE // 4:
                yield tuple(events)
                events, blocks = [], 0
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError,
            MessagePackError) as error:  # fmt: skip
        raise EventError(f"not MessagePack of events: {error}") from None
    if events:
        yield tuple(events)


def _batch(walk: Walk) -> _Parts:
    """Yield a batch's events, in parts; None where others should run."""
    parts = walk.array_head(0)
    if parts is None or parts[0] < 2:
        raise EventError("a batch is [timestamp, [events], rank?]")
    at = yield from walk.skip(parts[1], 1)
    ts = _decode(walk, (parts[1], at), "timestamp")
    if not isinstance(ts, int | float):
        raise EventError(f"timestamp is {shown(ts)}; it must be a number")
    items = walk.array_head(at)
    if items is None:
        raise EventError("a batch is [timestamp, [events], rank?]")
    count, at = items
    decoded = 0
    for _ in range(count):
        end = yield from walk.skip(at, 1)
        if end - at > SMALL:
            yield from _large(walk, at)
            decoded = SMALL
        else:
            event = read_event(_decode(walk, (at, end), "an event"))
            yield from () if event is None else _split(event)
            decoded += end - at
        if decoded >= SMALL:
            yield None
            decoded = 0
        at = end
    if (yield from walk.skip(at, parts[0] - 2)) != len(walk.payload):
        raise EventError("not MessagePack of events: bytes follow it")


def _split(event: WireEvent) -> Iterator[WireEvent]:
    """Yield an event's blocks `SLICE` at a time."""
    if isinstance(event, Cleared) or len(event.hashes) <= SLICE:
        yield event
    elif isinstance(event, Removed):
        for at in range(0, len(event.hashes), SLICE):
            yield Removed(event.hashes[at : at + SLICE], event.medium)
    else:
        size, hashes, tokens = event.block_size, event.hashes, event.token_ids
        for at in range(0, len(hashes), SLICE):
            yield replace(
                event,
                hashes=hashes[at : at + SLICE],
                parent=cast(WireHash, hashes[at - 1]) if at else event.parent,
                token_ids=tokens[at * size : (at + SLICE) * size],
                salt=None if at else event.salt,
            )


def _large(walk: Walk, at: int) -> _Parts:
    """Yield the parts of an event that is too large to be decoded as a whole."""
    spans = yield from _spans(walk, at)
    kind = _decode(walk, spans["type"], "type") if "type" in spans else None
    if kind == "AllBlocksCleared":
        yield Cleared()
    elif kind in ("BlockStored", "BlockRemoved"):
        hashes = _Items.of(walk, spans, "block_hashes")
        check_blocks(hashes.left)
        names = set(spans) - {"type", "block_hashes", "token_ids", "extra_keys"}
        fields = {name: _decode(walk, spans[name], name) for name in names}
        medium = read_text(fields, "medium")
        if kind == "BlockStored":
            fields["extra_keys"] = yield from _first_keys(walk, spans)
            yield from _stored_parts(hashes, _Items.of(walk, spans, "token_ids"), fields)
            return
        while hashes.left:
            yield Removed((yield from hashes.take_hashes(SLICE)), medium)


def _stored_parts(hashes: _Items, tokens: _Items, fields: dict[str, Any]) -> _Parts:
    """Yield the blocks of a stored event, some at a time."""
    size, parent = read_block_size(fields), fields.get("parent_block_hash")
    before = None if parent is None else read_hash(parent)
    medium, lora = read_text(fields, "medium"), read_lora(fields)
    salt = read_salt(fields)
    known = tokens.left == hashes.left * size  # else the sender hides them
    at_once = max(1, min(SLICE, _TOKENS // size))
    while hashes.left:
        part = yield from hashes.take_hashes(at_once)
        ids = (yield from tokens.take_tokens(len(part) * size)) if known else ()
        yield Stored(part, before, ids, size, medium, salt, lora)
        before, salt = part[-1], None


def _spans(walk: Walk, at: int) -> Generator[None, None, dict[str, _Span]]:
    """Return where an event's values are, by the names of their fields."""
    spans: dict[str, _Span] = {}
    head = walk.map_head(at)
    pairs = head is not None
    if head is None and (head := walk.array_head(at)) is None:
        raise EventError("an event is a map or a non-empty array, and no long value")
    count, at = head
    if count > _MAX_FIELDS:
        raise EventError(f"an event has {count} fields; it may have {_MAX_FIELDS}")
    names: tuple[str, ...] = ("type", *STORED_FIELDS)
    for index in range(count):
        name: Any = names[index] if index < len(names) else None
        if pairs:
            end = yield from walk.skip(at, 1)
            name, at = _decode(walk, (at, end), "the name of a field"), end
        end = yield from walk.skip(at, 1)
        if isinstance(name, str):
            spans[name] = at, end
        if not (pairs or index) and _decode(walk, (at, end), "type") == "BlockRemoved":
            names = ("type", *REMOVED_FIELDS)
        at = end
    return spans


@dataclass(slots=True)
class _Items:
    """The items of an array that are still to be decoded."""

    walk: Walk  # over the payload
    name: str
    at: int  # where the next item begins
    left: int

    @classmethod
    def of(cls, walk: Walk, spans: dict[str, _Span], name: str) -> _Items:
        """Return the items of a field.

        Raises:
            EventError: it is no array.
        """
        head = walk.array_head(spans[name][0]) if name in spans else None
        if head is None:
            raise EventError(f"{name} is no array; it must be a list")
        return cls(walk, name, head[1], head[0])

    def take_hashes(self, max_items: int) -> Generator[None, None, tuple[WireHash, ...]]:
        """Return the next hashes, at most so many."""
        data = yield from self._take(max_items, _HASH)
        return tuple(read_hash(value) for value in _decoder.decode(data))

    def take_tokens(self, max_items: int) -> Generator[None, None, list[int]]:
        """Return the next tokens, at most so many."""
        data = yield from self._take(max_items, _INTEGER)
        try:
            return _token_decoder.decode(data)
        except msgspec.ValidationError as error:
            raise EventError(f"{self.name}: {error}") from None

    def _take(self, max_items: int, widest: int) -> Generator[None, None, bytes]:
        """Return the next items as an array of their own, each of so many bytes at most."""
        count = min(max_items, self.left)
        end = yield from self.walk.skip(self.at, count)
        if end - self.at > widest * count:
            raise EventError(f"{self.name} has items of over {widest} bytes")
        data = b"\xdd" + count.to_bytes(4, "big") + self.walk.payload[self.at : end]
        self.at, self.left = end, self.left - count
        return data


def _first_keys(walk: Walk, spans: dict[str, _Span]) -> Generator[None, None, list[Any]]:
    """Return the extra keys of the first block alone, which may have the salt."""
    head = walk.array_head(spans["extra_keys"][0]) if "extra_keys" in spans else None
    if head is None or head[0] == 0:
        return []
    end = yield from walk.skip(head[1], 1)
    return [_decode(walk, (head[1], end), "extra_keys")]


def _decode(walk: Walk, span: _Span, name: str) -> Any:
    """Decode a value that must not be long."""
    start, end = span
    if end - start > _FIELD:
        raise EventError(f"{name} has {end - start} bytes; it may have {_FIELD}")
    return _decoder.decode(walk.payload[start:end])
