"""Laws of the prefix index: what a worker holds is what its events say, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.control.prefix_index import PrefixIndex, chain
from pigou.request import BlockRemoved, BlockStored
from pigou.wire.kv_event_decoding import Cleared, Removed, Stored, WireEvent

SIZE = 4
TOKENS = tuple(range(100, 120))


def stored(first: int, count: int, salt: str | None = None, medium: str = "GPU") -> Stored:
    """Blocks of TOKENS under an engine's own hashes, which are 1000 + index."""
    return Stored(
        hashes=tuple(1000 + i for i in range(first, first + count)),
        parent=None if first == 0 else 1000 + first - 1,
        token_ids=TOKENS[first * SIZE : (first + count) * SIZE],
        block_size=SIZE,
        medium=medium,
        salt=salt,
    )


def overlap(index: PrefixIndex, salt: str = "", worker: str = "w") -> int:
    return index.overlap(worker, chain(TOKENS, SIZE, salt))


def test_stored_blocks_are_found_by_their_tokens() -> None:
    index = PrefixIndex()
    index.apply("w", [stored(0, 2), stored(2, 1)])
    assert overlap(index) == 3
    assert overlap(index, worker="other") == 0
    assert index.cache("w").blocks == 3


def test_an_extension_hashes_as_the_whole() -> None:
    whole = chain(TOKENS, SIZE, "s")
    parts = chain(TOKENS[8:], SIZE, parent=int(chain(TOKENS[:8], SIZE, "s")[-1]))
    assert whole[2:].tolist() == parts.tolist()


def test_a_salt_keeps_the_same_tokens_apart() -> None:
    index = PrefixIndex()
    index.apply("w", [stored(0, 3, salt="tenant")])
    assert overlap(index) == 0
    assert overlap(index, "tenant") == 3


def test_an_adapter_keeps_the_same_tokens_apart() -> None:
    index = PrefixIndex()
    index.apply("w", [replace(stored(0, 2), lora="sql"), stored(2, 1)])
    index.apply("w", [replace(stored(0, 1, salt="s"), hashes=(7,), lora="sql")])
    assert overlap(index) == 0
    keys = (("", "sql", 3), ("s", "sql", 1), ("", "lqs", 0), ("sql", "", 0), ("s", "", 0))
    for salt, lora, blocks in keys:
        assert index.overlap("w", chain(TOKENS, SIZE, salt, lora=lora)) == blocks


def test_a_removed_block_ends_the_match() -> None:
    index = PrefixIndex()
    index.apply("w", [stored(0, 3), Removed((1001,))])
    assert overlap(index) == 1
    index.apply("w", [Removed((1001,)), Removed((77,))])
    assert overlap(index) == 1


def test_a_block_stays_until_the_last_tier_drops_it() -> None:
    index = PrefixIndex()
    index.apply("w", [stored(0, 1), stored(0, 1, medium="CPU"), Removed((1000,))])
    assert overlap(index) == 1
    index.apply("w", [Removed((1000,), medium="CPU")])
    assert overlap(index) == 0


def test_the_same_content_twice_is_there_until_both_are_gone() -> None:
    index = PrefixIndex()
    twin = Stored((5,), None, TOKENS[:SIZE], SIZE)
    index.apply("w", [stored(0, 1), twin, Removed((1000,))])
    assert overlap(index) == 1
    index.apply("w", [Removed((5,))])
    assert overlap(index) == 0


def test_a_block_without_tokens_or_parent_is_counted_and_never_matched() -> None:
    index = PrefixIndex()
    hidden = Stored((1,), None, (), SIZE)
    index.apply("w", [hidden, stored(2, 1)])
    assert overlap(index) == 0
    assert index.cache("w").blocks == 2


def test_a_lost_cache_is_forgotten_and_rebuilt_from_live_events() -> None:
    index = PrefixIndex()
    index.apply("w", [stored(0, 2)])
    index.lost("w")
    assert (overlap(index), index.cache("w").event_gaps) == (0, 1)
    index.apply("w", [stored(0, 1), stored(1, 1)])
    assert overlap(index) == 2
    index.apply("w", [Cleared()])
    assert overlap(index) == 0


def test_core_events_are_trusted() -> None:
    index = PrefixIndex()
    hashes = np.array([[9, 1], [9, 2]], dtype=np.uint64)
    index.apply("w", [BlockStored("r", 0, hashes, hashes[:0])])
    assert index.overlap("w", hashes[:, 1]) == 2
    index.apply("w", [BlockRemoved(hashes[1:])])
    assert index.overlap("w", hashes[:, 1]) == 1


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.sampled_from(["GPU", "CPU"]))))
def test_the_index_answers_as_a_plain_set_would(
    steps: list[tuple[bool, int, str]],
) -> None:
    index, truth = PrefixIndex(), set[tuple[int, str]]()
    index.apply("w", [stored(0, 5, medium="X")])  # so that parents are always known
    for store, block, medium in steps:
        event: WireEvent = (
            stored(block, 1, medium=medium) if store else Removed((1000 + block,), medium)
        )
        index.apply("w", [event])
        truth = truth | {(block, medium)} if store else truth - {(block, medium)}
    index.apply("w", [Removed(tuple(1000 + i for i in range(5)), "X")])
    held = {block for block, _ in truth}
    expected = next((i for i in range(5) if i not in held), 5)
    assert overlap(index) == expected
    assert index.cache("w").blocks == len(held)


def test_a_tier_is_told_of_by_hashes_alone_and_a_block_counts_once() -> None:
    index, keys = PrefixIndex(), chain(TOKENS, SIZE)
    index.apply("w", [stored(0, 3), Stored((1000, 1001, 1002), None, (), SIZE, "CPU")])
    assert index.overlaps(("w",), keys)[:, 0].tolist() == [3, 0, 0, 3]
    index.apply("w", [Removed((1001, 1002))])
    assert index.overlaps(("w",), keys)[:, 0].tolist() == [1, 2, 0, 3]
    index.apply("w", [Stored((1002,), 1001, (), SIZE, "STORAGE"), Removed((1002,), "CPU")])
    assert index.overlaps(("w",), keys)[:, 0].tolist() == [1, 1, 1, 3]


def test_what_a_tier_had_from_before_is_matched_once_it_was_on_the_device() -> None:
    index, keys = PrefixIndex(), chain(TOKENS, SIZE)
    index.apply("w", [Stored((1000, 1001), None, (), SIZE, "STORAGE")])
    assert overlap(index) == 0
    index.apply("w", [stored(0, 2), Removed((1000, 1001))])
    assert index.overlaps(("w",), keys)[:, 0].tolist() == [0, 0, 2, 2]
