"""The price of memory: the return that a block of cache entries must have to stay.

Source: seed token-pd (Token-PD), section 4. Its price `mu` is per byte and its cost `c` the bytes
of a token; here prices are per block, and a block costs 1, so that `mu c` is the price itself.
Returns are in the unit of their prediction.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Lowest price, above 0, from which a multiplicative update can rise again.
FLOOR = 1e-12


def exponentiated_price(
    price: float, used: float, budget: float, rate: float, steps: int = 1
) -> float:
    """Raise a price while more is used than there is, lower it while less is (Token-PD, Eq. 5).

    mu <- mu exp(rate (used - budget) / budget), once for each step; at least `FLOOR`. Used and
    budget are in blocks.
    """
    change = rate * steps * (used - budget) / budget
    return min(max(price * math.exp(min(change, 700.0)), FLOOR), 1e300)


def averaged_price(price: float, marginal: float, share: float, deadband: float) -> float:
    """Move a price towards the marginal return at a cut, on a logarithmic scale.

    The exact dual variable of one cut is the return of the dearest block given up
    (`pigou.kv.memory_shares`); from cut to cut it jumps. Its geometric mean over time, newer cuts
    weighing more, is exponentiated gradient with a constant rate. The price moves by `share` of the
    distance; distances below `deadband`, in natural logarithms, change nothing.
    """
    target = max(marginal, FLOOR)
    distance = math.log(target / price)
    if abs(distance) < deadband:
        return price
    return max(price * math.exp(share * distance), FLOOR)


def excess(returns: Floats, variances: Floats, risk: float, price: float) -> Floats:
    """Return what entries earn beyond their price: g = R - risk sigma^2 - mu (Token-PD, Eq. 4).

    `risk` is lambda, negative where uncertainty is worth keeping (eviction is for good).
    """
    excess_returns: Floats = returns - risk * variances - price
    return excess_returns


def admits(returns: Floats, variances: Floats, risk: float, price: float) -> NDArray[np.bool_]:
    """Return which entries stay at a price: those with g >= 0 (Token-PD, Eq. 4)."""
    admitted: NDArray[np.bool_] = excess(returns, variances, risk, price) >= 0.0
    return admitted


def blocks_below(ascending: Floats, price: float) -> int:
    """Return how many blocks of an ascending curve earn less than the price."""
    return int(ascending.searchsorted(price, side="left"))


def blocks_above(descending: Floats, price: float) -> int:
    """Return how many blocks of a descending curve earn more than the price."""
    return int((-descending).searchsorted(-price, side="left"))


#: Share of the distance to a cut's marginal return that the price goes at once: what is left of it
#: after ten cuts is a thousandth.
SHARE = 0.5


#: Relative changes of the marginal return below it leave the price alone.
DEADBAND = 0.05


class MemoryPrice:
    """The price of device memory, in return per block of entries.

    - As it is cut: the price follows the marginal return of the cuts, as far as they are foreseen
      (`marginal_ahead`), averaged from plan to plan (`averaged_price`). It falls while more blocks
      are free than requests are going to need (`exponentiated_price`).
    - `by_price` (Token-PD's own): `exponentiated_price` in each step, where what is wanted and not
      there counts as used.

    The first cut sets the price under both: the paper says only that it begins above 0.
    """

    def __init__(self, budget: int, rate: float, by_price: bool) -> None:
        self.price = FLOOR
        self.by_price = by_price
        self._budget, self._rate = budget, rate
        #: The price before the plan under way: its cuts are one, and the last sees it whole.
        self._before: float | None = None

    def note(self, marginal: float, ahead: float = -math.inf) -> None:
        """Record that blocks were given up: `marginal` is the return of the dearest of them.

        An unknown (infinite) return says nothing. `ahead` is the return of the dearest block that
        will have to go before long (`marginal_ahead`), -inf for none.
        """
        if not math.isfinite(marginal):
            return
        first = self._before is None
        before = self._before = self.price if self._before is None else self._before
        if self.by_price:
            if first and before <= FLOOR:
                self.price = max(marginal, FLOOR)
        elif before <= FLOOR:
            self.price = max(marginal, ahead, FLOOR)
        else:
            self.price = averaged_price(before, max(marginal, ahead), SHARE, DEADBAND)

    def step(self, used: int, steps: int, ahead: float = 0.0) -> None:
        """Record steps that used or wanted `used` blocks; requests will grow by `ahead` blocks."""
        cut, self._before = self._before is not None, None
        wanted = used if self.by_price else min(used + ahead, self._budget)
        if self.by_price or not cut:
            self.price = exponentiated_price(self.price, wanted, self._budget, self._rate, steps)


Flags = NDArray[np.bool_]


def utility(
    returns: Floats, variances: Floats, in_cache: Flags, exists: Flags, risk: float, penalty: float
) -> Floats:
    """Return each step's utility: x (R - risk sigma^2) - (1 - x) penalty, summed over tokens.

    Args:
        returns: realised, (T, n).
        variances: of the returns, (T, n).
        in_cache: tokens in the cache, (T, n).
        exists: tokens that exist, (T, n).
        penalty: delta, of computing a token again.

    Returns:
        Shape (T,), in the unit of the returns.
    """
    earned = np.where(in_cache & exists, returns - risk * variances, 0.0)
    missed = (exists & ~in_cache).sum(axis=1) * penalty
    utilities: Floats = earned.sum(axis=1) - missed
    return utilities


def optimum(
    returns: Floats, variances: Floats, exists: Flags, budget: int, risk: float, penalty: float
) -> Floats:
    """Return the best utility of each step with known returns: the top `budget`.

    Args are those of `utility`; `budget` is in tokens. Nothing is kept that costs more than it
    spares, R - risk sigma^2 + penalty < 0.
    """
    values = np.where(exists, returns - risk * variances + penalty, -np.inf)
    count = min(budget, values.shape[1])
    best = np.sort(values, axis=1)[:, ::-1][:, :count]
    utilities: Floats = np.maximum(best, 0.0).sum(axis=1) - exists.sum(axis=1) * penalty
    return utilities


def by_price(
    returns: Floats, exists: Flags, budget: int, rate: float, capped: bool = False
) -> tuple[Flags, Floats]:
    """Play Token-PD's rule where its bound is proved (appendix A), and return what it keeps.

    There, returns are seen before each choice, what was dropped is back the moment it is worth its
    price, and the budget holds on average alone. Eq. 4 chooses, Eq. 5 moves the price; the first
    step that has more than the budget sets it to the return of the first token too many.

    Args:
        returns: realised, (T, n).
        exists: tokens that exist, (T, n).
        budget: tokens that may be kept, above 0.
        rate: learning rate, above 0.
        capped: whether no more than the budget is kept in any step, those of the highest returns.

    Returns:
        What is kept, and by how many tokens what earns its price exceeds the budget, of shapes
        (T, n) and (T,); 0 as long as there was no price.
    """
    in_cache, excess_tokens, price = exists.copy(), np.zeros(len(returns)), 0.0
    for t in range(len(returns)):
        tokens = np.flatnonzero(exists[t])
        values = returns[t, tokens]
        if not price and len(tokens) > budget:
            price = max(float(np.partition(values, -budget - 1)[-budget - 1]), FLOOR)
        if not price:
            continue
        in_cache[t, tokens] = admits(values, np.zeros_like(values), 0.0, price)
        wanted = int(in_cache[t].sum())
        if capped and wanted > budget:
            in_cache[t, tokens[np.argsort(-values, kind="stable")[budget:]]] = False
        excess_tokens[t] = wanted - budget
        price = exponentiated_price(price, wanted, budget, rate)
    return in_cache, excess_tokens


def regret(optimal: Floats, realised: Floats) -> Floats:
    """Return the cumulative regret after each step, both of shape (T,)."""
    cumulative: Floats = np.cumsum(optimal - realised)
    return cumulative


def growth(cumulative: Floats, begin: int = 1) -> float:
    """Return the exponent a of the power law c t^a that fits a cumulative regret best.

    By least squares of logarithms, over steps where the regret is above 0.

    Args:
        cumulative: regret after each step, (T,).
        begin: first step (from 1) that counts.

    Returns:
        The exponent; 0 where the regret is never above 0, or at one step only.
    """
    steps = np.arange(1, len(cumulative) + 1)
    good = (cumulative > 0) & (steps >= begin)
    if good.sum() < 2:
        return 0.0
    slope, _ = np.polyfit(np.log(steps[good]), np.log(cumulative[good]), 1)
    return float(slope)
