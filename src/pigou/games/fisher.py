"""Fisher markets: buyers with budgets, goods with supplies, prices that clear (Eisenberg-Gale).

| symbol | meaning |
|---|---|
| B_i, v_ij, x_ij | budget of buyer i, its value of a unit of good j, and the units that it buys |
| u_i = sum_j v_ij x_ij | utility |
| p_j = max_i B_i v_ij / u_i | price; prices times supplies sum to the budgets |

Efficient, and envy-free for equal budgets; not strategy-proof in small markets. For Leontief
demands see `ceei`. Pigou's tolls and memory prices are such prices, with budgets left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from pigou.games import Floats, checked, spread
from pigou.games.nash_welfare import Welfare, max_nash_welfare


@dataclass(frozen=True, slots=True)
class Market:
    """An equilibrium."""

    allocation: Floats  # (buyers, goods)
    utilities: Floats  # (buyers,)
    prices: Floats  # (goods,)
    spent: Floats  # (buyers,); a buyer that values nothing spends nothing


def fisher(
    values: ArrayLike, budgets: ArrayLike | None = None, supplies: ArrayLike | None = None
) -> Market:
    """Return the equilibrium of linear utilities; budgets and supplies are 1 unless given."""
    v = checked("values", values, (None, None))
    buyers, goods = v.shape
    money = checked("budgets", np.ones(buyers) if budgets is None else budgets, (buyers,))
    supply = checked("supplies", np.ones(goods) if supplies is None else supplies, (goods,))
    welfare = _bought(v, money, supply, np.ones(buyers))
    happy = welfare.utilities > 0
    worthwhile = v[happy] * (money[happy] / welfare.utilities[happy])[:, None]
    prices = worthwhile.max(axis=0, initial=0.0)
    allocation = welfare.x.reshape(buyers, goods)
    return Market(allocation, welfare.utilities, prices, allocation @ prices)


def volatile_market(
    progress: ArrayLike, capacity: ArrayLike, *, workers: ArrayLike | None = None,
    done: ArrayLike | None = None, unfairness: ArrayLike | None = None, power: float = 5.0,
) -> Market:  # fmt: skip
    """Return Shockwave's plan of a window of rounds (Zheng et al., NSDI 2023).

    max sum_i B_i log(done_i + sum_t U_it x_it) with x_it <= 1, sum_i g_i x_it <= C_t, and budgets
    B_i = unfairness_i^power. `progress` is U (jobs, rounds), `workers` g, `capacity` C (rounds,).
    `unfairness` is the expected finish time over the fair one. Run the first round, then plan anew.
    """
    per_round = checked("progress", progress, (None, None))
    jobs, rounds = per_round.shape
    size = checked("workers", np.ones(jobs) if workers is None else workers, (jobs,), above=True)
    room = spread("capacity", capacity, rounds)
    past = checked("done", np.zeros(jobs) if done is None else done, (jobs,))
    rho = np.ones(jobs) if unfairness is None else unfairness
    with np.errstate(over="ignore"):
        money = checked(
            "unfairness ** power", checked("unfairness", rho, (jobs,)) ** power, (jobs,)
        )
    welfare = _bought(per_round, money, room, size, past, np.ones((jobs, rounds)))
    share, prices = welfare.x.reshape(jobs, rounds), welfare.prices[:rounds]
    return Market(share, welfare.utilities, prices, (share * size[:, None]) @ prices)


def _bought(
    values: Floats, budgets: Floats, supplies: Floats, sizes: Floats, past: Floats | None = None,
    caps: Floats | None = None,
) -> Welfare:  # fmt: skip
    """Solve with a variable per buyer and good; `caps` bounds each."""
    buyers, goods = values.shape
    if not values.size:
        return Welfare(np.zeros(0), np.zeros(buyers), np.zeros(goods))
    own = np.kron(np.eye(buyers), np.ones(goods)) * values.ravel()
    rows = np.kron(sizes, np.eye(goods)).astype(np.float64)
    if caps is not None:
        rows = np.vstack([rows, np.eye(buyers * goods)])
        supplies = np.concatenate([supplies, caps.ravel()])
    return max_nash_welfare(own, budgets, rows, supplies, past)
