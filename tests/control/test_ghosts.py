"""Laws of what a block of memory is worth, by what had to be computed again."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.control.prefix_index import PrefixIndex
from pigou.request import BlockRemoved, BlockStored, KVEvent, Medium


def hashes(*blocks: int) -> np.ndarray:
    """Hashes of blocks, shape (blocks, 2)."""
    found = np.zeros((len(blocks), 2), dtype=np.uint64)
    found[:, 1] = [block + 1 for block in blocks]
    return found


def stored(*blocks: int, medium: Medium = Medium.DEVICE) -> BlockStored:
    return BlockStored("r", 0, hashes(*blocks), hashes(), medium)


def removed(*blocks: int, medium: Medium = Medium.DEVICE) -> BlockRemoved:
    return BlockRemoved(hashes(*blocks), medium)


class Cache:
    """One worker's cache of single blocks, least recently used first, and what it tells."""

    def __init__(self, index: PrefixIndex, worker: str, blocks: int) -> None:
        self._index, self._worker, self._blocks = index, worker, blocks
        self._held: OrderedDict[int, None] = OrderedDict()
        self.misses = 0

    def use(self, block: int) -> None:
        if block in self._held:
            self._held.move_to_end(block)
            return
        self.misses += 1
        events: list[KVEvent] = []
        if len(self._held) == self._blocks:
            events.append(removed(self._held.popitem(last=False)[0]))
        self._held[block] = None
        self._index.apply(self._worker, [*events, stored(block)])


def worth(index: PrefixIndex, *workers: str) -> list[float]:
    return index.recomputed_share(workers).tolist()


def test_memory_is_worth_nothing_while_nothing_is_evicted_or_comes_back() -> None:
    index = PrefixIndex()
    index.apply("a", [stored(*range(100))])
    assert worth(index, "a", "nobody") == [0.0, 0.0]
    cache = Cache(index, "b", 50)
    for block in range(100, 3000):
        cache.use(block)
    assert worth(index, "a", "b") == [0.0, 0.0]


def test_who_needs_one_block_more_loses_nearly_all() -> None:
    """Turns over more blocks than there is room for, by order of use: none is ever hit."""
    index = PrefixIndex()
    cache = Cache(index, "a", 100)
    for turn in range(8000):
        cache.use(turn % 110)
    assert worth(index, "a")[0] > 0.9


def test_memory_is_worth_more_the_more_of_what_was_evicted_returns() -> None:
    def of(share: float) -> float:
        index, rng = PrefixIndex(), np.random.default_rng(1)
        cache, fresh = Cache(index, "a", 200), 10_000
        for turn in range(12_000):
            if rng.random() < share:
                cache.use(turn % 230)
            else:
                fresh += 1
                cache.use(fresh)
        return worth(index, "a")[0]

    found = [of(share) for share in (0.0, 0.3, 0.6, 0.9)]
    assert found == sorted(found)
    assert found[0] == 0.0
    assert found[-1] == pytest.approx(0.9, abs=0.1)


def test_memory_is_priced_by_what_a_block_more_of_it_would_save() -> None:
    """Uniform use: misses fall by as much a block whatever its size, so that can be measured."""

    def run(blocks: int) -> tuple[float, int]:
        index, rng = PrefixIndex(), np.random.default_rng(7)
        cache = Cache(index, "a", blocks)
        for block in rng.integers(0, 1500, 30_000).tolist():
            cache.use(block)
        return worth(index, "a")[0], cache.misses

    price, misses = run(1000)
    saved = (misses - run(1100)[1]) / 100  # by one block, in all that time
    stays = misses / 1000  # blocks that took turns in it
    assert 0.3 < price < 1.0
    assert price == pytest.approx(saved / stays, rel=0.6)  # those beyond 2 C count, too


def test_a_block_that_is_kept_in_another_tier_was_not_lost() -> None:
    index = PrefixIndex()
    for _ in range(20):
        index.apply("a", [stored(*range(200))])
        index.apply("a", [stored(*range(200), medium=Medium.HOST), removed(*range(200))])
    assert worth(index, "a") == [0.0]
    index.apply("a", [removed(*range(200), medium=Medium.HOST), stored(*range(200))])
    assert worth(index, "a")[0] > 0.0


def test_who_gave_a_block_up_pays_wherever_it_is_computed_again() -> None:
    index = PrefixIndex()
    index.apply("a", [stored(*range(500)), removed(*range(500))])
    index.apply("a", [stored(*range(1000, 1500))])
    index.apply("b", [stored(*range(500))])
    a, b = worth(index, "a", "b")
    assert a > 0.5
    assert b == 0.0


def test_a_worker_that_comes_back_begins_anew() -> None:
    index = PrefixIndex()
    for _ in range(4):
        index.apply("a", [stored(*range(500)), removed(*range(500))])
    assert worth(index, "a")[0] > 0.5
    index.drop("a")
    index.apply("b", [stored(*range(500))])  # it may have got the number of the other
    assert worth(index, "a", "b") == [0.0, 0.0]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(1, 8)), max_size=60))
@settings(max_examples=examples(50))
def test_it_is_a_share_and_the_same_by_events_that_were_keyed(
    events: list[tuple[bool, int, int]],
) -> None:
    index, other = PrefixIndex(), PrefixIndex()
    for stores, first, count in events:
        blocks = range(first, first + count)
        event = stored(*blocks) if stores else removed(*blocks)
        index.apply("a", [event])
        other.apply("a", [other.keyed("a", event)])
        assert 0.0 <= worth(index, "a")[0] <= 1.0
    assert worth(index, "a") == worth(other, "a")
