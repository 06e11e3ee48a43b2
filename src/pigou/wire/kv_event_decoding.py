"""The wire of KV events: vLLM's ZMQ frames and MessagePack, both of its shapes.

A message is `[topic, sequence number (u64, big-endian), payload]`; the payload is MessagePack of
`[timestamp, [events], data parallel rank?]`. Events are maps with a `type` (new releases) or
arrays with the type first (old ones); unknown keys and types are ignored. A hash is an unsigned
integer (low 64 bits of the digest) or raw bytes, and belongs to the engine that sent it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.events import AllBlocksCleared, BlockRemoved, BlockStored
from pigou.request import BlockHashes

#: Sequence number of the frame that ends a replay (-1, signed).
END_OF_REPLAY = b"\xff" * 8

WireHash: TypeAlias = int | bytes
#: Hashes of consecutive blocks; an array where they are 64-bit integers.
WireHashes: TypeAlias = Sequence[WireHash] | NDArray[np.uint64]


class EventError(ValueError):
    """A payload that is not a batch of KV events."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that can be hit from now on."""

    hashes: WireHashes  # of these consecutive blocks, by the sender's own function
    parent: WireHash | None  # hash of the block before them; None at the beginning of a sequence
    # of all these blocks together; fewer (or none) where the sender hides them.
    token_ids: Sequence[int] | NDArray[np.integer]
    block_size: int  # tokens in a block
    medium: str | None = None  # tier, as the sender names it; None means the device
    # cache salt of the sequence; known only where its first block is among these.
    salt: str | None = None
    lora: str | None = None  # name of the adapter that computed them; None for the base model


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that can no longer be hit. `medium` None means the device."""

    hashes: WireHashes
    medium: str | None = None


@dataclass(frozen=True, slots=True)
class Cleared:
    """The whole cache was emptied."""


WireEvent: TypeAlias = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """Events that one engine step caused."""

    ts: float  # Unix time in seconds at the sender
    events: tuple[WireEvent, ...] = field(default_factory=tuple)  # in order
    rank: int | None = None  # data parallel rank; None when not said


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


#: Column of a hash with its low 64 bits.
_LOW = 1


def wire_hashes(hashes: BlockHashes) -> list[int]:
    """Return the low 64 bits of each 128-bit hash, unsigned; `hashes` has shape (n, 2)."""
    low: list[int] = hashes[:, _LOW].tolist()
    return low


def stored_map(
    event: BlockStored, token_ids: Sequence[int], block_size: int, salt: str | None
) -> dict[str, Any]:
    """Return the map of a core event.

    Args:
        token_ids: of all blocks of the event, `blocks * block_size` of them; none for a tier,
            whose blocks are known by their hashes from the device.
        block_size: tokens in a block.
        salt: cache salt of the request; travels with its first block only.
    """
    hashes = wire_hashes(event.hashes)
    salted = salt is not None and event.first == 0
    parent = wire_hashes(event.parent)
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent[0] if parent else None,
        "token_ids": token_ids,
        "block_size": block_size,
        "lora_id": None,
        "medium": event.medium.value,
        "lora_name": None,
        "extra_keys": [[salt] if salted else None] + [None] * (len(hashes) - 1),
        "group_idx": 0,
    }


def removed_map(event: BlockRemoved) -> dict[str, Any]:
    """Return the map of a core event."""
    return {
        "type": "BlockRemoved",
        "block_hashes": wire_hashes(event.hashes),
        "medium": event.medium.value,
        "group_idx": 0,
    }


def cleared_map(_: AllBlocksCleared) -> dict[str, Any]:
    """Return the map of a core event."""
    return {"type": "AllBlocksCleared"}


def encode_batch(ts: float, events: list[dict[str, Any]], rank: int = 0) -> bytes:
    """Encode a payload; `ts` is Unix time in seconds."""
    return _encoder.encode([ts, events, rank])


def decode_batch(payload: bytes) -> KVEventBatch:
    """Decode a payload of vLLM, SGLang or Pigou, of either shape.

    Raises:
        EventError: it is not `[timestamp, [events], rank?]`, or an event lacks a field.
    """
    try:
        raw = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise EventError(f"not MessagePack: {error}") from None
    if not isinstance(raw, list) or len(raw) < 2 or not isinstance(raw[1], list):
        raise EventError("a batch is [timestamp, [events], rank?]")
    if not isinstance(raw[0], int | float):
        raise EventError(f"timestamp is {shown(raw[0])}; it must be a number")
    events = tuple(event for item in raw[1] if (event := read_event(item)) is not None)
    rank = raw[2] if len(raw) > 2 and isinstance(raw[2], int) else None
    return KVEventBatch(float(raw[0]), events, rank)


def sequence_frame(number: int) -> bytes:
    """Return the frame of a sequence number (u64, big-endian)."""
    return number.to_bytes(8, "big")


def sequence_number(frame: bytes) -> int | None:
    """Return the number of a sequence frame; None for the end of a replay.

    Raises:
        EventError: the frame has not 8 bytes.
    """
    if len(frame) != 8:
        raise EventError(f"a sequence number has 8 bytes, this frame has {len(frame)}")
    return None if frame == END_OF_REPLAY else int.from_bytes(frame, "big")


def read_event(item: Any) -> WireEvent | None:
    """Return the event; None for a type that is not known."""
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
    return Stored(
        hashes=hashes,
        parent=None if parent is None else read_hash(parent),
        token_ids=_tokens(fields),
        block_size=read_block_size(fields),
        medium=medium,
        salt=read_salt(fields),
        lora=read_lora(fields),
    )


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
    """Return the adapter of an event's blocks; None for the base model.

    Old engines send a number alone, which no request names: its blocks are nobody's hits.
    """
    name, number = read_text(fields, "lora_name"), fields.get("lora_id")
    if name or not number:
        return name or None
    if isinstance(number, int):
        return f"lora_id={number}"
    return read_text(fields, "lora_id")


def read_salt(fields: dict[str, Any]) -> str | None:
    """Return SGLang's `cache_salt`, or the salt that vLLM puts among the first block's keys.

    vLLM's keys are the adapter's name, pairs of multimodal inputs, the salt, and digests.
    """
    salt = fields.get("cache_salt")
    if isinstance(salt, str):
        return read_text(fields, "cache_salt")
    keys = fields.get("extra_keys")
    if isinstance(keys, list) and keys and isinstance(keys[0], list):
        texts = [key for key in keys[0] if isinstance(key, str)]
        texts = texts[1:] if texts[:1] == [fields.get("lora_name")] else texts
        return texts[-1] if texts and len(texts[-1]) <= MAX_NAME_CHARS else None
    return None
