"""Batches of any size are decoded in pieces of bounded work, and mean what they mean as a whole."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.hostile.stub_server import BATCHES
from tests.lib.kv_event_batch import decode_batch

from pigou.wire import kv_event_decoding
from pigou.wire.kv_event_decoding import (
    Cleared,
    EventError,
    MessagePackError,
    Removed,
    Stored,
    Walk,
    WireEvent,
    event_slices,
)

#: Bytes of the largest piece that is decoded at once: so many tokens with their headers.
MOST_AT_ONCE = 9 * 16 * 1024 + 5

INTS = st.integers(-(2**63), 2**64 - 1)
HASHES = INTS | st.binary(min_size=1, max_size=64)
VALUES = st.recursive(
    st.none() | st.booleans() | INTS | st.floats() | st.text(max_size=40)
    | st.binary(max_size=300) | st.integers(0, 40).map(lambda n: "x" * 2**n if n < 17 else n),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=20,
)  # fmt: skip


def walked(payload: bytes, at: int = 0, count: int = 1) -> int:
    """Return where `count` values end."""
    steps = Walk(payload).skip(at, count)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return int(end.value)


@given(VALUES, st.binary(max_size=9), st.integers(1, 9))
def test_a_walk_finds_where_a_value_ends(value: Any, rest: bytes, step: int) -> None:
    data = msgspec.msgpack.encode(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_event_decoding, "STEP", step)
        assert walked(b"\xc0" + data + rest, 1) == 1 + len(data)
        if len(data) > 1:
            with pytest.raises(MessagePackError):
                walked(data[:-1])


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 3, 300, 70_000])
def test_a_walk_steps_over_extensions(size: int) -> None:
    data = msgspec.msgpack.encode(msgspec.msgpack.Ext(5, b"x" * size))
    assert walked(data + b"\xc0") == len(data)


@st.composite
def stored(draw: st.DrawFn) -> dict[str, Any]:
    blocks, size = draw(st.integers(0, 40)), draw(st.integers(1, 4))
    tokens = draw(st.sampled_from([blocks * size, blocks * size, 0]))
    return {
        "type": "BlockStored",
        "block_hashes": draw(st.lists(HASHES, min_size=blocks, max_size=blocks)),
        "parent_block_hash": draw(st.none() | HASHES),
        "token_ids": [7 * n % 100_003 for n in range(tokens)],
        "block_size": size,
        "lora_id": None,
        "medium": draw(st.sampled_from([None, "GPU", "CPU"])),
        "lora_name": draw(st.none() | st.just("adapter")),
        "extra_keys": draw(st.sampled_from([None, [], [None], [["salt"], None], [["a", "b"]]])),
    }


@st.composite
def any_event(draw: st.DrawFn) -> Any:
    removed = {"type": "BlockRemoved", "block_hashes": draw(st.lists(HASHES, max_size=40)),
               "medium": "GPU"}  # fmt: skip
    other = [{"type": "AllBlocksCleared"}, {"type": "Other", "x": [1]}, ["Other", 1]]
    event = draw(stored() | st.just(removed) | st.sampled_from(other))
    as_array = draw(st.booleans()) and isinstance(event, dict)
    return list(event.values()) if as_array else event


def joined(parts: list[WireEvent]) -> list[Any]:
    """Return stored and removed blocks one by one, so that how they were cut does not show."""
    found: list[Any] = []
    for part in parts:
        if isinstance(part, Cleared):
            found.append(part)
        elif isinstance(part, Removed):
            found += [("removed", each, part.medium) for each in part.hashes]
        else:
            found += _blocks(part)
    return found


def _blocks(part: Stored) -> list[Any]:
    size, before, salt = part.block_size, part.parent, part.salt
    blocks = []
    for at, each in enumerate(part.hashes):
        tokens = tuple(part.token_ids[at * size : (at + 1) * size])
        blocks.append((each, before, tokens, size, part.medium, salt, part.lora))
        before, salt = each, None
    return blocks


@given(st.lists(any_event(), max_size=5), st.sampled_from([0, 100, 2**14]), st.integers(1, 30))
def test_a_batch_means_the_same_in_pieces_as_in_one(
    events: list[Any], small: int, slice_blocks: int
) -> None:
    payload = msgspec.msgpack.encode([1.0, events, 3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_event_decoding, "SMALL", small)
        patch.setattr(kv_event_decoding, "SLICE", slice_blocks)
        parts = [event for each in event_slices(payload) for event in each]
    assert joined(parts) == joined(list(decode_batch(payload).events))


@given(st.binary(max_size=200), st.sampled_from([0, 2**14]))
def test_no_bytes_raise_anything_but_an_event_error(payload: bytes, small: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_event_decoding, "SMALL", small)
        for each in (payload, b"\x92\xcb" + b"\0" * 8 + payload, b"\x92\x01\x91" + payload):
            try:
                list(event_slices(each))
            except EventError:
                continue


class Recorder:
    """A decoder that notes how much it is given."""

    def __init__(self, decoder: Any, sizes: list[int]) -> None:
        self._decoder = decoder
        self._sizes = sizes

    def decode(self, data: bytes) -> Any:
        self._sizes.append(len(data))
        return self._decoder.decode(data)


def largest(payload: bytes, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the bytes that are decoded between two pauses, at most."""
    sizes: list[int] = [0]
    for name in ("_decoder", "_token_decoder"):
        decoder = Recorder(getattr(kv_event_decoding, name), sizes)
        monkeypatch.setattr(kv_event_decoding, name, decoder)
    most = 0
    try:
        for _ in event_slices(payload):
            most = max(most, sum(sizes))
            sizes.clear()
    except EventError:
        pass
    return max(most, sum(sizes))


def _event(blocks: int, token: int) -> dict[str, Any]:
    return {"type": "BlockStored", "block_hashes": list(range(blocks)), "parent_block_hash": None,
            "token_ids": [token] * 16 * blocks, "block_size": 16}  # fmt: skip


LARGE = [
    *BATCHES,
    *[msgspec.msgpack.encode([1.0, events]) for events in (
        [_event(65_000, 5)], [_event(65_000, 100_000)], [_event(800, 5)] * 100,
        [{"type": "Other", "x": [0] * 2_000_000}], [["Other", *[0] * 2_000_000]],
        [{"type": "BlockStored", "block_hashes": [[0] * 1_000_000]}],
        [{"type": "BlockRemoved", "block_hashes": [1], "medium": "x" * 4_000_000}],
        [{"x" * 4_000_000: 1}], [{str(n): n for n in range(100_000)}],
        [{"type": "BlockRemoved", "block_hashes": [b"x" * 5_000_000]}],
        [[0] * 16_000] * 400,
    )],
    msgspec.msgpack.encode([[0] * 4_000_000, []]),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(LARGE)))
def test_little_is_decoded_between_two_pauses(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert largest(LARGE[number], monkeypatch) <= 2 * MOST_AT_ONCE


def test_blocks_are_counted_before_any_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = msgspec.msgpack.encode([1.0, [_event(70_000, 5)]])
    assert largest(payload, monkeypatch) < 200
    with pytest.raises(EventError, match="70000 blocks"):
        list(event_slices(payload))
