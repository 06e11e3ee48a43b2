"""Eviction x preemption x prefix hit x chunking x transfer x swap x abort: any order is right."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
from eviction_oracle import EvictionOracle, EvictionTierOracle
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from test_seam import RATES, Seam, configs
from test_tier_seam import TierSeam, make_tiers
from tests.lib.examples import examples

from pigou.config import EngineConfig, EvictionConfig
from pigou.engine.core import EngineCore
from pigou.engine.plan import Rates
from pigou.engine.sequence import SequenceState


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
    return EngineConfig(**(fields | {"eviction": eviction, "num_speculative_tokens": 0}))


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

    @rule(data=st.data())
    @precondition(lambda self: self.plan is None and self.decoding())
    def truncate(self, data: Any) -> None:
        """Take back tokens: all that may be are, at once; what is left is as before."""
        name, most = data.draw(st.sampled_from(self.decoding()))
        tokens = data.draw(st.integers(1, most))
        rows, size = self.core._state.rows, self.core.config.block_size
        row = self.core._state.sequences[name].row
        free, held = self.core.free_blocks, int(rows.blocks[row])
        left = int(rows.computed[row] - rows.dropped[row]) - tokens
        part = rows.tables[row, left // size : -(-left // size)]
        if left // size < rows.cached[row] and (self.core._state.pool.refs(part) > 1).any():
            with pytest.raises(ValueError, match="shared"):
                self.core.truncate(name, tokens)
            return
        effects = self.core.truncate(name, tokens)
        assert held - int(rows.blocks[row]) == held - -(-left // size)
        assert self.core.free_blocks >= free
        self.oracle.truncate(name, tokens)
        self.observe(effects)

    def decoding(self) -> list[tuple[str, int]]:
        """Requests that tokens can be taken back of, and how many at most."""
        rows, found = self.core._state.rows, []
        for row, name in self.oracle.rows.items():
            seq = rows.owner[row]
            if seq is None or seq.request.id != name or seq.state is not SequenceState.RUNNING:
                continue
            computed = int(rows.computed[row])
            most = min(int(rows.length[row]) - seq.request.prompt, computed - rows.compacted[row])
            if rows.length[row] - computed == 1 and most > 0:
                found.append((name, int(most)))
        return sorted(found)

    def lawful(self) -> None:
        super().lawful()
        self.conserved()

    def conserved(self) -> None:
        """What rows do without was given up, and the counts are those that the executor saw."""
        if not hasattr(self, "oracle"):
            return
        core = self.core
        assert 0 <= core.missing_entries <= core.stats.evicted_tokens - core.stats.recomputed_tokens
        assert core.price > 0


EvictionSeam.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40)
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


EvictionTierSeam.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestEvictionTierSeam = EvictionTierSeam.TestCase
del Seam, TierSeam
