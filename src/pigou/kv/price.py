"""What a block of cache entries has to earn to stay: the price of memory, and who pays it.

Source: seed token-pd (Token-PD), section 4. Its price `mu` is per byte and its cost `c` the bytes
of a token; here prices are per block, and a block costs 1, so that `mu c` is the price itself.
Returns are in the unit of whoever predicts them.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Lowest price, above 0, from which a multiplicative update can rise again.
FLOOR = 1e-12


def exponentiated(price: float, used: float, budget: float, rate: float, steps: int = 1) -> float:
    """Raise a price while more is used than there is, lower it while less is (Token-PD, Eq. 5).

    mu <- mu exp(rate (used - budget) / budget), once for each step.

    Args:
        price: before, above 0.
        used: blocks that are in use or wanted, 0 or more.
        budget: blocks that there are, above 0.
        rate: learning rate, above 0.
        steps: for how many steps `used` holds.

    Returns:
        The price after, at least `FLOOR`.
    """
    change = rate * steps * (used - budget) / budget
    return min(max(price * math.exp(min(change, 700.0)), FLOOR), 1e300)


def averaged(price: float, marginal: float, share: float, deadband: float) -> float:
    """Move a price towards the marginal return at a cut, on a logarithmic scale.

    The exact dual variable of one cut is the return of the dearest block given up
    (`pigou.kv.portfolio.cut`); from cut to cut it jumps. Its geometric mean over time, newer cuts
    weighing more, is exponentiated gradient with a constant rate on the distance to it.

    Args:
        price: before, above 0.
        marginal: return of the dearest block that was given up.
        share: of the distance that is gone, above 0 and at most 1.
        deadband: distances below it (of natural logarithms) change nothing.

    Returns:
        The price after, at least `FLOOR`.
    """
    target = max(marginal, FLOOR)
    distance = math.log(target / price)
    if abs(distance) < deadband:
        return price
    return max(price * math.exp(share * distance), FLOOR)


def excess(returns: Floats, variances: Floats, risk: float, price: float) -> Floats:
    """Return what entries earn beyond their price (Token-PD, before Eq. 4).

    g = R - risk sigma^2 - mu c, with c = 1: give the price in the unit of what is priced.

    Args:
        returns: expected, any shape.
        variances: of the returns, the same shape.
        risk: lambda; negative where uncertainty is worth keeping (eviction is for good).
        price: of keeping one of them.
    """
    found: Floats = returns - risk * variances - price
    return found


def admits(returns: Floats, variances: Floats, risk: float, price: float) -> NDArray[np.bool_]:
    """Return which entries stay at a price: those with g >= 0 (Token-PD, Eq. 4)."""
    found: NDArray[np.bool_] = excess(returns, variances, risk, price) >= 0.0
    return found


def below(losses: Floats, price: float) -> int:
    """Return how many blocks of an ascending curve earn less than the price."""
    return int(losses.searchsorted(price, side="left"))


def above(gains: Floats, price: float) -> int:
    """Return how many blocks of a descending curve earn more than the price."""
    return int((-gains).searchsorted(-price, side="left"))
