"""What tiers beyond the GPUs are worth to a planned fleet: KV that recurs, and where it lies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from pigou.capacity.plan.analysis import Analysis
from pigou.capacity.plan.configuration import Configuration
from pigou.capacity.plan.tier_split import StorageTier, TierSplit, greedy_split, split
from pigou.sim.gpus import GIB, GIGA
from pigou.sim.gpus import gpu as gpu_named
from pigou.sim.setup import TierConfig
from pigou.sim.workload import RequestSpec


class TierUse(msgspec.Struct, frozen=True, kw_only=True):
    """Tiers of all workers that compute prompts, taken together."""

    recurring_gb: float  # KV of the workload's blocks that are asked for at least twice, once each
    # of it over device and tiers, read at once, by the linear programme; what exceeds them is left
    # out.
    split: TierSplit
    greedy: TierSplit  # the same, fastest tier first
    hit_rate: float
    half_hit_rate: float


def tier_use(
    made: Configuration, analysis: Analysis, kv_bytes: int, tiers: Sequence[TierConfig]
) -> TierUse:
    """Return what tiers hold of a workload."""
    requests = [spec for one in analysis.demand.loop.sessions for spec in one.requests]
    device_bytes = device_bandwidth = 0.0
    workers = 0
    for pool in made.pools:
        performance = analysis.performance(pool.kind, pool.role)
        if pool.role.prefills and performance is not None:
            device, workers = gpu_named(pool.kind.gpu), pool.workers
            device_bytes += performance.kv_tokens * kv_bytes * workers
            device_bandwidth += device.bandwidth * device.cache * pool.gpus
    stores = [
        StorageTier(
            name="device", capacity_gb=device_bytes / GIGA, bandwidth_gb_s=device_bandwidth / GIGA
        )
    ]
    stores += [
        StorageTier(
            name=tier.name, capacity_gb=tier.gib * GIB / GIGA * workers,
            bandwidth_gb_s=tier.gbps / 8.0 * workers,
        )
        for tier in tiers
    ]  # fmt: skip
    tiers_gb = sum(store.capacity_gb for store in stores[1:])
    recurring_gb = recurring_tokens(requests) * kv_bytes / GIGA
    placed_gb = min(recurring_gb, stores[0].capacity_gb + tiers_gb)
    hit_rates = [
        hit_rate_within(requests, (stores[0].capacity_gb + share * tiers_gb) * GIGA / kv_bytes)
        for share in (1.0, 0.5)
    ]
    return TierUse(
        recurring_gb=recurring_gb, split=split(placed_gb, stores),
        greedy=greedy_split(placed_gb, stores), hit_rate=hit_rates[0], half_hit_rate=hit_rates[1],
    )  # fmt: skip


def recurring_tokens(requests: Sequence[RequestSpec]) -> float:
    """Return the tokens of blocks that several prompts have, once each."""
    seen: set[tuple[int, int]] = set()
    recurring: dict[tuple[int, int], float] = {}
    for spec in requests:
        for block in spec.block_ids:
            key = (spec.hash_scope, block)
            if key in seen:
                recurring[key] = spec.block_tokens
            seen.add(key)
    return sum(recurring.values())


def hit_rate_within(requests: Sequence[RequestSpec], tokens: float) -> float:
    """Return the share of prompt tokens in one cache of so many tokens, requests in order.

    The block that was not used for longest is evicted.
    """
    cache: OrderedDict[tuple[int, int], float] = OrderedDict()
    held = hits = total = 0.0
    for spec in requests:
        total += spec.prompt_tokens
        is_prefix, hit_tokens = True, 0.0
        for block in spec.block_ids:
            key = (spec.hash_scope, block)
            if key in cache:
                cache.move_to_end(key)
                hit_tokens += spec.block_tokens * is_prefix
                continue
            is_prefix = False
            cache[key] = spec.block_tokens
            held += spec.block_tokens
        hits += min(hit_tokens, spec.prompt_tokens - 1)
        while held > tokens and cache:
            held -= cache.popitem(last=False)[1]
    return hits / total if total else 0.0
