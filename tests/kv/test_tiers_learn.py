"""Tiers tell their policies what a block is worth, when that has changed."""

from __future__ import annotations

from eviction_names import policy

from pigou.kv.tier import Tier
from pigou.kv.tiers import Speed, Tiers
from pigou.kv.worth import Worth


def test_policies_value_blocks_by_what_was_measured() -> None:
    kinds = [policy("price", 1000), policy("lru", 1000)]
    tiers = Tiers([Tier(1000, kind) for kind in kinds], 10, speeds=[Speed(0.0, 0.02), Speed()])
    tiers.learn(Worth(base=0.5, slope=0.1))
    assert kinds[0].setting.worth == Worth(0.5, 0.1, 0.002)  # type: ignore[attr-defined]
    assert kinds[1].setting.worth == Worth(0.5, 0.1)  # type: ignore[attr-defined]
    tiers.learn(Worth(base=0.6))  # a little more: it counts for restores, not for what is held
    assert tiers.worth == Worth(0.6)
    assert kinds[1].setting.worth == Worth(0.5, 0.1)  # type: ignore[attr-defined]
    tiers.learn(Worth(base=1.0))
    assert kinds[1].setting.worth == Worth(1.0)  # type: ignore[attr-defined]
