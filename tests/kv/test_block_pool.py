"""Compiled kernels do what the plain model does, and the pool's laws hold at each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from block_model import BlockModel, Hash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.lib.examples import examples

from pigou.kv import block_pool as kernels
from pigou.kv.block import IntegrityError
from pigou.kv.block_pool import BlockPool
from pigou.kv.block_pool_checks import check_pool
from pigou.kv.hashing import chain
from pigou.kv.prefix_cache import PrefixCache
from pigou.request import no_hashes


def eviction_order(pool: BlockPool) -> np.ndarray:
    """All free blocks, in the order in which they will be handed out."""
    return pool.peek(pool.free)


@dataclass
class Row:
    table: np.ndarray
    hashes: np.ndarray
    cached: int
    duplicates: bool = False
    start: int = 0

    @property
    def keys(self) -> list[Hash]:
        return [(int(high), int(low)) for high, low in self.hashes]


class Blocks(RuleBasedStateMachine):
    @initialize(blocks=st.integers(1, 12))
    def begin(self, blocks: int) -> None:
        self.pool = BlockPool(blocks)
        self.prefix = PrefixCache(self.pool)
        self.model = BlockModel(blocks)
        self.rows: list[Row] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8), gap=st.integers(0, 12))
    def admit(self, tokens: list[int], gap: int) -> None:
        hashes = chain(tokens, 1, b"s")
        hashes[gap : gap + 1] = 0
        row = Row(np.zeros(len(tokens), dtype=np.int32), hashes, 0)
        found = self.prefix.match(hashes, len(hashes))
        expected = self.model.match(row.keys)
        assert found.blocks.tolist() == expected
        assert found.idle == sum(self.model.refs[b] == 0 for b in expected)
        hits = len(expected)
        if len(tokens) - hits > self.pool.free - found.idle:
            return
        self.pool.take(found.blocks, row.table[:hits])
        self.model.take(expected)
        self.allocate(row.table[hits:])
        row.cached = hits
        self.rows.append(row)

    def allocate(self, out: np.ndarray) -> None:
        coming = self.model.free[: len(out)]
        assert self.pool.peek(len(out)).tolist() == coming
        gone = self.pool.allocate(out)
        assert out.tolist() == coming
        self.compare_removed(gone, coming)

    def compare_removed(self, gone: np.ndarray, blocks: list[int]) -> None:
        expected: set[Hash] = set()
        for block in blocks:
            expected |= self.model.claim(block)
        assert {tuple(h) for h in gone.tolist()} == expected
        assert len(gone) == len(expected)

    @rule(data=st.data())
    @precondition(lambda self: self.pool.free)
    def claim(self, data: Any) -> None:
        order = eviction_order(self.pool).tolist()
        wanted = data.draw(st.lists(st.sampled_from(order), min_size=1, unique=True))
        table = np.array(wanted, dtype=np.int32)
        self.compare_removed(self.pool.claim(table), wanted)
        self.rows.append(Row(table, no_hashes(), 0))

    @rule(data=st.data())
    @precondition(lambda self: self.rows)
    def cache(self, data: Any) -> None:
        row = data.draw(st.sampled_from(self.rows))
        stop = data.draw(st.integers(row.cached, len(row.hashes)))
        if row.start or stop == row.cached:
            return
        done = self.prefix.cache_full_blocks(row.table, row.hashes, row.cached, stop)
        new = self.model.cache_full_blocks(row.table.tolist(), row.keys, row.cached, stop)
        assert row.keys[done.first : done.first + done.new] == new
        row.duplicates |= done.duplicates
        row.cached = stop

    @rule(data=st.data())
    @precondition(lambda self: self.rows)
    def release(self, data: Any) -> None:
        row = data.draw(st.sampled_from(self.rows))
        start = data.draw(st.integers(0, len(row.table)))
        hashes = row.hashes if row.duplicates else no_hashes()
        freed = self.pool.release(row.table, start, len(row.table), row.hashes, row.duplicates)
        keys = [(int(high), int(low)) for high, low in hashes]
        assert freed == self.model.release(row.table.tolist(), start, keys)
        row.table = row.table[:start]
        row.start = start or len(row.hashes)
        if not start:
            self.rows = [other for other in self.rows if other is not row]

    @rule(data=st.data(), forgotten=st.sampled_from([False, False, False, True]))
    @precondition(lambda self: self.rows)
    def copy_and_release(self, data: Any, forgotten: bool) -> None:
        row = data.draw(st.sampled_from(self.rows))
        found = self.prefix.match(row.hashes, data.draw(st.integers(0, len(row.hashes)))).blocks
        table = np.empty_like(found)
        self.pool.take(found, table)
        self.model.take(table.tolist())
        if forgotten:
            self.clear()
        assert self.pool.release_chain(table) == self.model.release_chain(table.tolist())

    @rule()
    def clear(self) -> None:
        self.prefix.clear()
        self.model.cached.clear()
        self.model.parent.clear()

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.free == len(self.model.free)
        assert self.pool.cached == len(self.model.cached)
        assert eviction_order(self.pool).tolist() == self.model.free
        assert self.pool.refs(np.arange(self.pool.blocks)).tolist() == self.model.refs
        keys = {tuple(k): b for b, k in enumerate(self.pool.keys.tolist()) if any(k)}
        assert keys == self.model.cached
        tables = [row.table for row in self.rows] or [np.empty(0, dtype=np.int32)]
        references = np.bincount(np.concatenate(tables), minlength=self.pool.blocks)
        check_pool(self.pool, references.astype(np.int32))


Blocks.TestCase.settings = settings(max_examples=examples(80), stateful_step_count=40)
TestBlocks = Blocks.TestCase


def filled(blocks: int, tokens: int) -> tuple[BlockPool, PrefixCache, np.ndarray, np.ndarray]:
    """A pool with one sequence of `tokens` one-token blocks, all cached."""
    pool = BlockPool(blocks)
    prefix = PrefixCache(pool)
    table = np.zeros(tokens, dtype=np.int32)
    hashes = chain(list(range(tokens)), 1, b"s")
    pool.allocate(table)
    prefix.cache_full_blocks(table, hashes, 0, tokens)
    return pool, prefix, table, hashes


def test_tails_are_handed_out_before_their_prefixes() -> None:
    pool, prefix, table, hashes = filled(8, 4)
    pool.release(table, 0, 4, hashes)
    assert eviction_order(pool).tolist() == [4, 5, 6, 7, 3, 2, 1, 0]
    assert pool.meta[table, kernels.PARENT].tolist() == [-1, 0, 1, 2]
    pool.allocate(np.zeros(6, dtype=np.int32))
    assert len(prefix.match(hashes, 4).blocks) == 2


def test_a_block_is_never_handed_out_while_referred_to() -> None:
    pool, _, table, _ = filled(8, 4)
    out = np.zeros(pool.free, dtype=np.int32)
    pool.allocate(out)
    assert not set(out.tolist()) & set(table.tolist())
    assert pool.free == 0
    with pytest.raises(AssertionError, match="more blocks than are free"):
        pool.allocate(out[:1])


def test_of_two_blocks_with_one_hash_the_first_stays_cached() -> None:
    pool, prefix, _, hashes = filled(8, 3)
    again = np.zeros(3, dtype=np.int32)
    pool.allocate(again)
    cached = prefix.cache_full_blocks(again, hashes, 0, 3)
    assert cached == (3, 0, True)
    assert prefix.match(hashes, 3).blocks.tolist() == [0, 1, 2]
    assert pool.cached == 3


def test_a_parent_that_dies_takes_its_children_out_of_the_cache() -> None:
    pool, prefix, table, hashes = filled(4, 2)
    twin = np.zeros(2, dtype=np.int32)
    pool.allocate(twin)
    longer = chain([0, 1, 2], 1, b"s")
    assert prefix.cache_full_blocks(twin, hashes, 0, 2).duplicates
    pool.release(table, 1, 2, hashes)
    pool.claim(table[1:])
    three = np.array([twin[0], twin[1], table[1]], dtype=np.int32)
    assert prefix.cache_full_blocks(three, longer, 1, 3).new == 2
    pool.release(table[:1].copy(), 0, 1, hashes)
    removed = pool.claim(table[:1])
    assert removed.tolist() == [longer[2].tolist(), longer[1].tolist(), longer[0].tolist()]
    assert pool.cached == 0


def test_a_hit_makes_blocks_young_again() -> None:
    pool, prefix, table, hashes = filled(4, 2)
    other = np.zeros(2, dtype=np.int32)
    pool.allocate(other)
    strange = chain([9, 9], 1, b"s")
    prefix.cache_full_blocks(other, strange, 0, 2)
    pool.release(table, 0, 2, hashes)
    pool.release(other, 0, 2, strange)
    pool.take(prefix.match(hashes, 2).blocks, table)
    pool.release(table, 0, 2, hashes)
    assert eviction_order(pool).tolist() == [3, 2, 1, 0]


def test_hashes_come_and_go_without_end() -> None:
    pool, prefix, table, _ = filled(4, 2)
    for turn in range(100):
        hashes = chain([turn, 7, 8, 9], 1, b"t")
        pool.release(table, 0, len(table), hashes)
        table = np.zeros(4, dtype=np.int32)
        pool.allocate(table)
        assert len(prefix.match(hashes, 4).blocks) == 0
        assert prefix.cache_full_blocks(table, hashes, 0, 4).new == 4
        assert prefix.match(hashes, 4).blocks.tolist() == table.tolist()
        check_pool(pool, np.ones(4, dtype=np.int32))


@pytest.mark.parametrize(
    ("damage", "law"),
    [
        (lambda p: p.meta.__setitem__((0, kernels.REFS), 2), "references are those of"),
        (lambda p: p.counts.__setitem__(kernels.FREE, 3), "count as free"),
        (lambda p: p.meta.__setitem__((5, kernels.NEXT), 7), "torn"),
        (lambda p: p.slots.__setitem__(slice(None), -1), "slots are filled"),
        (lambda p: p.keys.__setitem__((1, 0), 5), "a hash leads to its block"),
        (lambda p: p.meta.__setitem__((2, kernels.PARENT), 0), "says otherwise"),
        (lambda p: p.counts.__setitem__(kernels.CACHED, 9), "count as cached"),
    ],
)
def test_damage_is_found_and_named(damage: Any, law: str) -> None:
    pool, _, table, _ = filled(8, 3)
    references = np.bincount(table, minlength=8).astype(np.int32)
    check_pool(pool, references)
    damage(pool)
    with pytest.raises(IntegrityError, match=law):
        check_pool(pool, references)
