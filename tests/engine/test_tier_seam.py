"""Tiers x preemption x prefix hit x chunking x transfer x swap x abort: any order is right."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from test_seam import RATES, Seam, configs
from tests.lib.examples import examples
from tier_oracle import TierOracle

from pigou.config import EngineConfig
from pigou.engine.core import EngineCore
from pigou.engine.plan import Rates, Result
from pigou.kv.block import ROOT, Block
from pigou.kv.offload import RecomputeCost, TierSpeed, blocks_worth_loading
from pigou.kv.tier import Tier
from pigou.kv.tier_eviction.policy import TierSetting
from pigou.kv.tier_eviction.policy import load as load_policy
from pigou.kv.tiers import Tiers
from pigou.request import NEVER, Request

BYTES = 10
#: One that takes everything at once, and one that would rather wait.
POLICIES = ["lru", "price"]


def make_tiers(caps: list[int], staging: int, copies: int = 2, policy: str = "lru") -> Tiers:
    tiers = [Tier(cap * BYTES, load_policy(policy, TierSetting(cap * BYTES))) for cap in caps]
    return Tiers(tiers, BYTES, [staging] * len(caps), copies=copies)


def leftovers(data: Any, oracle: TierOracle, tier: int) -> list[Block]:
    """Put chains in a store, with holes; returns what is found there, true or not."""
    found: list[Block] = []
    for _ in range(data.draw(st.integers(0, 2))):
        tokens = [data.draw(st.integers(0, 1))] * data.draw(st.integers(1, 9))
        found += oracle.leave(tier, tokens, data.draw(st.sampled_from([NEVER, NEVER, 3])))
    for gone in data.draw(st.lists(st.integers(0, 20), max_size=2)):
        if gone < len(found):
            oracle.stores[tier].pop(found.pop(gone).key, None)
    told = [block for block in found if block.key in oracle.stores[tier]]
    for at, fault in data.draw(st.lists(st.tuples(st.integers(0, 9), FAULTS), max_size=3)):
        if at < len(told):
            told.append(told[at])  # twice
            told[at] = told[at]._replace(**fault)
    return told


#: What the record of a block may say that is not so.
FAULTS = st.sampled_from(
    [{}, {"parent": ROOT}, {"parent": bytes(range(16))}, {"depth": 0}, {"depth": 7}]
)


def salt(expiry: int) -> str:
    return f"tenure1:{'0' * 64}:{max(expiry, 1)}"


class TierSeam(Seam):
    """The engine's seam, with tiers of a few blocks and moves that take their time."""

    @initialize(config=configs(), rates=st.sampled_from(RATES), data=st.data())
    def begin(self, config: EngineConfig, rates: Rates | None, data: Any) -> None:
        caps = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
        staging = data.draw(st.sampled_from([0, 1, 3]))
        config = EngineConfig(**{f: getattr(config, f) for f in config.__struct_fields__
                                 if f != "prefix_caching"})  # fmt: skip
        self.core = EngineCore(
            config,
            tiers=make_tiers(
                caps, staging, data.draw(st.integers(1, 9)), data.draw(st.sampled_from(POLICIES))
            ),
        )
        self.core.rates = rates
        self.core._state.offload.returns.min_pauses = 1.0
        self.oracle: TierOracle = TierOracle(
            self.core,
            ends=data.draw(st.booleans()),
            overrun=data.draw(st.sampled_from([0, 0, 3])),
            hashed=data.draw(st.booleans()),
            stores=[{} for _ in caps],
            links=[deque() for _ in caps],
            most=[cap + staging for cap in caps],
        )
        for tier in range(len(caps)):
            self.oracle.found[tier] = leftovers(data, self.oracle, tier)
        self.plan = None
        self.now = 0
        self.number = 0
        self.flying = set()

    @rule(length=st.integers(1, 9), start=st.integers(0, 1), lives=st.integers(0, 6))
    def add_for_a_while(self, start: int, length: int, lives: int) -> None:
        """Add a request of a tenure that ends soon."""
        until = self.now + lives
        fields = {"expiry": until, "salt": salt(until)}
        self.add(start=start, length=length, tail=[], most=3, remote=0, **fields)

    @rule(lives=st.integers(0, 6))
    def end_tenure(self, lives: int) -> None:
        self.observe(self.core.clear_cache([salt(self.now + lives)]))

    @rule(by=st.integers(1, 4))
    @precondition(lambda self: self.plan is None)
    def tick(self, by: int) -> None:
        self.now += by

    @rule(data=st.data())
    @precondition(lambda self: self.oracle.found)
    def recover(self, data: Any) -> None:
        self.oracle.recover(data.draw(st.sampled_from(sorted(self.oracle.found))))

    @rule(data=st.data(), known=st.booleans())
    def fall_or_rise(self, data: Any, known: bool) -> None:
        """Let a store fail, or work again; whether the engine has heard of it."""
        tier = data.draw(st.integers(0, len(self.oracle.stores) - 1))
        self.oracle.down ^= {tier}
        if known:
            down = tier in self.oracle.down
            self.oracle.tiers.speeds[tier] = TierSpeed(math.inf, math.inf) if down else TierSpeed()

    @rule()
    @precondition(lambda self: any(self.oracle.links))
    def clear_while_blocks_move(self) -> None:
        self.observe(self.core.clear_cache())
        assert not any(len(tier) for tier in self.oracle.tiers.tiers)

    @rule(data=st.data())
    @precondition(lambda self: self.oracle.loads)
    def answer(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.oracle.loads)))
        load = self.oracle.loads[name]
        if not len(load.tiers):
            size = self.core.config.block_size
            most = len(load.blocks) * size
            self.observe(self.oracle.answer(name, data.draw(st.sampled_from([0, most, most // 2]))))
        else:
            missing = data.draw(st.sampled_from([0, 1, 99, 99, 99]))
            self.observe(self.oracle.restore(name, missing))

    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]))
    @precondition(lambda self: any(self.oracle.links))
    def move(self, data: Any, fails: bool) -> None:
        ready = [tier for tier, link in enumerate(self.oracle.links) if link]
        self.observe(self.oracle.make(data.draw(st.sampled_from(ready)), fails))

    @rule(millis=st.sampled_from([0, 1, 20, 300]))
    def recall(self, millis: int) -> None:
        """Time passes; what sessions need that are expected back is brought up."""
        self.now += millis * 1_000_000
        self.observe(self.core.recall(self.now))

    @rule()
    @precondition(lambda self: self.plan is None and not self.flying)
    def idle(self) -> None:
        """Nobody is there: what is left to be moved is planned all the same."""
        plan = self.core.schedule(self.now)
        assert not plan
        self.oracle.execute(plan)

    def settle(self) -> None:
        """End all loads and moves."""
        while any(self.oracle.links) or self.oracle.loads:
            for name in list(self.oracle.loads):
                load = self.oracle.loads[name]
                most = len(load.blocks) * self.core.config.block_size
                effects = self.oracle.restore(name, 99) if len(load.tiers) else None
                self.observe(effects or self.oracle.answer(name, most))
            for tier, link in enumerate(self.oracle.links):
                while link:
                    self.observe(self.oracle.make(tier, False))
            if self.plan is None and not self.flying:
                self.idle()

    def teardown(self) -> None:
        """Then nothing void is left in any store; and once all is cleared, nothing at all."""
        super().teardown()
        if not hasattr(self, "oracle"):
            return
        for tier in list(self.oracle.found):
            self.oracle.recover(tier)
        self.now += 1000
        for end in (None, self.core.clear_cache):
            if end is not None:
                self.observe(end())
            self.idle()
            self.settle()
            self.oracle.check()
            self.oracle.check_over()
        assert not any(self.oracle.stores)


TierSeam.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestTierSeam = TierSeam.TestCase


def test_what_a_tier_holds_is_restored_in_place_of_computed() -> None:
    core = EngineCore(
        EngineConfig(blocks=8, block_size=2, max_model_len=64), tiers=make_tiers([9], 0)
    )
    oracle = TierOracle(core, ends=False, stores=[{}], links=[deque()], most=[9])
    tokens = [1, 2, 3, 1, 2, 3, 1]

    def run(name: str) -> int:
        oracle.add(oracle.request(name, tokens, 1), tokens)
        while name in core:
            plan = core.schedule(0)
            result = oracle.execute(plan)
            if plan:
                effects = core.apply(plan, result)
                oracle.observe(effects)
                cached = effects.finished[0].cached if effects.finished else 0
            for load in list(oracle.loads):
                oracle.observe(oracle.restore(load, 99))
        oracle.execute(core.schedule(0))
        while oracle.links[0]:
            oracle.observe(oracle.make(0, False))
            oracle.execute(core.schedule(0))
        oracle.check()
        return cached

    assert run("first") == 0
    core._state.prefix.clear()  # as if others had taken the device's blocks
    assert run("second") == 6


def test_a_read_that_takes_longer_than_computing_is_not_made() -> None:
    worth = RecomputeCost(base=1.0, slope=0.5)
    speeds = [TierSpeed(0.0, 0.9), TierSpeed(2.5, 0.5)]
    assert blocks_worth_loading([0, 0], 0, speeds, worth) == 2
    assert blocks_worth_loading([1], 0, speeds, worth) == 0  # 1.0 saved, 3.0 spent
    assert blocks_worth_loading([1, 1, 1], 0, speeds, worth) == 3  # 4.5 saved, 4.0 spent
    assert blocks_worth_loading([0, 1], 0, speeds, worth) == 1
    assert blocks_worth_loading([1, 0], 0, speeds, None) == 2


def test_a_session_that_is_expected_back_finds_its_blocks_on_the_device() -> None:
    tiers = make_tiers([99], 0, copies=8)
    core = EngineCore(EngineConfig(blocks=16, block_size=2, max_model_len=64), tiers=tiers)
    core._state.offload.returns.min_pauses = 2.0
    oracle = TierOracle(core, ends=False, stores=[{}], links=[deque()], most=[99])
    now = 0

    def moves() -> None:
        oracle.execute(core.schedule(now))
        while oracle.links[0] or oracle.loads:
            for load in list(oracle.loads):
                oracle.observe(oracle.restore(load, 99))
            while oracle.links[0]:
                oracle.observe(oracle.make(0, False))
            oracle.execute(core.schedule(now))
        oracle.check()

    def turn(name: str, tokens: list[int]) -> int:
        oracle.add(oracle.request(name, tokens, 1, arrival=now), tokens)
        hits = core.stats.hit_tokens
        while name in core:
            plan = core.schedule(now)
            result = oracle.execute(plan)
            if plan:
                oracle.observe(core.apply(plan, result))
            for load in list(oracle.loads):
                oracle.observe(oracle.restore(load, 99))
        moves()
        return core.stats.hit_tokens - hits

    tokens = [1, 2, 3, 1, 2, 3, 1, 2]
    for number in range(4):  # the session pauses for a second each time
        turn(f"turn-{number}", tokens)
        tokens = [*tokens, 3, 1]
        turn(f"other-{number}", [5 + number] * 24)  # takes most of the device
        now += 900_000_000
        due = core.next_return
        if due is not None and due <= now:
            oracle.observe(core.recall(now))
            moves()
        now += 100_000_000
    assert turn("last", tokens) == 14  # nothing was restored: it lay on the device


def test_a_turn_that_ends_by_its_text_is_one_that_may_return() -> None:
    for turn_ended in (False, True):
        core = EngineCore(EngineConfig(blocks=64), tiers=make_tiers([99], 0, copies=8))
        hashes = np.arange(1, 9, dtype=np.uint64).reshape(4, 2)
        core.add(Request("a", prompt=64, max_tokens=9, hashes=hashes))
        core.apply(plan := core.schedule(0), Result(steps=plan.repeat))
        core.abort("a", turn_ended=turn_ended)
        assert core._state.offload is not None
        assert core._state.offload.returns.away == turn_ended
