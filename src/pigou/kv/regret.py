"""What not knowing the future cost: realised utility beside the best there was.

Source: seed token-pd (Token-PD), section 3 and appendix A. Arrays are steps by tokens, (T, n); a
token that is not there in a step is left out by `there`. All tokens cost the same.

The paper writes the utility twice, differently: as printed, Eq. 2 lets an evicted token earn its
return too, so that any choice of as many tokens is optimal; appendix A takes the penalty from
tokens that are kept. Here a kept token earns its return less its risk, and an evicted one costs
the penalty, which is what the text around both says.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.kv.price import FLOOR, Floats, admits, exponentiated

Flags = NDArray[np.bool_]


def utility(
    returns: Floats, variances: Floats, kept: Flags, there: Flags, risk: float, penalty: float
) -> Floats:
    """Return each step's utility: x (R - risk sigma^2) - (1 - x) penalty, summed over tokens.

    Args:
        returns: realised, (T, n).
        variances: of the returns, (T, n).
        kept: tokens in the cache, (T, n).
        there: tokens that exist, (T, n).
        risk: lambda.
        penalty: delta, of computing a token again.

    Returns:
        Shape (T,), in the unit of the returns.
    """
    earned = np.where(kept & there, returns - risk * variances, 0.0)
    missed = (there & ~kept).sum(axis=1) * penalty
    found: Floats = earned.sum(axis=1) - missed
    return found


def optimum(
    returns: Floats, variances: Floats, there: Flags, budget: int, risk: float, penalty: float
) -> Floats:
    """Return the best utility of each step for whoever knows the returns: the top `budget`.

    Args are those of `utility`; `budget` is in tokens. Nothing is kept that costs more than it
    spares, R - risk sigma^2 + penalty < 0.
    """
    worth = np.where(there, returns - risk * variances + penalty, -np.inf)
    count = min(budget, worth.shape[1])
    best = np.sort(worth, axis=1)[:, ::-1][:, :count]
    found: Floats = np.maximum(best, 0.0).sum(axis=1) - there.sum(axis=1) * penalty
    return found


def by_price(
    returns: Floats, there: Flags, budget: int, rate: float, capped: bool = False
) -> tuple[Flags, Floats]:
    """Play Token-PD's rule where its bound is proved (appendix A), and return what it keeps.

    There, returns are seen before each choice, what was dropped is back the moment it is worth its
    price, and the budget holds on average alone. Eq. 4 chooses, Eq. 5 moves the price; the first
    step that has more than the budget sets it to the return of the first token too many.

    Args:
        returns: realised, (T, n).
        there: tokens that exist, (T, n).
        budget: tokens that may be kept, above 0.
        rate: learning rate, above 0.
        capped: whether no more than the budget is kept in any step, those of the highest returns.

    Returns:
        What is kept, and by how many tokens what earns its price exceeds the budget, of shapes
        (T, n) and (T,); 0 as long as there was no price.
    """
    kept, beyond, price = there.copy(), np.zeros(len(returns)), 0.0
    for t in range(len(returns)):
        tokens = np.flatnonzero(there[t])
        worth = returns[t, tokens]
        if not price and len(tokens) > budget:
            price = max(float(np.partition(worth, -budget - 1)[-budget - 1]), FLOOR)
        if not price:
            continue
        kept[t, tokens] = admits(worth, np.zeros_like(worth), 0.0, price)
        wanted = int(kept[t].sum())
        if capped and wanted > budget:
            kept[t, tokens[np.argsort(-worth, kind="stable")[budget:]]] = False
        beyond[t] = wanted - budget
        price = exponentiated(price, wanted, budget, rate)
    return kept, beyond


def regret(optimal: Floats, realised: Floats) -> Floats:
    """Return the cumulative regret after each step, both of shape (T,)."""
    found: Floats = np.cumsum(optimal - realised)
    return found


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
