"""Lending over rounds that no lie turns to profit (Freeman et al., SIGMETRICS 2018).

| symbol | meaning |
|---|---|
| e_i, E | what tenant i owns of each round (its endowment), and their sum |
| d_i, a_i | demand reported for a round, and allocation; allocations sum to E |
| R, T | rounds; half a period |

A unit within the demand is worth more than one beyond. `flexible_lending` is strategy-proof with
at least half of what slices alone are worth; `t_period_lending` is strategy-proof and worth as
much as slices. Neither is efficient. The rules are restated from memory: of the paper only the
abstract was at hand. Its theorems hold in the tests, by trying all lies on a grid.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from pigou.games import Floats, checked, spread


def flexible_lending(demands: ArrayLike, endowments: ArrayLike = 1.0) -> Floats:
    """Return allocations (rounds, tenants); everybody gets R e_i units in all.

    A round goes to demands first, as far as their tenants have units left, max-min by e_i. What
    nobody demands goes to those who have units left, by e_i too.
    """
    wanted, own = _read(demands, endowments)
    left = own * len(wanted)
    allocations = np.zeros_like(wanted)
    for t, demand in enumerate(wanted):
        bounded = np.minimum(demand, left)
        contended = bounded.sum() >= own.sum()
        low, high = (np.zeros_like(own), bounded) if contended else (bounded, left)
        allocations[t] = _level(own, low, high)
        left = np.maximum(left - allocations[t], 0.0)
    return allocations


def t_period_lending(demands: ArrayLike, period: int, endowments: ArrayLike = 1.0) -> Floats:
    """Return allocations (rounds, tenants), settled every 2 T rounds, T being `period`.

    In the first T rounds of 2 T tenants lend what they do not demand, and borrow at most T e_i. In
    the others all is paid back evenly, whatever is demanded.
    """
    wanted, own = _read(demands, endowments)
    if period < 1 or len(wanted) % (2 * period):
        raise ValueError(
            f"period is {period} and demands have {len(wanted)} rounds: give a period from 1, and "
            f"a multiple of {2 * max(period, 1)} rounds"
        )
    allocations = np.zeros_like(wanted)
    for begin in range(0, len(wanted), 2 * period):
        middle, credit = begin + period, own * period
        for t in range(begin, middle):
            bounded = np.minimum(wanted[t], own + credit)
            contended = bounded.sum() >= own.sum()
            low = np.zeros_like(own) if contended else bounded
            allocations[t] = _level(own, low, bounded if contended else np.maximum(bounded, own))
            credit = np.maximum(credit - np.maximum(allocations[t] - own, 0.0), 0.0)
        unused = own * period - allocations[begin:middle].sum(axis=0)
        allocations[middle : middle + period] = np.maximum(own + unused / period, 0.0)
    return allocations


def _level(own: Floats, low: Floats, high: Floats) -> Floats:
    """Return clip(x own, low, high) of the sum of `own`, which low and high enclose."""
    active = own > 0
    if not active.any():
        return np.zeros_like(own)
    total = own.sum()
    steps = np.sort(np.concatenate([low[active] / own[active], high[active] / own[active]]))
    sums = np.clip(steps[:, None] * own, low, high).sum(axis=1)
    at = int(np.searchsorted(sums, total))
    if at == 0 or at == len(steps):
        x = steps[min(at, len(steps) - 1)]
    else:
        part = (total - sums[at - 1]) / (sums[at] - sums[at - 1])
        x = steps[at - 1] + (steps[at] - steps[at - 1]) * part
    level: Floats = np.clip(x * own, low, high)
    return level


def _read(demands: ArrayLike, endowments: ArrayLike) -> tuple[Floats, Floats]:
    wanted = checked("demands", demands, (None, None))
    return wanted, spread("endowments", endowments, wanted.shape[1])
