"""What sequences leave is copied to a full host tier when the device is about to hand it out."""

from __future__ import annotations

from collections import deque

from test_tier_seam import make_tiers
from tier_oracle import TierOracle

from pigou.config import EngineConfig
from pigou.engine.core import EngineCore
from pigou.request import SECOND


class Scene:
    """An engine of 32 blocks above a host tier, which makes its moves at once."""

    def __init__(self, room: int, policy: str = "price") -> None:
        config = EngineConfig(blocks=32, block_size=2, max_model_len=64, max_batched_tokens=64)
        self.core = EngineCore(config, tiers=make_tiers([room], 0, 16, policy))
        self.oracle = TierOracle(self.core, ends=False, stores=[{}], links=[deque()], most=[room])
        self.now = 0
        self.number = 0

    def run(self, first: int, blocks: int) -> int:
        """Run a prompt of so many blocks; return how many of its tokens were cached."""
        self.now += SECOND
        self.number += 1
        name, cached = str(self.number), 0
        tokens = [first, *range(100, 100 + 2 * blocks)]
        self.oracle.add(self.oracle.request(name, tokens, 1, arrival=self.now), tokens)
        while name in self.core:
            plan = self.core.schedule(self.now)
            result = self.oracle.execute(plan)
            if plan:
                effects = self.core.apply(plan, result)
                cached = effects.finished[0].cached if effects.finished else 0
                self.oracle.observe(effects)
            self.move()
        self.oracle.execute(self.core.schedule(self.now))
        self.move()
        self.oracle.check()
        return cached

    def move(self) -> None:
        for load in list(self.oracle.loads):
            self.oracle.observe(self.oracle.restore(load, 99))
        while self.oracle.links[0]:
            self.oracle.observe(self.oracle.make(0, False))

    def copied(self) -> int:
        return self.core.tiers.counts[0].stored if self.core.tiers else 0


def test_what_the_device_holds_is_copied_at_once_only_while_there_is_room() -> None:
    scene, eager = Scene(5), Scene(5, "lru")
    for each in (scene, eager):
        each.run(1, 4)
        assert each.copied() == 4
        each.run(2, 4)
    assert scene.copied() == 4
    assert eager.copied() == 8


def test_it_is_copied_before_the_device_hands_it_out() -> None:
    scene = Scene(5)
    scene.run(1, 4)
    scene.run(2, 4)
    for number in range(3, 9):  # more than the device holds
        scene.run(number, 4)
    assert scene.copied() > 4
    assert scene.core.stats.preemptions == 0


def test_two_tiers_hold_more_together_than_each_holds() -> None:
    found = {}
    for policy in ("price", "lru"):
        scene = Scene(24, policy)
        for _ in range(12):
            cached = [scene.run(number, 4) for number in range(1, 12)]  # 44 blocks, 56 there are
        found[policy] = sum(cached)
    assert found["lru"] == 0
    assert found["price"] > 11 * 8 / 2
