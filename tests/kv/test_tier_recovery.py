"""What a store still has at the start, beside what was put there since."""

from __future__ import annotations

from eviction_names import policy

from pigou.kv.block import ROOT, Block
from pigou.kv.offload import NOWHERE
from pigou.kv.tier import Tier
from pigou.kv.tiers import Tiers


def test_what_goes_for_a_block_that_was_found_is_not_counted_on() -> None:
    tier = Tier(20, policy("lru", 20))
    tiers = Tiers([tier], 10)
    since, before = Block(b"since".zfill(16), ROOT, 0, 10), Block(b"before".zfill(16), ROOT, 0, 10)
    tier.admit([since], 1)
    tier.admit([Block(b"last".zfill(16), ROOT, 0, 10)], 2)
    tiers.recover(0, [before, since], 3)
    gone = [key for move in tiers.drain() if move.target == NOWHERE for key in move.keys]
    assert gone == [since.key]
    assert not {block.key for block in tier.blocks()} & set(gone)
