"""Linear-quadratic differential game: players who each pay for a state that all of them steer.

| symbol | meaning |
|---|---|
| x' = a x + sum_i b_i u_i | state (a backlog), and the players' efforts |
| J_i = int e^(-d t) (q_i x^2 + r_i u_i^2) dt | cost of player i, discounted at rate d |
| u_i = -(b_i p_i / r_i) x, J_i = p_i x_0^2 | linear feedback, and its cost |
| k | rate at which x decays: k = sum_i b_i^2 p_i / r_i - a |

Pools of prefill and decode that each mind their own objective play this game.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq

from pigou.games import Floats, checked, spread


@dataclass(frozen=True, slots=True)
class Feedback:
    """A linear feedback solution from x = 1; costs grow with x squared."""

    costs: Floats  # p_i: cost of each player
    efforts: Floats  # -u_i / x
    rate: float  # k, per unit of time; x falls to x_0 e^(-k t)

    @property
    def total(self) -> float:
        """Cost of all players."""
        return float(self.costs.sum())


def lq_nash(
    q: ArrayLike, r: ArrayLike, *, a: float = 0.0, b: ArrayLike = 1.0, discount: float = 0.0
) -> Feedback:
    """Return the feedback Nash equilibrium; `q`, `r` and `b` are (players,), `b` also one number.

    Each p_i is a root of s_i p^2 - 2 K p + q_i = 0, s_i = b_i^2 / r_i, with K the root of
    sum_i s_i p_i(K) = K + a - d/2. All take the smaller root if they can; else the players of
    largest s_i q_i take the larger one, where other equilibria may exist too.
    """
    costs, prices, slopes, drift = _read(q, r, a, b, discount)
    s = slopes**2 / prices
    product = s * costs
    low = float(np.sqrt(product.max()))
    if low == 0.0:
        raise ValueError("no player has b and q other than 0: nobody steers; give one both")
    sign = np.full(len(s), -1.0)

    def excess(k: float) -> float:
        roots = k + sign * np.sqrt(np.maximum(k * k - product, 0.0))
        return float(roots.sum()) - k - drift

    rises = excess(low) < 0.0
    if rises:
        sign[product >= product.max() * (1.0 - 1e-12)] = 1.0
    high = 2.0 * low
    while (excess(high) > 0.0) != rises:
        high *= 2.0
    k = float(brentq(excess, low, high, xtol=1e-15, rtol=1e-14))
    # The smaller root as q / (K + sqrt), which also serves b = 0.
    large = k + np.sqrt(np.maximum(k * k - product, 0.0))
    p = np.where(sign > 0, large / np.where(s > 0, s, 1.0), costs / large)
    efforts = slopes * p / prices
    return Feedback(p, efforts, float(slopes @ efforts) - a)


def lq_planner(
    q: ArrayLike, r: ArrayLike, *, a: float = 0.0, b: ArrayLike = 1.0, discount: float = 0.0
) -> Feedback:
    """Return the efforts that cost all players together least; arguments as of `lq_nash`."""
    costs, prices, slopes, drift = _read(q, r, a, b, discount)
    s, total = float((slopes**2 / prices).sum()), float(costs.sum())
    if s * total == 0.0:
        raise ValueError("b or q is 0 for every player: nobody steers; give one a b, one a q")
    p = (drift + math.sqrt(drift * drift + s * total)) / s
    efforts = slopes * p / prices
    rate = float(slopes @ efforts) - a
    own = (costs + prices * efforts**2) / (2.0 * rate + discount)
    return Feedback(own, efforts, rate)


def lq_price_of_anarchy(
    q: ArrayLike, r: ArrayLike, *, a: float = 0.0, b: ArrayLike = 1.0, discount: float = 0.0
) -> float:
    """Return the equilibrium's total cost over the planner's."""
    made = (solve(q, r, a=a, b=b, discount=discount).total for solve in (lq_nash, lq_planner))
    nash, best = made
    return nash / best


def _read(
    q: ArrayLike, r: ArrayLike, a: float, b: ArrayLike, discount: float
) -> tuple[Floats, Floats, Floats, float]:
    costs = checked("q", q, (None,))
    prices = checked("r", r, costs.shape, above=True)
    slopes = spread("b", b, len(costs), low=-np.inf)
    if not len(costs) or not math.isfinite(a) or not 0.0 <= discount < math.inf:
        raise ValueError(f"{len(costs)} players, a={a}, discount={discount}: give one player or "
                         "more, a number, and a rate of at least 0")  # fmt: skip
    return costs, prices, slopes, a - 0.5 * discount
