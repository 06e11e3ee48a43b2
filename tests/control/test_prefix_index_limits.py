"""Predictions expire, memory is bounded, and any number of workers may speak."""

from __future__ import annotations

import numpy as np
import pytest

from pigou.config import ConfigError, ControlConfig, IndexConfig
from pigou.control.messages import CacheChanged
from pigou.control.plane import ControlPlane
from pigou.control.prefix_index import PrefixIndex, chain, warm_up
from pigou.control.prefix_index.holder_table import ON_DEVICE, ON_HOST, RUN
from pigou.request import BlockStored, no_hashes
from pigou.wire.kv_event_decoding import Removed, Stored

TOKENS = np.arange(64, dtype=np.uint32)
KEYS = chain(TOKENS, 4)


def stored(first: int = 0, count: int = 16, name: int = 1000, medium: str = "GPU") -> Stored:
    return Stored(
        tuple(range(name + first, name + first + count)),
        name + first - 1 if first else None,
        tuple(TOKENS[4 * first : 4 * (first + count)].tolist()),
        4,
        medium,
    )


def test_a_prediction_holds_until_its_time_is_over() -> None:
    index = PrefixIndex(ttl=100)
    index.predict("w", KEYS, 0)
    index.predict("w", KEYS[:8], 50)
    index.expire(99)
    assert index.overlap("w", KEYS) == 16
    index.expire(100)
    assert (index.overlap("w", KEYS), index.cache("w").predicted) == (8, 8)
    index.expire(150)
    assert (index.overlap("w", KEYS), index.keys, index.blocks) == (0, 0, 0)


def test_predictions_and_events_of_one_worker_are_one_answer() -> None:
    index = PrefixIndex(ttl=100)
    index.predict("w", KEYS, 0)
    index.apply("w", [stored(0, 4), stored(4, 8, medium="CPU")])
    told = index.overlaps(("w",), KEYS)
    assert (told[ON_DEVICE, 0], told[ON_HOST, 0]) == (16, 0)
    index.expire(100)
    told = index.overlaps(("w",), KEYS)
    assert (told[ON_DEVICE, 0], told[ON_HOST, 0], told[RUN, 0]) == (4, 8, 12)
    index.predict("w", KEYS, 200)
    index.lost("w")
    assert index.overlap("w", KEYS) == 16


def test_a_full_worker_forgets_predicted_tails_before_roots() -> None:
    index = PrefixIndex(max_blocks=10)
    index.predict("w", KEYS, 0)
    assert (index.overlap("w", KEYS), index.evicted) == (10, 6)


def test_a_full_worker_forgets_the_oldest_leaf_and_keeps_prefixes() -> None:
    index = PrefixIndex(max_blocks=16)
    other = np.arange(100, 124, dtype=np.uint32)
    index.apply("w", [stored(), Stored(tuple(range(6)), None, other, 4)])
    assert index.overlap("w", KEYS) == 10
    assert index.overlap("w", chain(other, 4)) == 6
    assert index.cache("w").evicted == 6


def test_a_chain_beyond_the_limit_is_kept_from_its_root_on() -> None:
    index = PrefixIndex(max_blocks=5)
    index.apply("w", [stored()])
    assert (index.overlap("w", KEYS), index.cache("w").evicted) == (5, 11)


def test_above_the_total_the_worker_with_most_gives_up() -> None:
    index = PrefixIndex(max_total=20)
    index.apply("many", [stored()])
    index.apply("few", [stored(0, 8)])
    assert (index.overlap("many", KEYS), index.overlap("few", KEYS)) == (12, 8)
    index.drop("many")
    assert index.evicted == 4


def test_a_block_that_is_told_twice_needs_no_room() -> None:
    index = PrefixIndex(max_blocks=16, max_total=16)
    index.apply("w", [stored(), stored()])
    assert (index.overlap("w", KEYS), index.evicted) == (16, 0)


def test_workers_beyond_one_word_of_bits_are_told_apart() -> None:
    index, names = PrefixIndex(), [f"w{i}" for i in range(200)]
    for i, name in enumerate(names):
        index.apply(name, [stored(0, i % 17)] if i % 17 else [])
    told = index.overlaps([*names, "stranger"], KEYS)
    assert told[RUN].tolist() == [i % 17 for i in range(200)] + [0]
    for name in names[::2]:
        index.drop(name)
    index.apply("new", [stored()])
    told = index.overlaps([*names, "new"], KEYS)
    assert told[RUN].tolist() == [i % 17 * (i % 2) for i in range(200)] + [16]


def test_hashes_may_be_bytes_or_of_any_length() -> None:
    names = (b"a" * 32, b"b" * 32, 2**200 + 1, -5)
    index = PrefixIndex()
    index.apply("w", [Stored(names[:2], None, tuple(range(8)), 4)])
    index.apply("w", [Stored(names[2:], names[1], tuple(range(8, 16)), 4)])
    assert index.overlap("w", KEYS) == 4
    index.apply("w", [Removed((names[2],))])
    assert index.overlap("w", KEYS) == 2


def test_ids_that_are_no_tokens_hide_their_blocks() -> None:
    index = PrefixIndex()
    index.apply("w", [Stored((1,), None, (-1, 0, 0, 0), 4), Stored((2,), 1, (1, 2, 3, 4), 4)])
    assert (index.cache("w").blocks, index.cache("w").held) == (2, 0)


def test_thousands_of_blocks_come_and_go() -> None:
    index, generator = PrefixIndex(), np.random.default_rng(0)
    kept: dict[int, np.ndarray] = {}
    for i in range(300):
        tokens = generator.integers(0, 1000, 4 * int(generator.integers(1, 200)), dtype=np.uint32)
        names = np.arange(1000 * i, 1000 * i + len(tokens) // 4, dtype=np.uint64)
        index.apply("w", [Stored(names, None, tokens, 4)])
        kept[i] = tokens
        if len(kept) > 20:
            old = int(generator.choice(list(kept)))
            blocks = len(kept.pop(old)) // 4
            gone = generator.permutation(np.arange(1000 * old, 1000 * old + blocks))
            index.apply("w", [Removed(gone.astype(np.uint64))])
    total = sum(len(tokens) // 4 for tokens in kept.values())
    assert index.blocks == total == index.keys
    for tokens in kept.values():
        assert index.overlap("w", chain(tokens, 4)) == len(tokens) // 4


def test_memory_does_not_grow_with_what_went() -> None:
    index = PrefixIndex()
    for turn in range(400):
        index.apply("w", [stored(name=1000 * turn)])
        index.predict("v", KEYS, turn * 10**12)
        index.apply("w", [Removed(tuple(range(1000 * turn, 1000 * turn + 16)))])
        assert (index.overlap("w", KEYS), index.overlap("v", KEYS)) == (0, 16)
        index.expire(10**18)
        if turn == 40:
            usual = index.nbytes
    assert (index.blocks, index.keys, index.nbytes) == (0, 0, usual)


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="max_blocks is 0"):
        PrefixIndex(max_blocks=0)


def test_warming_up_leaves_nothing_behind() -> None:
    warm_up()


def test_the_limits_are_those_of_the_configuration() -> None:
    limits = IndexConfig(max_blocks=8, max_total=12, ttl=5)
    plane = ControlPlane(ControlConfig(index=limits))
    for start, worker in enumerate(("a", "b")):
        hashes = np.arange(1, 11, dtype=np.uint64) + np.uint64(100 * start)
        event = BlockStored("r", 0, np.stack([hashes, hashes], axis=1), no_hashes())
        plane.observe(CacheChanged(worker, (event,)), 0)
    first, second = (plane.index.cache(worker).blocks for worker in ("a", "b"))
    assert second == 8
    assert 0 < first <= 4
    assert plane.index.evicted == 20 - first - second
    plane.index.predict("c", np.arange(1, 3, dtype=np.uint64), 0)
    plane.index.expire(4)
    assert plane.index.cache("c").predicted == 2
    plane.index.expire(5)
    assert plane.index.cache("c").predicted == 0


@pytest.mark.parametrize("name", ["max_blocks", "max_total", "ttl"])
def test_an_index_that_could_hold_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"index.{name} is 0; it must be at least 1"):
        IndexConfig(**{name: 0})
