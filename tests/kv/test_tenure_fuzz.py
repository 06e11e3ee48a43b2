"""A million pairs of tenures: equal digests, salts, keys and hits exactly where all is equal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
from eviction_names import policy
from tests.kv.tenure_pairs import Fields, canonical, pairs
from tests.lib.block_records import chain_records

from pigou.config import EngineConfig
from pigou.engine.core import EngineCore
from pigou.engine.plan import Result
from pigou.kv.block import chain_of, keys_of
from pigou.kv.block_pool import BlockPool
from pigou.kv.hashing import chain
from pigou.kv.prefix_cache import PrefixCache
from pigou.kv.tenure import Tenure, Tenured
from pigou.kv.tier import Tier
from pigou.request import BlockHashes, Ints, Request
from pigou.runtime.stores.bucket_store import BucketLocation, BucketStore
from pigou.runtime.stores.disk_store import DiskStore
from pigou.runtime.stores.host_store import HostStore
from pigou.runtime.stores.store import Store

slow = pytest.mark.slow
TOKENS = list(range(100, 108))
SIZE, BLOCKS = 4, 2
BYTES = 64
#: Tenures of the fuzz expire at 0 to 11 ns, far in the future, or never.
NOW = 11


def judge(found: Iterator[tuple[Fields, Fields]]) -> int:
    """Compare digests within each pair, and between all pairs; return how many were equal."""
    equal = 0
    seen: dict[bytes, tuple[object, ...]] = {}
    for one, two in found:
        first, second = Tenure(**one), Tenure(**two)
        digests = first.digest(), second.digest()
        whole = canonical(one), canonical(two)
        same = whole[0] == whole[1]
        assert (digests[0] == digests[1]) == same, (one, two)
        assert (first == second) == same, (one, two)
        equal += same
        for digest, what in zip(digests, whole, strict=True):
            assert seen.setdefault(digest, what) == what, what
    return equal


def test_digests_are_equal_exactly_where_tenures_are() -> None:
    count = 5_000
    assert 0.1 * count < judge(pairs(1, count)) < 0.6 * count


@slow
@pytest.mark.timeout(3600)
def test_digests_of_a_million_pairs_are_equal_exactly_where_tenures_are() -> None:
    found, equal = pairs(2, 1_000_000), 0
    for _ in range(20):  # the comparison between all pairs is kept within each part
        equal += judge(islice(found, 50_000))
    assert next(found, None) is None
    assert 100_000 < equal < 600_000


# --- hits in every tier ---------------------------------------------------------------------------


class Cache(Protocol):
    """Something that keeps the blocks of a sequence under a tenure."""

    def store(self, tenure: Tenure, hashes: BlockHashes) -> None: ...

    def hits(self, tenure: Tenure, hashes: BlockHashes, now: int) -> int:
        """Return how many leading blocks are found at a time."""
        ...


class Device:
    """G1 as the engine uses it: the expiry is looked at when a request is admitted."""

    def __init__(self, count: int) -> None:
        blocks = BLOCKS * count + BLOCKS
        config = EngineConfig(blocks=blocks, block_size=SIZE, max_model_len=64, max_seqs=1)
        self.core = EngineCore(config)
        self.number = 0

    def store(self, tenure: Tenure, hashes: BlockHashes) -> None:
        self.run(tenure.expiry, hashes, -1)

    def hits(self, tenure: Tenure, hashes: BlockHashes, now: int) -> int:
        # A prompt of another block more, so that a hit of all is one of whole blocks.
        return self.run(tenure.expiry, hashes, now, abort=True) // SIZE

    def run(self, expiry: int, hashes: BlockHashes, now: int, abort: bool = False) -> int:
        self.number += 1
        name = str(self.number)
        self.core.add(Request(name, SIZE * BLOCKS + 1, 1, hashes, expiry=expiry))
        plan = self.core.schedule(now)
        computed = plan.started[0].computed
        if abort:  # before anything is sealed
            self.core.abort(name)
        self.core.apply(plan, Result())
        return computed


class Prefix:
    """G1 alone: pool and prefix cache, which know no time."""

    def __init__(self, count: int) -> None:
        self.pool = BlockPool(BLOCKS * count)
        self.prefix = PrefixCache(self.pool)

    def store(self, tenure: Tenure, hashes: BlockHashes) -> None:
        if self.hits(tenure, hashes, 0) < BLOCKS:
            table = np.zeros(BLOCKS, dtype=np.int32)
            self.pool.allocate(table)
            self.prefix.cache_full_blocks(table, hashes, 0, BLOCKS)

    def hits(self, tenure: Tenure, hashes: BlockHashes, now: int) -> int:
        return len(self.prefix.match(hashes, BLOCKS).blocks)


class Decided:
    """A tier as `kv/tiers.py` decides on it."""

    def __init__(self, count: int) -> None:
        cap = BLOCKS * count
        self.tier = Tier(cap, policy("lru", cap))

    def store(self, tenure: Tenure, hashes: BlockHashes) -> None:
        self.tier.admit(chain_of(hashes, 1, tenure.expiry), -1)

    def hits(self, tenure: Tenure, hashes: BlockHashes, now: int) -> int:
        return self.tier.find(keys_of(hashes), now)


@dataclass
class Stored:
    """A store, whose records have the expiry, and which has a clock of its own."""

    store_: Store
    clock: list[int]
    rows: Ints = field(default_factory=lambda: np.arange(BLOCKS, dtype=np.int32))

    def store(self, tenure: Tenure, hashes: BlockHashes) -> None:
        self.clock[0] = -1
        entries = chain_records(hashes, tenure.digest(), tenure.expiry)
        self.store_.put(entries, np.zeros((BLOCKS, BYTES), dtype=np.uint8), self.rows)

    def hits(self, tenure: Tenure, hashes: BlockHashes, now: int) -> int:
        self.clock[0] = now
        out = np.zeros((BLOCKS, BYTES), dtype=np.uint8)
        return int(self.store_.get(hashes, out, self.rows).sum())


class Wrapped:
    """A cache above the engine."""

    def __init__(self) -> None:
        self.held: dict[bytes, Tenured[str]] = {}

    def store(self, tenure: Tenure, hashes: BlockHashes) -> None:
        sealed = Tenured.wrap("answer", tenure, b"question")
        self.held[sealed.key] = sealed

    def hits(self, tenure: Tenure, hashes: BlockHashes, now: int) -> int:
        found = self.held.get(tenure.key(b"question"))
        return BLOCKS if found is not None and found.open(tenure, now) else 0


def caches(count: int, folder: Path) -> dict[str, Cache]:
    clock = [0]
    arena = np.zeros((BLOCKS * count, BYTES), dtype=np.uint8)
    stores = {
        "host": HostStore(arena, BLOCKS * count, clock=lambda: clock[0]),
        "disk": DiskStore(folder / "disk", bytes(16), BYTES, 2**30, clock=lambda: clock[0]),
    }
    if count < 1000:  # an object a block
        place = BucketLocation((folder / "bucket").as_uri())
        stores["bucket"] = BucketStore(place, bytes(16), BYTES, 2**30, clock=lambda: clock[0])
    return {
        "device": Device(count), "prefix": Prefix(count), "tier": Decided(count),
        "answers": Wrapped(), **{name: Stored(store, clock) for name, store in stores.items()},
    }  # fmt: skip


def cross(count: int, seed: int, folder: Path) -> None:
    """Store under the first of each pair, look up under the second: all against all."""
    found = list(pairs(seed, count))
    every = caches(count, folder)
    held = {canonical(one) for one, _ in found}
    for one, _ in found:
        tenure = Tenure(**one)
        hashes = chain(TOKENS, SIZE, tenure.digest())
        for cache in every.values():
            cache.store(tenure, hashes)
    for now in (0, NOW):
        equal = 0
        for _, two in found:
            tenure = Tenure(**two)
            hashes = chain(TOKENS, SIZE, tenure.digest())
            there = canonical(two) in held
            equal += there
            for name, cache in every.items():
                alive = there and (name == "prefix" or not tenure.expired(now))
                assert cache.hits(tenure, hashes, now) == (BLOCKS if alive else 0), (name, two)
        assert 0.1 * count < equal < 0.7 * count
    every["device"].core.check_integrity()  # type: ignore[attr-defined]


def test_no_tier_hits_across_tenures_or_after_an_expiry(tmp_path: Path) -> None:
    cross(200, 3, tmp_path)


@slow
@pytest.mark.timeout(3600)
def test_no_tier_hits_across_twenty_thousand_pairs_of_tenures(tmp_path: Path) -> None:
    cross(20_000, 4, tmp_path)


def test_a_store_that_comes_back_keeps_expiries(tmp_path: Path) -> None:
    tenures = [Tenure(tenant="a", expiry=5), Tenure(tenant="b", expiry=50), Tenure(tenant="c")]
    for now, found in ((0, [2, 2, 2]), (7, [0, 2, 2]), (50, [0, 0, 2])):
        clock = [now]
        disk = DiskStore(tmp_path, bytes(16), BYTES, 2**20, clock=partial(clock.__getitem__, 0))
        stored = Stored(disk, clock)
        for tenure, hits in zip(tenures, found, strict=True):
            hashes = chain(TOKENS, SIZE, tenure.digest())
            if now == 0:
                stored.store(tenure, hashes)
            assert stored.hits(tenure, hashes, now) == hits, (tenure, now)
        disk.close()
