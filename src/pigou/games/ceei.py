"""Competitive equilibrium from equal incomes, for tenants with Leontief demands.

| symbol | meaning |
|---|---|
| D_ir, C_r | what a task of tenant i needs of resource r; capacity of r |
| B_i | budget of tenant i; all equal: CEEI |
| x_i, p_r | tasks of tenant i, and price of a unit of resource r |

The market clears where the Nash welfare is largest (Eisenberg and Gale 1959, Codenotti 2004):

max sum_i B_i log x_i so that sum_i D_ir x_i <= C_r. The prices are the duals: each tenant spends
its budget, p D_i x_i = B_i, unless `limits` stop it. Efficient, envy-free for equal budgets, and
worth sharing; not strategy-proof, which `drf` is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from pigou.games import Floats, checked
from pigou.games.nash_welfare import max_nash_welfare


@dataclass(frozen=True, slots=True)
class LeontiefMarket:
    """An equilibrium of tenants who need resources in fixed proportions."""

    tasks: Floats  # (tenants,)
    prices: Floats  # (resources,)
    spent: Floats  # (tenants,)
    used: Floats  # (resources,)


def ceei(
    demands: ArrayLike, capacities: ArrayLike, *, budgets: ArrayLike | None = None,
    limits: ArrayLike | None = None,
) -> LeontiefMarket:  # fmt: skip
    """Return tasks and prices; `demands` is (tenants, resources), `budgets` 1 unless given.

    `limits` (tenants,) are the most tasks that tenants want. A tenant that needs nothing gets its
    limit, or no task without one.
    """
    needs = checked("demands", demands, (None, None))
    tenants, resources = needs.shape
    room = checked("capacities", capacities, (resources,))
    money = checked("budgets", np.ones(tenants) if budgets is None else budgets, (tenants,))
    wanted = np.full(tenants, np.inf) if limits is None else limits
    wanted = checked("limits", wanted, (tenants,), finite=False)
    needy = (needs > 0).any(axis=1)
    limited = needy & np.isfinite(wanted)
    rows = np.vstack([needs.T, np.eye(tenants)[limited]])
    bounds = np.concatenate([room, wanted[limited]])
    welfare = max_nash_welfare(np.diag(needy.astype(float)), money, rows, bounds)
    tasks = np.where(needy, welfare.x, np.where(np.isfinite(wanted), wanted, 0.0))
    held = tasks[:, None] * needs
    prices = welfare.prices[:resources]
    return LeontiefMarket(tasks, prices, held @ prices, held.sum(axis=0))
