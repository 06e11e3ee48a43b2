"""Eviction x preemption x prefix hit x chunking x transfer x swap x abort: any order is right."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from eviction_oracle import EvictionOracle, EvictionTierOracle
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from test_seam import RATES, Seam, configs
from test_tier_seam import TierSeam, make_tiers

from pigou.config import EngineConfig, EvictionConfig
from pigou.engine.core import EngineCore
from pigou.engine.preemption import Rates


@st.composite
def evicting(draw: st.DrawFn, caching: bool | None = None) -> EngineConfig:
    base = draw(configs())
    sinks, recent = draw(st.integers(0, 2)), draw(st.integers(1, 3))
    eviction = EvictionConfig(
        policy=draw(st.sampled_from(["pigou", "pigou", "paper"])),
        sinks=sinks,
        recent=recent,
        least=sinks + recent + draw(st.integers(0, 3)),
        interval=base.block_size * draw(st.integers(1, 4)),
        ceiling=draw(st.sampled_from([0.5, float("inf"), float("inf")])),
        slack=draw(st.sampled_from([0.0, 0.25, 1.0])),
        rate=draw(st.sampled_from([0.1, 10.0])),
        floors=draw(st.sampled_from([{}, {}, {"a": 4}])),
    )
    fields = {name: getattr(base, name) for name in base.__struct_fields__}
    if caching is not None:
        fields["prefix_caching"] = caching
    return EngineConfig(**(fields | {"eviction": eviction}))


class EvictionSeam(Seam):
    """The engine's seam, where rows give up entries in place of their row."""

    @initialize(config=evicting(), rates=st.sampled_from(RATES), data=st.data())
    def begin(self, config: EngineConfig, rates: Rates | None, data: Any) -> None:
        self.core = EngineCore(config)
        self.core.rates = rates
        self.oracle: EvictionOracle = EvictionOracle(
            self.core,
            ends=data.draw(st.booleans()),
            overrun=data.draw(st.sampled_from([0, 0, 3])),
            hashed=data.draw(st.booleans()),
            rng=random.Random(data.draw(st.integers(0, 1 << 20))),
            mute=data.draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
        )
        self.plan = None
        self.now = 0
        self.number = 0
        self.flying = set()

    @rule(length=st.integers(1, 6), start=st.integers(0, 1), most=st.integers(5, 30))
    def add_of_a_tenant(self, start: int, length: int, most: int) -> None:
        self.add(start=start, length=length, tail=[], most=most, remote=0, tenant="a")

    def lawful(self) -> None:
        super().lawful()
        self.conserved()

    def conserved(self) -> None:
        """What rows do without was given up, and the counts are those that the executor saw."""
        if not hasattr(self, "oracle"):
            return
        core = self.core
        assert 0 <= core.missing_entries <= core.entries_given - core.entries_revived
        assert core.price > 0


EvictionSeam.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestEvictionSeam = EvictionSeam.TestCase


class EvictionTierSeam(EvictionSeam, TierSeam):
    """With tiers below, to which rows offer their blocks while they are whole."""

    @initialize(config=evicting(caching=True), rates=st.sampled_from(RATES), data=st.data())
    def begin(self, config: EngineConfig, rates: Rates | None, data: Any) -> None:
        caps = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=2))
        self.core = EngineCore(config, tiers=make_tiers(caps, 1, data.draw(st.integers(1, 9))))
        self.core.rates = rates
        self.oracle = EvictionTierOracle(
            self.core,
            ends=data.draw(st.booleans()),
            hashed=True,
            rng=random.Random(data.draw(st.integers(0, 1 << 20))),
            stores=[{} for _ in caps],
            links=[deque() for _ in caps],
            most=[cap + 1 for cap in caps],
        )
        self.plan = None
        self.now = 0
        self.number = 0
        self.flying = set()


EvictionTierSeam.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestEvictionTierSeam = EvictionTierSeam.TestCase
del Seam, TierSeam
