"""Tiers of a planned fleet: recurring KV, and its fastest placement."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec
import numpy as np

from pigou.capacity.plan.analysis import Analysis, Configuration
from pigou.config import ConfigError
from pigou.models.gpus import GIB, GIGA
from pigou.models.gpus import gpu as gpu_named
from pigou.sim.setup import TierConfig
from pigou.sim.workload import RequestSpec


class StorageTier(msgspec.Struct, frozen=True, kw_only=True):
    """A tier."""

    name: str
    capacity_gb: float
    bandwidth_gb_s: float


class TierSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Data on tiers."""

    gb: dict[str, float]
    seconds: float  # until all is read
    saved_s_per_gb: dict[str, float] = {}  # dual of a tier's capacity


def split(gb: float, tiers: Sequence[StorageTier], *, parallel: bool = True) -> TierSplit:
    """Return the split that is read soonest, tiers read at once (`parallel`) or in turn."""
    from scipy.optimize import linprog

    _check(gb, tiers)
    count = len(tiers)
    per_gb = np.array([1.0 / tier.bandwidth_gb_s for tier in tiers])
    # Variables: GB on each tier, and seconds T. Capacities are rows, for their duals.
    finite = [i for i, tier in enumerate(tiers) if np.isfinite(tier.capacity_gb)]
    rows = np.zeros((len(finite) + count * parallel, count + 1))
    rows[np.arange(len(finite)), finite] = 1.0
    bounds = np.zeros(len(rows))
    bounds[: len(finite)] = [tiers[i].capacity_gb for i in finite]
    if parallel:
        rows[len(finite) :, :count] = np.diag(per_gb)
        rows[len(finite) :, count] = -1.0
    cost = np.append(np.zeros(count), 1.0) if parallel else np.append(per_gb, 0.0)
    solved = linprog(
        cost, A_ub=rows, b_ub=bounds, A_eq=[[1.0] * count + [0.0]], b_eq=[gb], method="highs"
    )
    saved = dict.fromkeys((tier.name for tier in tiers), 0.0)
    for row, index in enumerate(finite):
        saved[tiers[index].name] = max(-float(solved.ineqlin.marginals[row]), 0.0)
    return TierSplit(
        gb={tier.name: float(x) for tier, x in zip(tiers, solved.x, strict=False)},
        seconds=float(solved.fun),
        saved_s_per_gb=saved,
    )


def greedy_split(gb: float, tiers: Sequence[StorageTier], *, parallel: bool = True) -> TierSplit:
    """Return the split that fills the fastest tier first, as eviction by price does."""
    _check(gb, tiers)
    left, placed = gb, dict.fromkeys((tier.name for tier in tiers), 0.0)
    seconds = []
    for tier in sorted(tiers, key=lambda tier: -tier.bandwidth_gb_s):
        placed[tier.name] = min(left, tier.capacity_gb)
        left -= placed[tier.name]
        seconds.append(placed[tier.name] / tier.bandwidth_gb_s)
    return TierSplit(gb=placed, seconds=max(seconds) if parallel else sum(seconds))


def _check(gb: float, tiers: Sequence[StorageTier]) -> None:
    room = sum(tier.capacity_gb for tier in tiers)
    if not 0.0 <= gb <= room:
        raise ConfigError(f"{gb:g} GB do not fit the tiers, which hold {room:g} GB; give more")


class TierUse(msgspec.Struct, frozen=True, kw_only=True):
    """Tiers of all workers that compute prompts, taken together."""

    recurring_gb: float  # KV of the workload's blocks that are asked for at least twice, once each
    # recurring KV over device and tiers, read at once, by the linear programme; KV beyond their
    # size is left out.
    split: TierSplit
    greedy: TierSplit  # the same, fastest tier first
    hit_rate: float
    half_hit_rate: float


def tier_use(
    made: Configuration, analysis: Analysis, kv_bytes: int, tiers: Sequence[TierConfig]
) -> TierUse:
    """Return the use of tiers by a workload."""
    requests = [spec for one in analysis.demand.loop.sessions for spec in one.requests]
    device_bytes = device_bandwidth = 0.0
    workers = 0
    for pool in made.pools:
        performance = analysis.performance(pool.kind, pool.role)
        if pool.role.prefills and performance is not None:
            device, workers = gpu_named(pool.kind.gpu), pool.workers
            device_bytes += performance.kv_tokens * kv_bytes * pool.ranks
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
    """Return the share of prompt tokens hit in one LRU cache of `tokens` tokens, in order."""
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
