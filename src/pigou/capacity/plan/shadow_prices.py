"""What scarce things are worth to a plan: GPUs, objectives, prefix hits, memory of tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

import msgspec

from pigou.capacity.plan.analysis import Analysis
from pigou.capacity.plan.search_space import candidates
from pigou.capacity.plan.tier_use import TierUse
from pigou.models.architecture import Architecture


def shadow_prices(
    gpus: Mapping[str, int],
    analysis: Analysis,
    model: Architecture,
    kv_dtype: str,
    use: TierUse | None,
    pool: ProcessPoolExecutor | None,
) -> dict[str, dict[str, float]]:
    """Return what a little more of each scarce thing is worth, by the analysis.

    The worth is output tokens a second that all GPUs together may yield more.
    """
    demand = replace(analysis.demand, rate_rps=0.0)
    slo = analysis.slo
    same = analysis.changed(slo, demand)
    changes: dict[str, tuple[Analysis, Mapping[str, int]]] = {"": (same, gpus)}
    for name, count in gpus.items():
        changes[f"one_more_{name}"] = (same, {**gpus, name: count + 1})
    if slo.ttft_s < float("inf"):
        longer = msgspec.structs.replace(slo, ttft_s=slo.ttft_s + 0.02)
        changes["ttft_20_ms_longer"] = (analysis.changed(longer, demand), gpus)
    if slo.itl_s < float("inf"):
        longer = msgspec.structs.replace(slo, itl_s=slo.itl_s + 0.02)
        changes["itl_20_ms_longer"] = (analysis.changed(longer, demand), gpus)
    hotter = demand.with_hit_rate(min(demand.mix.hit_rate + 0.05, 0.99))
    changes["hit_rate_5_points_higher"] = (analysis.changed(slo, hotter), gpus)

    if use is not None:
        lost = use.hit_rate - use.half_hit_rate
        colder = demand.with_hit_rate(max(demand.mix.hit_rate - lost, 0.0))
        changes["half_the_tier_memory"] = (analysis.changed(slo, colder), gpus)

    limit_of = partial(_limit_tok_s, model, (kv_dtype,))
    limits = (map if pool is None else pool.map)(limit_of, *zip(*changes.values(), strict=True))
    tok_s = dict(zip(changes, limits, strict=True))
    base = tok_s.pop("")
    return {
        name: {"output_tok_s": value - base, "share": value / base - 1.0 if base else 0.0}
        for name, value in tok_s.items()
    }


def _limit_tok_s(
    model: Architecture, kv_dtypes: Sequence[str], analysis: Analysis, gpus: Mapping[str, int]
) -> float:
    """Return the most output tokens a second that GPUs hold inside the objective."""
    limits = (c.limit_rps for c in candidates(analysis, model, gpus, kv_dtypes))
    return max(limits, default=0.0) * analysis.demand.mix.osl
