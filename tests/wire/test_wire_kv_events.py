"""KV events are read in both shapes, and what is not known is skipped."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples
from tests.lib.kv_event_batch import KVEventBatch, decode_batch

from pigou.request import AllBlocksCleared, BlockRemoved, BlockStored, Medium
from pigou.wire.kv_event_decoding import (
    END_OF_REPLAY,
    Cleared,
    EventError,
    Removed,
    Stored,
    encode_batch,
    event_map,
    sequence_frame,
    sequence_number,
)


def pack(*events: object, rank: int | None = 0) -> bytes:
    tail = [] if rank is None else [rank]
    return msgspec.msgpack.encode([1.5, list(events), *tail])


def test_our_events_are_read_back() -> None:
    hashes = np.array([[1, 2], [3, 2**64 - 1]], dtype=np.uint64)
    stored = BlockStored("r", 0, hashes, hashes[:0])
    more = BlockStored("r", 2, hashes, hashes[1:], Medium.HOST)
    maps = [
        event_map(stored, 4, list(range(8)), "salt"),
        event_map(more, 4, list(range(8)), "salt", "adapter"),
        event_map(BlockRemoved(hashes), 4),
        event_map(AllBlocksCleared(), 4),
    ]
    low = (2, 2**64 - 1)
    assert decode_batch(encode_batch(2.0, maps)) == KVEventBatch(
        2.0,
        (
            Stored(low, None, tuple(range(8)), 4, "GPU", "salt"),
            Stored(low, low[1], tuple(range(8)), 4, "CPU", None, "adapter"),
            Removed(low, "GPU"),
            Cleared(),
        ),
        0,
    )


def test_maps_and_arrays_of_other_engines_mean_the_same() -> None:
    fields = {
        "type": "BlockStored", "block_hashes": [-1, 5], "parent_block_hash": b"\x01\x02",
        "token_ids": [1, 2, 3, 4], "block_size": 2, "lora_id": None, "medium": "GPU",
        "lora_name": "lo", "extra_keys": [["a", "salt"], None], "group_idx": 0, "new_key": {},
    }  # fmt: skip
    array = ["BlockStored", [-1, 5], b"\x01\x02", [1, 2, 3, 4], 2, None, "GPU", "lo"]
    expected = Stored((2**64 - 1, 5), b"\x01\x02", (1, 2, 3, 4), 2, "GPU", "salt", "lo")
    assert decode_batch(pack(fields)).events == (expected,)
    assert decode_batch(pack(array, rank=None)).events[0] == Stored(
        expected.hashes, expected.parent, expected.token_ids, 2, "GPU", None, "lo"
    )
    assert decode_batch(pack(["BlockRemoved", [7]], ["AllBlocksCleared"])).events == (
        Removed((7,)),
        Cleared(),
    )


def test_an_adapter_is_known_by_name_or_else_by_number_and_is_no_salt() -> None:
    fields = {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None,
              "token_ids": [1, 2], "block_size": 1, "medium": "GPU"}  # fmt: skip
    image = ["picture", 0]
    cases = (
        ({"lora_id": 3, "lora_name": "sql", "extra_keys": [["sql"], ["sql"]]}, "sql", None),
        ({"lora_id": 3, "lora_name": "sql", "extra_keys": [["sql", image, "s"], None]}, "sql", "s"),
        ({"lora_id": 3, "extra_keys": [[image, "s"], None]}, "lora_id=3", "s"),
        ({"lora_id": 0, "lora_name": "", "extra_keys": None}, None, None),
    )
    for more, lora, salt in cases:
        (event,) = decode_batch(pack(fields | more)).events
        assert isinstance(event, Stored)
        assert (event.lora, event.salt) == (lora, salt)


def test_unknown_types_are_skipped() -> None:
    assert decode_batch(pack({"type": "BlockMoved"}, ["Other", 1])).events == ()


@given(st.binary(max_size=64))
@settings(max_examples=examples(300))
def test_bytes_that_are_no_batch_are_an_error_of_its_own(data: bytes) -> None:
    try:
        decode_batch(data)
    except EventError:
        return


@pytest.mark.parametrize(
    "event",
    [7, [], {"type": "BlockStored"}, {"type": "BlockRemoved", "block_hashes": [1.5]},
     {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 0}],
    ids=repr,
)  # fmt: skip
def test_events_that_lack_a_field_are_refused(event: object) -> None:
    with pytest.raises(EventError):
        decode_batch(pack(event))


def test_sequence_numbers_are_big_endian_and_end_with_minus_one() -> None:
    assert sequence_frame(258) == b"\0\0\0\0\0\0\1\2"
    assert sequence_number(b"\0\0\0\0\0\0\1\2") == 258
    assert sequence_number(END_OF_REPLAY) is None
    with pytest.raises(EventError):
        sequence_number(b"\0")
