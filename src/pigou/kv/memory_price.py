"""Price of device memory, and token eviction across requests.

Source: seed token-pd (Token-PD), sections 3 and 4, with prices per block instead of per byte.
Eviction is a knapsack of equal-sized items, so the optimum is a threshold on their returns.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pigou.request import Ints

Floats = NDArray[np.float64]

#: Lowest price, above 0, from which a multiplicative update can rise again.
FLOOR = 1e-12
#: First rate of Token-PD's price over `EvictionConfig.rate`; it falls as 1 / sqrt(steps).
FIRST_RATE = 10.0
#: Steps on one side of the budget after which the rate starts anew: the load has changed.
ONE_SIDED = 8
#: Share of the log distance to the marginal return that the price moves per eviction.
SHARE = 0.5
#: Log distance to the marginal return below which the price does not move.
DEADBAND = 0.05
#: Later uses of any key after which a use weighs 1/e (`UseRates`).
MEMORY_USES = 128


def exponentiated_price(
    price: float, used: float, budget: float, rate: float, steps: int = 1
) -> float:
    """Return mu exp(steps rate (used - budget) / budget), in blocks (Token-PD, Eq. 5)."""
    change = rate * steps * (used - budget) / budget
    return min(max(price * math.exp(min(change, 700.0)), FLOOR), 1e300)


def averaged_price(price: float, marginal: float, share: float, deadband: float) -> float:
    """Move a price by `share` of the log distance to the marginal return of an eviction.

    The price is a geometric mean of marginals, newer ones weighing more: exponentiated gradient at
    a constant rate. Log distances below `deadband` change nothing.
    """
    target = max(marginal, FLOOR)
    distance = math.log(target / price)
    if abs(distance) < deadband:
        return price
    return max(price * math.exp(share * distance), FLOOR)


def blocks_below(ascending: Floats, price: float) -> int:
    """Return the number of blocks in an ascending curve with a return below the price."""
    return int(ascending.searchsorted(price, side="left"))


def blocks_above(descending: Floats, price: float) -> int:
    """Return the number of blocks in a descending curve with a return above the price."""
    return int((-descending).searchsorted(-price, side="left"))


class MemoryPrice:
    """Price of device memory, in return per block of entries.

    By default the price follows the marginal return of evictions (`averaged_price`), and falls
    while more blocks are free than requests need. With `by_price` it is Token-PD's
    `exponentiated_price`, counting unmet demand as used, at a rate eta_t = 10 rate / sqrt(t). Both
    its regret and its excess then grow as sqrt(T) (appendix A); t counts from the last change of
    load (`ONE_SIDED`). The first eviction sets the price.
    """

    def __init__(self, budget: int, rate: float, by_price: bool) -> None:
        self.price = FLOOR
        self.by_price = by_price
        self._budget, self._rate = budget, rate
        self._steps = self._one_sided = 0
        self._above = False  # more than the budget was wanted last
        #: Price before the current plan, whose evictions count as one.
        self._before: float | None = None

    def note(self, marginal: float, ahead: float = -math.inf) -> None:
        """Record an eviction's highest return, and that of those due soon (`marginal_ahead`)."""
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
        """Record steps that used or requested `used` blocks; `ahead` is expected growth."""
        cut, self._before = self._before is not None, None
        wanted = used if self.by_price else min(used + ahead, self._budget)
        if self.by_price:
            rates = self._falling_rates(wanted > self._budget, steps)
            self.price = exponentiated_price(self.price, wanted, self._budget, rates)
        elif not cut:
            self.price = exponentiated_price(self.price, wanted, self._budget, self._rate, steps)

    def _falling_rates(self, above: bool, steps: int) -> float:
        """Return the sum of the rates of `steps` steps, which fall as 1 / sqrt(t)."""
        self._one_sided = self._one_sided + steps if above == self._above else steps
        if self._one_sided >= ONE_SIDED:
            self._steps = self._one_sided = 0
        self._above, before = above, self._steps
        self._steps += steps
        return 2.0 * FIRST_RATE * self._rate * (math.sqrt(self._steps) - math.sqrt(before))


def held_value(rate: float, reload_s: float, size: int) -> float:
    """Return the seconds saved per byte and second by holding what costs `reload_s` per use."""
    return rate * reload_s / size


class UseRates:
    """Share of each key in recent uses; a use weighs 1/e after `MEMORY_USES` later ones."""

    def __init__(self) -> None:
        self._uses = 0
        self._weights: dict[Hashable, tuple[float, int]] = {}  # weight, and uses when it was set

    def use(self, key: Hashable) -> None:
        """Record a use."""
        self._weights[key] = 1.0 + self.rate(key) * MEMORY_USES, self._uses
        self._uses += 1
        if self._uses % (8 * MEMORY_USES) == 0:
            self._weights = {k: w for k, w in self._weights.items() if self.rate(k) > 1e-4}

    def forget(self, key: Hashable) -> None:
        """Drop a key that nobody will use."""
        self._weights.pop(key, None)

    def rate(self, key: Hashable) -> float:
        """Return a key's uses per use of any."""
        weight, at = self._weights.get(key, (0.0, 0))
        return weight * math.exp((at - self._uses) / MEMORY_USES) / MEMORY_USES


class EvictionCurve(NamedTuple):
    """Eviction offer of one request."""

    lost_returns: Floats  # return lost with each further block, ascending, shape (blocks,)
    tenant: str = ""


class EvictionChoice(NamedTuple):
    """Number of blocks to evict from each request."""

    counts: Ints  # blocks per offer, shape (offers,)
    marginal: float  # highest return among them; -inf for none

    @property
    def blocks(self) -> int:
        """Total number of blocks."""
        return int(self.counts.sum())


def cheapest_evictions(
    offers: Sequence[EvictionCurve], min_blocks: int, max_blocks: int, ceiling: float = math.inf,
    evictable_by_tenant: Mapping[str, int] | None = None,
) -> EvictionChoice | None:  # fmt: skip
    """Return the blocks with the lowest returns across requests; None for fewer than `min_blocks`.

    Takes up to `max_blocks`, none with a return above `ceiling`, and at most
    `evictable_by_tenant` of a tenant. A greedy heap merge is optimal: curves ascend, bounds nest.
    """
    left = dict(evictable_by_tenant or {})
    counts: Ints = np.zeros(len(offers), dtype=np.int32)
    # Ties go to the request with more blocks, then to the first offer.
    heap = [
        (float(offer.lost_returns[0]), -len(offer.lost_returns), i)
        for i, offer in enumerate(offers)
        if len(offer.lost_returns)
    ]
    heapify(heap)
    done, marginal = 0, -math.inf
    while heap and done < max_blocks:
        loss, _, i = heap[0]
        if loss > ceiling:
            break
        lost_returns, tenant = offers[i]
        if left.get(tenant, 1) <= 0:
            heappop(heap)
            continue
        if tenant in left:
            left[tenant] -= 1
        counts[i] += 1
        done += 1
        marginal = max(marginal, loss)
        rest = len(lost_returns) - int(counts[i])
        if rest:
            heapreplace(heap, (float(lost_returns[counts[i]]), -rest, i))
        else:
            heappop(heap)
    return EvictionChoice(counts, marginal) if done >= min_blocks else None


def marginal_ahead(offers: Sequence[EvictionCurve], counts: Ints, growth_blocks: float) -> float:
    """Return the highest return among evictions due before scores are renewed; -inf for none."""
    curves = [
        o.lost_returns[n:]
        for o, n in zip(offers, counts.tolist(), strict=True)
        if len(o.lost_returns)
    ]
    known = [curve for curve in curves if len(curve) and math.isfinite(curve[0])]
    if not known:
        return -math.inf
    rest = np.concatenate(known)
    last = min(math.ceil(growth_blocks * len(known)), len(rest)) - 1
    return float(np.partition(rest, last)[last])


def evictable_by_tenant(floors: Mapping[str, int], held: Mapping[str, int]) -> dict[str, int]:
    """Return how many blocks each tenant holds above its floor."""
    return {tenant: max(0, held.get(tenant, 0) - floor) for tenant, floor in floors.items()}
