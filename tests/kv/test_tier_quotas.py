"""Shares of a tier's bytes by tenant: floors and ceilings hold, whoever writes, whatever goes."""

from __future__ import annotations

from typing import Any

import pytest
from eviction_names import KINDS, policy
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.config import KVQuota
from pigou.kv import quotas as kv_quotas
from pigou.kv.block import ROOT, Block
from pigou.kv.tier import Tier

TENANTS = ["", "a", "b", "c"]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "write", "read", "drop", "pin", "unpin", "restart"]),
        st.sampled_from(TENANTS), st.text("ab", min_size=1, max_size=5), st.booleans(),
    ),
    max_size=50,
)  # fmt: skip


@st.composite
def shares(draw: st.DrawFn) -> dict[str, KVQuota]:
    quotas, left = {}, 1.0
    for tenant in draw(st.lists(st.sampled_from(TENANTS), unique=True, min_size=1)):
        floor = min(draw(st.sampled_from([0.0, 0.2, 0.5, 1.0])), left)
        left -= floor
        ceiling = draw(st.sampled_from([0.0, 0.3, 0.6, 1.0]))
        quotas[tenant] = KVQuota(floor=floor, ceiling=max(floor, ceiling))
    if draw(st.booleans()):
        quotas["*"] = KVQuota(ceiling=draw(st.sampled_from([0.0, 0.4])))
    return quotas


def chain(tenant: str, path: str, shared: bool, size: int = 1) -> list[Block]:
    """Blocks of a prefix that tenants share or not."""
    seed = "s" if shared else f"{TENANTS.index(tenant)}"
    keys = [(seed + path[: i + 1]).encode().ljust(16, b".") for i in range(len(path))]
    return [
        Block(key, keys[i - 1] if i else ROOT, i, size, tenant=tenant) for i, key in enumerate(keys)
    ]


def held(tier: Tier) -> dict[str, int]:
    """Bytes by tenant, each block its first writer's."""
    sizes = dict.fromkeys(TENANTS, 0)
    for block in tier.blocks():
        sizes[block.tenant] += block.size
    return sizes


def bounds(tier: Tier, given: dict[str, KVQuota], tenant: str) -> tuple[int, int]:
    quota = given.get(tenant, given.get("*", KVQuota()))
    return int(quota.floor * tier.cap_bytes), int(quota.ceiling * tier.cap_bytes)


def write(tier: Tier, given: dict[str, KVQuota], blocks: list[Block], now: int) -> None:
    """Admit blocks of a tenant, and judge what went for them."""
    tenant, before = blocks[0].tenant, held(tier)
    _, evicted = tier.admit(blocks, now)
    after = held(tier)
    for other in TENANTS:
        if other != tenant:
            assert after[other] >= min(before[other], bounds(tier, given, other)[0])
    above = {one for one in TENANTS if before[one] > bounds(tier, given, one)[1]}
    lost = {block.tenant for block in evicted} - above - {tenant}
    if lost:  # to who stays within its ceiling
        assert after[tenant] <= bounds(tier, given, tenant)[1]
    for other in lost:  # all that those above their ceilings still have is in use
        for one in above:
            if after[one] > bounds(tier, given, one)[1]:
                entries = [tier.entry(block.key) for block in tier.blocks() if block.tenant == one]
                assert not any(entry is not None and entry.free for entry in entries), (one, other)


@pytest.mark.parametrize("name", ["lru", "price"])
@given(STEPS, st.integers(1, 12), st.integers(1, 2), st.booleans(), shares(), st.data())
@settings(max_examples=examples(120), deadline=None)
def test_floors_and_ceilings_hold_after_every_step(
    name: str, steps: list[Any], cap: int, size: int, rooted: bool, given: dict[str, KVQuota],
    data: Any,
) -> None:  # fmt: skip
    tier = Tier(cap, policy(name, cap), rooted)
    tier.set_quotas(given)
    pinned: list[list[bytes]] = []
    for now, (what, tenant, path, shared) in enumerate(steps):
        blocks = chain(tenant, path, shared, size)
        keys = [block.key for block in blocks]
        if what == "write":
            write(tier, given, blocks, now)
        elif what == "read":
            tier.use(blocks, now)
        elif what == "drop":
            tier.drop(keys[-1:], now)
        elif what == "pin":
            pinned.append([key for key in keys if key in tier])
            tier.pin(pinned[-1])
        elif what == "unpin" and pinned:
            tier.unpin(pinned.pop(data.draw(st.integers(0, len(pinned) - 1))), now)
        elif what == "restart":  # with what its store still has, and quotas that come later
            left = sorted(tier.blocks(), key=lambda block: block.depth)
            before, pinned = held(tier), []
            tier = Tier(cap, policy(name, cap), rooted)
            for block in left:
                tier.admit([block], now)
            tier.set_quotas(given)
            assert held(tier) == before
        tier.check()


@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_floor_is_filled_and_kept_beside_a_flood_under_each_policy(name: str) -> None:
    tier = Tier(20, policy(name, 20), rooted=False)
    tier.set_quotas({"calm": KVQuota(floor=0.5), "*": KVQuota(ceiling=0.6)})

    def offer(tenant: str, count: int, begin: int) -> int:
        for number in range(count):
            key = f"{tenant}{number}".encode().ljust(16, b".")
            for turn in range(3):
                tier.admit([Block(key, ROOT, 0, 1, tenant=tenant)], begin + 3 * number + turn)
        return sum(block.tenant == tenant for block in tier.blocks())

    flooded = offer("flood", 100, 0)
    assert offer("calm", 10, 1000) == 10
    offer("flood", 300, 2000)
    assert sum(block.tenant == "calm" for block in tier.blocks()) == 10
    assert flooded <= 20
    tier.check()


def test_room_that_nobody_wants_is_used_beyond_a_ceiling_and_given_back_first() -> None:
    tier = Tier(10, policy("lru", 10), rooted=False)
    tier.set_quotas({"*": KVQuota(ceiling=0.4)})

    def offer(tenant: str, number: int) -> bool:
        block = Block(f"{tenant}{number}".encode().ljust(16, b"."), ROOT, 0, 1, tenant=tenant)
        return bool(tier.admit([block], number).admitted)

    assert all(offer("a", number) for number in range(10))
    assert all(offer("b", number) for number in range(10, 20))
    assert tier.accounts is not None
    assert tier.accounts.held() == {"a": 5, "b": 5}  # both above it
    assert tier.accounts.evicted == 5
    tier.pin([block.key for block in tier.blocks()])
    assert not offer("c", 30)
    assert not offer("b", 31)
    assert tier.accounts.refused == 1  # c would be within its ceiling, and nothing is free


def test_tenants_beyond_the_accounts_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_quotas, "MAX_ACCOUNTS", 3)
    tier = Tier(100, policy("lru", 100), rooted=False)
    tier.set_quotas({"named": KVQuota(floor=0.1)})
    for number, tenant in enumerate(["a", "b", "c", "d", "e", "named"]):
        block = Block(tenant.encode().ljust(16, b"."), ROOT, 0, 1, tenant=tenant)
        tier.admit([block], number)
    assert tier.accounts is not None
    assert tier.accounts.held() == {"a": 1, "b": 1, "c": 1, "*": 2, "named": 1}
    tier.drop([block.key for block in tier.blocks()], 9)
    tier.check()
    assert tier.accounts.held() == {}
