"""KV events on the wire: vLLM's ZMQ frames and MessagePack, in both of its shapes.

A message is `[topic, sequence number (u64, big-endian), payload]`, the payload `[timestamp,
[events], data parallel rank?]`. Events are maps with a `type`, or arrays (old releases). Batches
may be hostile: `event_slices` counts values first, and decodes in parts of ms.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeAlias
from zlib import crc32

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.compiled import kernel
from pigou.request import AllBlocksCleared, BlockHashes, BlockRemoved, KVEvent

#: Values skipped per step: a fraction of a millisecond.
STEP = 2**17
#: Fault codes of the kernel.
_FAULTS = {1: "it is truncated", 2: "byte 0xc1 means nothing"}
#: Columns of the table of first bytes: bytes of the length that follows, -1 where the byte means
#: nothing; bytes of the value besides; values inside; values inside for each of the length, 0 where
#: the length counts bytes.
_LENGTH_BYTES, _VALUE_BYTES, _VALUES, _PER_LENGTH = range(4)
#: The kernel's state: position, and values left.
_AT, _LEFT = range(2)
#: Sequence number of the frame that ends a replay (-1, signed).
END_OF_REPLAY = b"\xff" * 8
WireHash: TypeAlias = int | bytes
#: Hashes of consecutive blocks; an array where they are 64-bit integers.
WireHashes: TypeAlias = Sequence[WireHash] | NDArray[np.uint64]
#: Bounds of one event: blocks, tokens in a block, bytes of a hash, characters of a name.
MAX_BLOCKS, MAX_BLOCK_SIZE, MAX_HASH_BYTES, MAX_NAME_CHARS = 2**16, 2**16, 64, 1024
Tokens = list[Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**32)]]
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()
#: Order of the fields of the array shape, after the type.
STORED_FIELDS = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
    "lora_name", "extra_keys",
)  # fmt: skip
REMOVED_FIELDS = ("block_hashes", "medium")
#: Maximum bytes of a batch; blocks per slice.
MAX_BATCH = 8 * 1024 * 1024
SLICE = 512
#: Bytes of an event that is decoded as a whole, and of a field of a larger one, but for arrays.
SMALL, _FIELD = 16 * 1024, 16 * 1024
#: Tokens per decode, and fields of an event.
_TOKENS, _MAX_FIELDS = 16 * 1024, 64
#: Most bytes of an integer, and of a hash with its header.
_INTEGER, _HASH = 9, MAX_HASH_BYTES + 5
_token_decoder = msgspec.msgpack.Decoder(Tokens)
#: Where a value begins and ends.
_Span: TypeAlias = tuple[int, int]


#: First bytes of short and of long values.
ARRAY, MAP = (0x90, 0xDC), (0x80, 0xDE)


class MessagePackError(ValueError):
    """Malformed MessagePack, or a missing array."""


def _table() -> NDArray[np.int64]:
    """Return the layout of a value by its first byte, from the specification of MessagePack."""
    table = np.zeros((256, 4), dtype=np.int64)
    for low in range(16):
        table[0x80 + low, _VALUES], table[0x90 + low, _VALUES] = 2 * low, low
    table[0xA0:0xC0, _VALUE_BYTES] = np.arange(32)
    table[0xC1, _LENGTH_BYTES] = -1
    table[0xC4:0xC7, _LENGTH_BYTES] = 1, 2, 4  # bin
    table[0xC7:0xCA, _LENGTH_BYTES], table[0xC7:0xCA, _VALUE_BYTES] = (1, 2, 4), 1  # ext
    table[0xCA:0xCC, _VALUE_BYTES] = 4, 8  # float
    table[0xCC:0xD0, _VALUE_BYTES] = table[0xD0:0xD4, _VALUE_BYTES] = 1, 2, 4, 8  # uint, int
    table[0xD4:0xD9, _VALUE_BYTES] = 2, 3, 5, 9, 17  # fixext
    table[0xD9:0xDC, _LENGTH_BYTES] = 1, 2, 4  # str
    table[0xDC:0xDE, _LENGTH_BYTES], table[0xDC:0xDE, _PER_LENGTH] = (2, 4), 1  # array
    table[0xDE:0xE0, _LENGTH_BYTES], table[0xDE:0xE0, _PER_LENGTH] = (2, 4), 2  # map
    return table


_TABLE = _table()


@kernel
def _skip(
    data: NDArray[np.uint8], table: NDArray[np.int64], state: NDArray[np.int64], max_values: int
) -> int:
    """Step over up to `max_values` values, inner ones too; `state` is position and values left."""
    at, left, size = state[_AT], state[_LEFT], data.shape[0]
    while left > 0 and max_values > 0:
        if left > size - at:  # each value has a byte at least
            return 1
        byte = data[at]
        at += 1
        left -= 1
        max_values -= 1
        if byte < 0x80 or byte >= 0xE0:  # a small integer, as most are
            continue
        width, body = table[byte, _LENGTH_BYTES], table[byte, _VALUE_BYTES]
        left += table[byte, _VALUES]
        if width:
            if width < 0:
                return 2
            if width > size - at:
                return 1
            length = 0
            for _ in range(width):
                length = length * 256 + int(data[at])
                at += 1
            left += table[byte, _PER_LENGTH] * length
            if table[byte, _PER_LENGTH] == 0:
                body += length
        if body > size - at:
            return 1
        at += body
    state[_AT], state[_LEFT] = at, left
    return 0


class Walk:
    """Walks the values of a payload."""

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self._data = np.frombuffer(payload, dtype=np.uint8)
        self._state = np.zeros(2, dtype=np.int64)

    def skip(self, at: int, count: int) -> Generator[None, None, int]:
        """Step over `count` values, yielding after each `STEP`; raises MessagePackError."""
        state = self._state
        state[_AT], state[_LEFT] = at, count
        while True:
            if fault := _skip(self._data, _TABLE, state, STEP):
                raise MessagePackError(f"not MessagePack: {_FAULTS[fault]}")
            at, left = int(state[_AT]), int(state[_LEFT])
            if not left:
                return at
            yield None
            state[_AT], state[_LEFT] = at, left  # another walk may have run in between

    def head(self, at: int, kind: tuple[int, int]) -> tuple[int, int] | None:
        """Return the length and start of an `ARRAY` or a `MAP`; None for another value."""
        short, long = kind
        if at >= len(self.payload):
            raise MessagePackError("not MessagePack: it is truncated")
        byte = self.payload[at]
        if byte & 0xF0 == short:
            return byte & 15, at + 1
        if byte not in (long, long + 1):
            return None
        end = at + (3 if byte == long else 5)
        if end > len(self.payload):
            raise MessagePackError("not MessagePack: it is truncated")
        return int.from_bytes(self.payload[at + 1 : end], "big"), end


def warm_up() -> None:
    """Compile and load the kernel."""
    for _ in Walk(b"\x91\x00").skip(0, 1):
        pass


class EventError(ValueError):
    """A payload that is not a batch of KV events."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks now cached."""

    hashes: WireHashes  # hashes of consecutive blocks, by the sender's own function
    parent: WireHash | None  # hash of the previous block; None at the start of a sequence
    # tokens of all these blocks; fewer (or none) where the sender hides them.
    token_ids: Sequence[int] | NDArray[np.integer]
    block_size: int  # tokens in a block
    medium: str | None = None  # tier, as the sender names it; None for the device
    # cache salt of the sequence; known only where its first block is among these.
    salt: str | None = None
    lora: str | None = None  # LoRA adapter; None for the base model


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks evicted; `medium` None is the device."""

    hashes: WireHashes
    medium: str | None = None


@dataclass(frozen=True, slots=True)
class Cleared:
    """The whole cache was emptied."""


WireEvent: TypeAlias = Stored | Removed | Cleared


def event_map(
    event: KVEvent, block_size: int, token_ids: Sequence[int] = (), salt: str | None = None,
    lora: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Return the map of a core event; `token_ids` (blocks * block_size) are empty for a tier."""
    if isinstance(event, AllBlocksCleared):
        return {"type": "AllBlocksCleared"}
    hashes = _low_halves(event.hashes)
    if isinstance(event, BlockRemoved):
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": event.medium.value,
                "group_idx": 0}  # fmt: skip
    salted = salt is not None and event.first == 0
    parent = _low_halves(event.parent)
    return {
        "type": "BlockStored", "block_hashes": hashes,
        "parent_block_hash": parent[0] if parent else None, "token_ids": token_ids,
        "block_size": block_size, "lora_id": crc32(lora.encode()) if lora else None,
        "medium": event.medium.value, "lora_name": lora or None,
        "extra_keys": [[salt] if salted else None] + [None] * (len(hashes) - 1), "group_idx": 0,
    }  # fmt: skip


def _low_halves(hashes: BlockHashes) -> list[int]:
    low: list[int] = hashes[:, 1].tolist()
    return low


def encode_batch(ts: float, events: list[dict[str, Any]], rank: int = 0) -> bytes:
    """Encode a payload; `ts` is Unix time in seconds."""
    return _encoder.encode([ts, events, rank])


def sequence_frame(number: int) -> bytes:
    """Return the frame of a sequence number (u64, big-endian)."""
    return number.to_bytes(8, "big")


def sequence_number(frame: bytes) -> int | None:
    """Return the number of a sequence frame; None for the end of a replay. Raises EventError."""
    if len(frame) != 8:
        raise EventError(f"a sequence number has 8 bytes, this frame has {len(frame)}")
    return None if frame == END_OF_REPLAY else int.from_bytes(frame, "big")


def read_event(item: Any) -> WireEvent | None:
    """Return the event; None for an unknown type."""
    if isinstance(item, dict):
        kind, fields = item.get("type"), item
    elif isinstance(item, list) and item:
        kind = item[0]
        names = STORED_FIELDS if kind == "BlockStored" else REMOVED_FIELDS
        fields = dict(zip(names, item[1:], strict=False))
    else:
        raise EventError(f"an event is a map or a non-empty array, not {shown(item)}")
    if kind == "AllBlocksCleared":
        return Cleared()
    if kind not in ("BlockStored", "BlockRemoved"):
        return None
    blocks = _list(fields, "block_hashes")
    check_blocks(len(blocks))
    hashes = tuple(read_hash(value) for value in blocks)
    medium = read_text(fields, "medium")
    if kind == "BlockRemoved":
        return Removed(hashes, medium)
    parent = fields.get("parent_block_hash")
    before = None if parent is None else read_hash(parent)
    size, salt, lora = read_block_size(fields), read_salt(fields), read_lora(fields)
    return Stored(hashes, before, _tokens(fields), size, medium, salt, lora)


def check_blocks(count: int) -> None:
    """Raise EventError where an event has too many blocks."""
    if count > MAX_BLOCKS:
        raise EventError(f"an event has {count} blocks; it may have {MAX_BLOCKS}")


def read_block_size(fields: dict[str, Any]) -> int:
    """Return the tokens in a block."""
    size = fields.get("block_size")
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MAX_BLOCK_SIZE:
        raise EventError(f"block_size is {shown(size)}; it must be in [1, {MAX_BLOCK_SIZE}]")
    return size


def shown(value: Any) -> str:
    """Return a value for a message, shortened; deep ones cannot be shown."""
    return f"{value!r:.80}" if isinstance(value, str | int | float) else type(value).__name__


def read_text(fields: dict[str, Any], name: str) -> str | None:
    """Return a short text, or None where there is none."""
    value = fields.get(name)
    if value is None or (isinstance(value, str) and len(value) <= MAX_NAME_CHARS):
        return value
    raise EventError(f"{name} is {shown(value)}; it must be a short text or null")


def _tokens(fields: dict[str, Any]) -> tuple[int, ...]:
    try:
        return tuple(msgspec.convert(_list(fields, "token_ids"), Tokens, strict=True))
    except msgspec.ValidationError as error:
        raise EventError(f"token_ids: {error}") from None


def _list(fields: dict[str, Any], name: str) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise EventError(f"{name} is {shown(value)}; it must be a list")
    return value


def read_hash(value: Any) -> WireHash:
    """Return a block's hash, unsigned where it is an integer."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value & 0xFFFF_FFFF_FFFF_FFFF  # some engines send it signed
    if isinstance(value, bytes) and 0 < len(value) <= MAX_HASH_BYTES:
        return value
    raise EventError(f"a block hash is an integer or bytes, not {shown(value)}")


def read_lora(fields: dict[str, Any]) -> str | None:
    """Return the adapter of an event's blocks; None for the base model."""
    name, number = read_text(fields, "lora_name"), fields.get("lora_id")
    if name or not number:
        return name or None
    if isinstance(number, int):  # from old engines: no request names it
        return f"lora_id={number}"
    return read_text(fields, "lora_id")


def read_salt(fields: dict[str, Any]) -> str | None:
    """Return SGLang's `cache_salt`, or the salt among vLLM's extra keys of the first block."""
    salt = fields.get("cache_salt")
    if isinstance(salt, str):
        return read_text(fields, "cache_salt")
    keys = fields.get("extra_keys")
    if isinstance(keys, list) and keys and isinstance(keys[0], list):
        texts = [key for key in keys[0] if isinstance(key, str)]
        texts = texts[1:] if texts[:1] == [fields.get("lora_name")] else texts
        return texts[-1] if texts and len(texts[-1]) <= MAX_NAME_CHARS else None
    return None


#: TensorRT-LLM's tiers by `cache_level`.
_LEVELS = (None, "CPU")


class PolledEvents(NamedTuple):
    """One of TensorRT-LLM's events."""

    id: int  # consecutive, of one rank
    rank: int
    window: int  # attention window of its blocks, in tokens
    events: tuple[WireEvent, ...]


def polled_events(page: bytes, block_size: int) -> Iterator[PolledEvents]:
    """Decode an answer of TensorRT-LLM's `/kv_cache_events`. Raises EventError."""
    try:
        for event in msgspec.json.decode(page):
            number, rank = event["event_id"], event.get("attention_dp_rank") or 0
            read = map(read_event, _polled_maps(event["data"], block_size))
            window = event.get("window_size") or 0
            yield PolledEvents(int(number), int(rank), int(window), tuple(filter(None, read)))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, LookupError, TypeError,
            AttributeError, ValueError) as error:  # fmt: skip
        raise EventError(f"not events of TensorRT-LLM: {error}") from None


def _polled_maps(data: dict[str, Any], block_size: int) -> Iterator[dict[str, Any]]:
    """Yield vLLM's maps of one event; the last block is left out while it is not full."""
    kind, stored = data["type"], {"type": "BlockStored", "block_size": block_size}
    removed = {"type": "BlockRemoved", "block_hashes": data.get("block_hashes")}
    if kind == "removed":
        yield from ({**removed, "medium": medium} for medium in _LEVELS)
    elif kind == "updated" and data.get("cache_level"):
        hashes, change = {"block_hashes": [data["block_hash"]]}, data["cache_level"]
        yield {**stored, **hashes, "token_ids": [], "medium": _LEVELS[change["new_value"]]}
        yield {**removed, **hashes, "medium": _LEVELS[change["old_value"]]}
    blocks = data["blocks"] if kind == "stored" else []
    if any(len(block["tokens"]) > block_size for block in blocks):
        raise EventError(f"a block has over {block_size} tokens; attach the server anew")
    if full := [block for block in blocks if len(block["tokens"]) == block_size]:
        ids = [token["token_id"] for block in full for token in block["tokens"]]
        hashes = {"block_hashes": [block["block_hash"] for block in full], "token_ids": ids}
        medium, parent = _LEVELS[full[0].get("cache_level", 0)], data.get("parent_hash")
        yield {**stored, **hashes, "parent_block_hash": parent, "medium": medium}


#: Parts of events, and None where others should run.
_Parts: TypeAlias = Generator[WireEvent | None, None, None]


def event_slices(payload: bytes) -> Iterator[tuple[WireEvent, ...]]:
    """Decode a payload in slices of about `SLICE` blocks, so that other tasks run in between.

    An empty slice only yields control. Raises EventError if it is no batch, or over `MAX_BATCH`.
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
    parts = walk.head(0, ARRAY)
    if parts is None or parts[0] < 2:
        raise EventError("a batch is [timestamp, [events], rank?]")
    at = yield from walk.skip(parts[1], 1)
    ts = _decode(walk, (parts[1], at), "timestamp")
    if not isinstance(ts, int | float):
        raise EventError(f"timestamp is {shown(ts)}; it must be a number")
    items = walk.head(at, ARRAY)
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
            if event is not None and not isinstance(event, Cleared) and len(event.hashes) > SLICE:
                yield from _large(walk, at)
            elif event is not None:
                yield event
            decoded += end - at
        if decoded >= SMALL:
            yield None
            decoded = 0
        at = end
    if (yield from walk.skip(at, parts[0] - 2)) != len(walk.payload):
        raise EventError("not MessagePack of events: bytes follow it")


def _large(walk: Walk, at: int) -> _Parts:
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
    head = walk.head(at, MAP)
    pairs = head is not None
    if head is None and (head := walk.head(at, ARRAY)) is None:
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
    walk: Walk  # over the payload
    name: str
    at: int  # where the next item begins
    left: int

    @classmethod
    def of(cls, walk: Walk, spans: dict[str, _Span], name: str) -> _Items:
        head = walk.head(spans[name][0], ARRAY) if name in spans else None
        if head is None:
            raise EventError(f"{name} is no array; it must be a list")
        return cls(walk, name, head[1], head[0])

    def take_hashes(self, max_items: int) -> Generator[None, None, tuple[WireHash, ...]]:
        data = yield from self._take(max_items, _HASH)
        return tuple(read_hash(value) for value in _decoder.decode(data))

    def take_tokens(self, max_items: int) -> Generator[None, None, list[int]]:
        data = yield from self._take(max_items, _INTEGER)
        try:
            return _token_decoder.decode(data)
        except msgspec.ValidationError as error:
            raise EventError(f"{self.name}: {error}") from None

    def _take(self, max_items: int, widest: int) -> Generator[None, None, bytes]:
        """Return the next items as an array, each of at most `widest` bytes."""
        count = min(max_items, self.left)
        end = yield from self.walk.skip(self.at, count)
        if end - self.at > widest * count:
            raise EventError(f"{self.name} has items of over {widest} bytes")
        data = b"\xdd" + count.to_bytes(4, "big") + self.walk.payload[self.at : end]
        self.at, self.left = end, self.left - count
        return data


def _first_keys(walk: Walk, spans: dict[str, _Span]) -> Generator[None, None, list[Any]]:
    """Return the extra keys of the first block alone, which may have the salt."""
    head = walk.head(spans["extra_keys"][0], ARRAY) if "extra_keys" in spans else None
    if head is None or head[0] == 0:
        return []
    end = yield from walk.skip(head[1], 1)
    return [_decode(walk, (head[1], end), "extra_keys")]


def _decode(walk: Walk, span: _Span, name: str) -> Any:
    start, end = span
    if end - start > _FIELD:
        raise EventError(f"{name} has {end - start} bytes; it may have {_FIELD}")
    return _decoder.decode(walk.payload[start:end])
