"""How data is split over tiers of memory: a linear programme, beside the greedy split.

FlexGen (Sheng et al. 2023) chooses which share of the KV lies on GPU, host and disk by a linear
programme. With x_i GB on tier i of bandwidth w_i and capacity c_i, all data is read in

    max of x_i / w_i   where tiers are read in parallel,
    sum of x_i / w_i   where they are read one after the other,

subject to sum of x_i = B and 0 <= x_i <= c_i. In series the greedy split, fastest tier first, is
the solution; in parallel it is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from pigou.config import ConfigError


class StorageTier(msgspec.Struct, frozen=True, kw_only=True):
    """A tier."""

    name: str
    capacity_gb: float
    bandwidth_gb_s: float


class TierSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Data on tiers."""

    gb: dict[str, float]
    seconds: float  # until all is read
    # seconds that one more GB of a tier's capacity would save; the dual of it.
    saved_s_per_gb: dict[str, float] = {}


def split(gb: float, tiers: Sequence[StorageTier], *, parallel: bool = True) -> TierSplit:
    """Return the split that is read soonest.

    Args:
        parallel: whether tiers are read at once, or one after the other.
    """
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
