"""Token-PD's utility, its optimum, and its rule of the price where its bound is proved."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.kv.memory_price import FLOOR, Floats, exponentiated_price

Flags = NDArray[np.bool_]


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
