"""The partial allocation mechanism: truthful without money (Cole, Gkatzelis and Goel, EC 2013).

| symbol | meaning |
|---|---|
| V_j(x*), V_j(x*_-i) | j's utility in the proportionally fair allocation, of all and without i |
| f_i = prod_{j != i} (V_j(x*) / V_j(x*_-i))^(w_j / w_i) | fraction of its bundle that i keeps |

f_i is at least 1/e for equal weights; the remainder is burnt, which is what keeps tenants honest.
With two like tenants it is half, so use it for part of a resource only (`auctions.themis_round`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from pigou.games import Floats, checked
from pigou.games.ceei import ceei
from pigou.games.fisher import fisher


@dataclass(frozen=True, slots=True)
class PartialAllocation:
    """An outcome; `fair_utilities` are those of the proportionally fair allocation."""

    allocation: Floats  # (tenants, goods), after burning
    fractions: Floats  # (tenants,)
    utilities: Floats  # (tenants,), after burning
    fair_utilities: Floats  # (tenants,)
    burnt: Floats  # (goods,): taken from tenants, or wanted by nobody


def partial_allocation(
    values: ArrayLike, supplies: ArrayLike | None = None, *, weights: ArrayLike | None = None,
    leontief: bool = False,
) -> PartialAllocation:  # fmt: skip
    """Allocate goods to tenants with additive values (tenants, goods).

    With `leontief`, `values` are what a task needs of each good. A tenant of no weight gets
    nothing. Supplies and weights are 1 unless given.
    """
    v = checked("values", values, (None, None))
    tenants, goods = v.shape
    supply = checked("supplies", np.ones(goods) if supplies is None else supplies, (goods,))
    weight = checked("weights", np.ones(tenants) if weights is None else weights, (tenants,))

    def fair(without: int = -1) -> tuple[Floats, Floats]:
        money = np.where(np.arange(tenants) == without, 0.0, weight)
        if leontief:
            made = ceei(v, supply, budgets=money)
            return made.tasks, made.tasks[:, None] * v
        market = fisher(v, money, supply)
        return market.utilities, market.allocation

    best, bundles = fair()
    fractions = np.zeros(tenants)
    for i in np.flatnonzero(best > 0).tolist():
        others = (best > 0) & (np.arange(tenants) != i)
        loss = np.log(best[others] / fair(i)[0][others])
        fractions[i] = min(1.0, float(np.exp(weight[others] @ loss / weight[i])))
    allocation = bundles * fractions[:, None]
    burnt = np.maximum(supply - allocation.sum(axis=0), 0.0)
    return PartialAllocation(allocation, fractions, best * fractions, best, burnt)
