"""On flat traces the classical policies hit and miss as libCacheSim's do, one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from eviction_names import policy

from pigou.kv.block import ROOT, Block
from pigou.kv.tier import Tier

lcs = pytest.importorskip("libcachesim")

ORACLES: dict[str, Any] = {
    "lru": lcs.LRU,
    "fifo": lcs.FIFO,
    "lfu": lcs.LFU,
    "arc": lcs.ARC,
    "sieve": lcs.Sieve,
    "s3fifo": lcs.S3FIFO,
}


def trace(seed: int, count: int = 4000) -> list[int]:
    """Zipf's draws with a scan in the middle and a change of what is popular."""
    generator = np.random.default_rng(seed)
    draws = np.minimum(generator.zipf(1.2, count), 600)
    draws[count // 3 : count // 3 + 200] = np.arange(1000, 1200)
    draws[count // 2 :] += 40
    return [int(each) for each in draws]


def ours(name: str, cap: int, ids: list[int]) -> list[bool]:
    tier = Tier(cap, policy(name, cap))
    found = []
    for now, each in enumerate(ids):
        key = each.to_bytes(16)
        held = tier.find([key], now) == 1
        found.append(held)
        if held:
            tier.hit([key], now)
        else:
            tier.admit([Block(key, ROOT, 0, 1)], now)
    tier.check()
    return found


def theirs(name: str, cap: int, ids: list[int]) -> list[bool]:
    cache = ORACLES[name](cap)
    found = []
    for now, each in enumerate(ids):
        request = lcs.Request()
        request.obj_id, request.obj_size, request.clock_time = each, 1, now
        found.append(bool(cache.get(request)))
    return found


# With 10, S3-FIFO's small queue would hold one block, and theirs takes in none as large as that.
@pytest.mark.parametrize("cap", [20, 50, 300])
@pytest.mark.parametrize("name", sorted(ORACLES))
@pytest.mark.parametrize("seed", [1, 2])
def test_hits_and_misses_are_the_oracles(name: str, cap: int, seed: int) -> None:
    ids = trace(seed)
    mine, expected = ours(name, cap, ids), theirs(name, cap, ids)
    first = next(
        (i for i, pair in enumerate(zip(mine, expected, strict=True)) if len({*pair}) > 1), -1
    )
    assert mine == expected, f"{sum(mine)} and {sum(expected)} hits, first at {first}"
    assert 0 < sum(mine) < len(ids)
