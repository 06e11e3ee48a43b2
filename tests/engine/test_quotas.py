"""Quotas of KV blocks by tenant: floors hold, ceilings go first, and nothing else changes."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from test_seam import RATES, Seam, configs
from test_tier_seam import TierSeam
from tests.lib.examples import examples

from pigou.config import EngineConfig, LaneConfig
from pigou.engine.plan import Rates
from pigou.request import KVQuota

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


class LaneSeam(Seam):
    @initialize(config=limited(), rates=st.sampled_from(RATES), data=st.data())
    def begin(self, config: EngineConfig, rates: Rates | None, data: Any) -> None:
        fields = {name: getattr(config, name) for name in config.__struct_fields__}
        fields["kv_quotas"] = {}
        super().begin(EngineConfig(**fields), rates, data)

    @rule(
        length=st.integers(1, 9), start=st.integers(0, 3), most=st.integers(1, 20),
        tenant=st.sampled_from(TENANTS), hold=st.booleans(),
    )  # fmt: skip
    def add_of_a_tenant(self, tenant: str, length: int, hold: bool, **fields: Any) -> None:
        self.add(length=length, tail=[2], remote=0, hold=hold, tenant=tenant, **fields)
