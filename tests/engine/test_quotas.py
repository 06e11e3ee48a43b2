"""Quotas of KV blocks by tenant: floors hold, ceilings go first, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from test_seam import RATES, Seam, configs
from test_tier_seam import TierSeam
from tests.engine.core_oracle import step
from tests.lib.examples import examples

from pigou.config import ConfigError, EngineConfig, EvictionConfig, KVQuota, LaneConfig
from pigou.engine.core import EngineCore
from pigou.engine.plan import Rates, Result
from pigou.engine.quotas import Accounts
from pigou.kv.block_pool import CEILING, FLOOR, HELD, NEXT, OWNER, REFS, BlockPool, protected
from pigou.kv.block_pool_checks import check_pool
from pigou.kv.hashing import chain
from pigou.kv.prefix_cache import PrefixCache
from pigou.request import Request

TENANTS = ["", "a", "b", "c"]


@st.composite
def quotas(draw: st.DrawFn) -> dict[str, KVQuota]:
    found = {}
    left = 1.0
    for tenant in draw(st.lists(st.sampled_from(TENANTS), unique=True, min_size=1)):
        floor = draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]))
        floor = min(floor, left)
        left -= floor
        ceiling = draw(st.sampled_from([0.0, 0.3, 0.6, 1.0]))
        found[tenant] = KVQuota(floor=floor, ceiling=max(floor, ceiling))
    if draw(st.booleans()):
        found["*"] = KVQuota(ceiling=draw(st.sampled_from([0.0, 0.4])))
    return found


@st.composite
def limited(draw: st.DrawFn, caching: bool | None = None) -> EngineConfig:
    base = draw(configs())
    fields = {name: getattr(base, name) for name in base.__struct_fields__}
    fields["kv_quotas"] = draw(st.one_of(quotas(), st.just({})))
    if caching is not None:
        fields["prefix_caching"] = caching
    if base.max_seqs > 1 and draw(st.booleans()):
        fields["lane"] = LaneConfig(min_prompt=6, tokens=1)
    return EngineConfig(**fields)


class QuotaSeam(Seam):
    """The engine's seam, with tenants whose quotas change."""

    @initialize(config=limited(), rates=st.sampled_from(RATES), data=st.data())
    def begin(self, config: EngineConfig, rates: Rates | None, data: Any) -> None:
        super().begin(config, rates, data)

    @rule(
        length=st.integers(1, 9), start=st.integers(0, 3), most=st.integers(1, 20),
        tenant=st.sampled_from(TENANTS), hold=st.booleans(),
    )  # fmt: skip
    def add_of_a_tenant(self, tenant: str, length: int, hold: bool, **fields: Any) -> None:
        self.add(length=length, tail=[2], remote=0, hold=hold, tenant=tenant, **fields)

    @rule(given=quotas())
    def set_quotas(self, given: dict[str, KVQuota]) -> None:
        self.core.set_quotas(given)

    def lawful(self) -> None:
        super().lawful()
        if hasattr(self, "core"):
            assert sum(self.core.tenant_blocks.values()) <= self.core.config.blocks


QuotaSeam.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=40)
TestQuotaSeam = QuotaSeam.TestCase


class QuotaTierSeam(QuotaSeam, TierSeam):
    """Quotas x tiers."""

    @initialize(config=limited(caching=True), rates=st.sampled_from(RATES), data=st.data())
    def begin(self, config: EngineConfig, rates: Rates | None, data: Any) -> None:
        TierSeam.begin(self, config, rates, data)


QuotaTierSeam.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestQuotaTierSeam = QuotaTierSeam.TestCase

FLOOD = {"victim": KVQuota(floor=0.5), "*": KVQuota(ceiling=0.5)}


def engine(given: dict[str, KVQuota], **fields: Any) -> EngineCore:
    base: dict[str, Any] = {
        "blocks": 32, "block_size": 1, "max_seqs": 8, "max_batched_tokens": 64, "headroom": 0,
        "max_model_len": 64, "kv_quotas": given,
    }  # fmt: skip
    return EngineCore(EngineConfig(**(base | fields)))


def ask(core: EngineCore, name: str, tenant: str, prompt: int, most: int = 1) -> Request:
    """Queue a request with a prompt of its tenant and name's first letter."""
    hashes = chain([ord(name[0])] * prompt, 1, tenant.encode())
    request = Request(name, prompt, most, hashes, tenant=tenant)
    core.add(request)
    return request


def serve(core: EngineCore, name: str, tenant: str, prompt: int, most: int = 1) -> int:
    """Serve one request; return the tokens that it hit."""
    ask(core, name, tenant, prompt, most)
    before = core.stats.hit_tokens
    while name in core:
        step(core)
    return core.stats.hit_tokens - before


def flooded(given: dict[str, KVQuota]) -> int:
    """Return the victim's hits of 12 tokens after a flood of unique prompts."""
    core = engine(given)
    serve(core, "v0", "victim", 12)
    for number in range(12):
        serve(core, f"{chr(97 + number)}{number}", "flood", 15)
    return serve(core, "v1", "victim", 12)


def test_a_flood_leaves_what_is_within_a_floor() -> None:
    assert flooded({}) == 0
    assert flooded(FLOOD) == 11  # all but the last token, which is computed again


def test_what_a_tenant_leaves_of_its_floor_serves_others() -> None:
    core = engine({"absent": KVQuota(floor=0.5)})
    serve(core, "a", "other", 30)
    assert core.tenant_blocks["*"] == 30
    assert serve(core, "b", "absent", 16) == 0
    assert core.tenant_blocks["absent"] == 16


def test_who_is_above_its_ceiling_is_evicted_first_whoever_was_used_last() -> None:
    core = engine({"a": KVQuota(ceiling=0.25), "b": KVQuota()})
    serve(core, "b", "b", 12)
    serve(core, "a", "a", 16)
    serve(core, "c", "b", 10)
    assert core.tenant_blocks == {"*": 0, "a": 10, "b": 22}
    assert serve(core, "b2", "b", 12) == 11


def test_a_tenant_above_its_ceiling_waits_for_others() -> None:
    core = engine({"a": KVQuota(ceiling=0.25), "b": KVQuota()}, max_seqs=2)
    ask(core, "a0", "a", 10, 20)
    step(core)
    ask(core, "z1", "a", 10, 2)
    ask(core, "b1", "b", 10, 2)
    assert [started.request for started in step(core).started] == ["b1"]


def test_a_tenant_within_its_floor_overtakes_who_waits_for_blocks() -> None:
    core = engine({"b": KVQuota(floor=0.25)})
    serve(core, "b", "b", 8)
    ask(core, "a0", "a", 20, 4)
    step(core)
    ask(core, "c1", "a", 20, 4)  # 12 blocks are free, 8 of them the floor's
    ask(core, "b1", "b", 8, 1)
    assert [started.request for started in step(core).started] == ["b1"]


def test_a_floor_is_taken_back_from_who_runs_on_it() -> None:
    core = engine({"b": KVQuota(floor=0.5)})
    for name in ("a0", "c0"):
        ask(core, name, "a", 14, 18)
    step(core)
    ask(core, "b0", "b", 10, 2)
    preempted = [name for _ in range(4) for name in step(core).preempted]
    assert preempted == ["c0"]  # the last of the tenant above its floor
    assert core.tenant_blocks["b"] >= 10


def test_the_tenant_most_above_its_ceiling_is_preempted_for_growth() -> None:
    core = engine({"a": KVQuota(ceiling=0.25), "b": KVQuota(ceiling=0.9)})
    ask(core, "a0", "a", 15, 18)
    step(core)
    ask(core, "b0", "b", 15, 18)
    preempted = [name for _ in range(6) for name in step(core).preempted]
    assert preempted == ["a0"]  # b0 came last


def test_one_sequence_alone_takes_what_floors_keep_so_that_it_ends() -> None:
    core = engine({"b": KVQuota(floor=1.0)})
    serve(core, "b", "b", 30)
    assert serve(core, "a", "a", 20, 10) == 0


def test_who_takes_over_an_account_does_not_wait_behind_its_former_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pigou.kv.quotas.MAX_ACCOUNTS", 3)  # the shared one, and two more
    core = engine({"*": KVQuota()}, prefix_caching=False)
    ask(core, "r", "running", 20, 12)
    ask(core, "s", "short", 2, 1)
    plan = core.schedule(0)
    core.set_quotas({"b": KVQuota(floor=0.5), "*": KVQuota()})  # all accounts hold blocks
    core.apply(plan, Result(steps=plan.repeat))
    ask(core, "a", "a", 20, 1)
    step(core)  # it takes the account that the short one left, and does not fit
    ask(core, "b", "b", 6, 1)
    plan = step(core)
    assert [started.request for started in plan.started] == ["b"]
    assert plan.preempted == []


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"a": KVQuota(floor=0.6), "b": KVQuota(floor=0.6)}, "floors are 1.2 together"),
        ({"a": KVQuota(floor=0.5, ceiling=0.2)}, "a floor up to the ceiling"),
        ({"*": KVQuota(floor=0.1)}, "named tenants"),
    ],
)
def test_quotas_that_cannot_hold_are_refused(given: dict[str, KVQuota], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        engine(given)
    with pytest.raises(ConfigError, match="kv_quotas and eviction"):
        engine({"a": KVQuota()}, eviction=EvictionConfig())


def test_quotas_change_no_greedy_token_and_no_event_where_they_do_not_bind() -> None:
    def history(given: dict[str, KVQuota]) -> list[Any]:
        core, seen = engine(given, max_repeat=4), []
        for number in range(6):
            ask(core, f"{'ab'[number % 2]}{number}", "ab"[number % 2], 4 + number, 6)
        while core.running or core.waiting:
            plan = core.schedule(0)
            effects = core.apply(plan, Result(steps=plan.repeat))
            seen.append((plan.rows.tolist(), plan.counts.tolist(), plan.preempted, effects.freed))
        return seen

    assert history({}) == history({"a": KVQuota(), "*": KVQuota()})


class Evictions(RuleBasedStateMachine):
    """Whoever's block goes next, goes by the law; nobody loses what its floor keeps."""

    @initialize(blocks=st.integers(4, 16), given=quotas())
    def begin(self, blocks: int, given: dict[str, KVQuota]) -> None:
        self.pool = BlockPool(blocks)
        self.prefix = PrefixCache(self.pool)
        self.accounts = Accounts(self.pool)
        self.accounts.set(given)
        self.rows: list[tuple[np.ndarray, np.ndarray]] = []

    @rule(tenant=st.sampled_from(TENANTS), length=st.integers(1, 6), start=st.integers(0, 3))
    def admit(self, tenant: str, length: int, start: int) -> None:
        own = self.accounts.row(tenant)
        hashes = chain([start] * length, 1, b"shared")  # tenants extend one another's chains
        hits = self.prefix.match(hashes, length)
        table = np.zeros(length, dtype=np.int32)
        if length - len(hits.blocks) > self.pool.available(own) - hits.idle:
            return
        count = len(hits.blocks)
        self.pool.take(hits.blocks, table[:count])
        for i in range(count, length):
            self.allocate(table[i : i + 1], own)
        self.prefix.cache_full_blocks(table, hashes, count, length)
        self.rows.append((table, hashes))

    def allocate(self, out: np.ndarray, own: int) -> None:
        meta = self.pool.meta.copy()
        main = self.pool.nobody
        self.pool.allocate(out, own)
        after, owner = self.pool.meta, meta[out[0], OWNER]
        if meta[main, NEXT] != main:
            assert owner == main
            return
        idle = [a for a in range(meta[main, OWNER], main) if meta[a, NEXT] != a]
        over = max(meta[a, HELD] - meta[a, CEILING] for a in idle)
        above = [a for a in idle if meta[a, HELD] > meta[a, FLOOR]]
        lost = [a for a in range(meta[main, OWNER], main) if after[a, HELD] < meta[a, HELD]]
        for account in lost:  # a block may be handed over before another one goes
            assert account == own or meta[account, HELD] > meta[account, FLOOR] or not above
            assert over <= 0 or meta[account, HELD] > meta[account, CEILING]

    @rule(data=st.data())
    @precondition(lambda self: self.rows)
    def release(self, data: Any) -> None:
        table, hashes = self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1)))
        self.pool.release(table, 0, len(table), hashes, True)

    @rule(given=quotas())
    def set_quotas(self, given: dict[str, KVQuota]) -> None:
        self.accounts.set(given)

    @rule(count=st.integers(0, 16))
    def peek(self, count: int) -> None:
        free = self.pool.free - protected(self.pool.meta, self.pool.nobody)
        seen = self.pool.peek(min(count, free))
        assert len(set(seen.tolist())) == len(seen)
        assert (self.pool.meta[seen, REFS] == 0).all()

    @invariant()
    def lawful(self) -> None:
        if hasattr(self, "pool"):
            tables = [table for table, _ in self.rows] or [np.empty(0, dtype=np.int32)]
            references = np.bincount(np.concatenate(tables), minlength=self.pool.blocks)
            check_pool(self.pool, references.astype(np.int32))
            assert sum(self.accounts.held().values()) <= self.pool.blocks


Evictions.TestCase.settings = settings(max_examples=examples(80), stateful_step_count=40)
TestEvictions = Evictions.TestCase
