"""What tiers tell their policies: what a block is worth, and what is offered, once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from eviction_names import policy

from pigou.kv.block import Block
from pigou.kv.offload import RecomputeCost
from pigou.kv.tier import Tier
from pigou.kv.tier_eviction.policy import EvictionPolicy, TierSetting
from pigou.kv.tiers import Tiers, TierSpeed
from pigou.request import NEVER


def test_policies_value_blocks_by_what_was_measured() -> None:
    kinds = [policy("price", 1000), policy("lru", 1000)]
    tiers = Tiers(
        [Tier(1000, kind) for kind in kinds], 10, speeds=[TierSpeed(0.0, 0.02), TierSpeed()]
    )
    tiers.learn(RecomputeCost(base=0.5, slope=0.1))
    assert kinds[0].setting.recompute_cost == RecomputeCost(0.5, 0.1, 0.002)  # type: ignore[attr-defined]
    assert kinds[1].setting.recompute_cost == RecomputeCost(0.5, 0.1)  # type: ignore[attr-defined]
    tiers.learn(
        RecomputeCost(base=0.6)
    )  # a little more: it counts for restores, not for what is held
    assert tiers.recompute_cost == RecomputeCost(0.6)
    assert kinds[1].setting.recompute_cost == RecomputeCost(0.5, 0.1)  # type: ignore[attr-defined]
    tiers.learn(RecomputeCost(base=1.0))
    assert kinds[1].setting.recompute_cost == RecomputeCost(1.0)  # type: ignore[attr-defined]


class Refuses(EvictionPolicy):
    """Takes nothing, and counts what it was offered."""

    def __init__(self) -> None:
        super().__init__(TierSetting(1000))
        self.offered = 0

    def admits(self, blocks: Sequence[Block], now: int) -> list[bool]:
        self.offered += len(blocks)
        return [False] * len(blocks)


def test_a_chain_that_goes_down_is_offered_once() -> None:
    below = Refuses()
    first = Tier(50 * 10, policy("lru", 50 * 10))
    tiers = Tiers([first, Tier(1000, below)], 10, [50, 0])  # type: ignore[arg-type]
    for start in (1, 2):
        hashes = np.arange(1, 101, dtype=np.uint64).reshape(50, 2) * np.uint64(1000) ** start
        tiers.use(hashes, NEVER, start)
        tiers.offer(hashes, np.arange(50, dtype=np.int32), NEVER, start, 50)
        for move in tiers.drain():
            if move.number >= 0:
                tiers.on_transfer_done(move.number, [True] * len(move.keys), start)
    assert below.offered == 50 + 50 + 50  # as copies when they arrived, twice; then given up
