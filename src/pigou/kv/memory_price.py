"""The price of memory, and eviction across requests: which give up how many blocks.

Source: seed token-pd (Token-PD), sections 3 and 4. Its price `mu` is per byte and its cost `c` the
bytes of a token; here prices are per block, and a block costs 1, so that `mu c` is the price
itself. Returns are in the unit of their prediction. Eviction is a knapsack of tokens of equal size
over all requests, whose optimum is a threshold on their returns. Its price meets the budget on
average only; here the cut is exact, for blocks come free as wholes, and the price is what the cut
shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pigou.request import Ints

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
    (`cheapest_evictions`); from cut to cut it jumps. Its geometric mean over time, newer cuts
    weighing more, is exponentiated gradient with a constant rate. The price moves by `share` of the
    distance; distances below `deadband`, in natural logarithms, change nothing.
    """
    target = max(marginal, FLOOR)
    distance = math.log(target / price)
    if abs(distance) < deadband:
        return price
    return max(price * math.exp(share * distance), FLOOR)


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


class EvictionCurve(NamedTuple):
    """What one request can give up."""

    lost_returns: Floats  # return that is lost with each further block, ascending, shape (blocks,)
    tenant: str = ""


class EvictionChoice(NamedTuple):
    """How many blocks each request gives up."""

    counts: Ints  # blocks of each offer, shape (offers,)
    marginal: float  # return of the dearest block among them; -inf for none

    @property
    def blocks(self) -> int:
        """Blocks in all."""
        return int(self.counts.sum())


def cheapest_evictions(
    offers: Sequence[EvictionCurve], min_blocks: int, max_blocks: int, ceiling: float = math.inf,
    evictable_by_tenant: Mapping[str, int] | None = None,
) -> EvictionChoice | None:  # fmt: skip
    """Return the blocks that lose the least return, across requests; None for too few.

    A heap merges the curves. As each is ascending, and the bounds are nested (blocks of a request
    within those of its tenant within all), the greedy merge is optimal. It takes up to
    `max_blocks`, none that loses more than `ceiling`, and no more of a tenant than
    `evictable_by_tenant`.
    """
    left = dict(evictable_by_tenant or {})
    counts: Ints = np.zeros(len(offers), dtype=np.int32)
    # Of equal losses, the one with more to give goes first; then the first offer.
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
    """Return what the dearest block earns that will have to go before curves are renewed.

    Until then each request gives up as much as it grows (`growth_blocks`), wherever that is
    cheapest. The return at that cut is the exact dual variable of what is foreseen. `offers` are
    from before a cut that takes `counts` of each; unknown (infinite) curves are left out. -inf
    where no block is left.
    """
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
    """Return how many blocks each tenant with a floor can still give up."""
    return {tenant: max(0, held.get(tenant, 0) - floor) for tenant, floor in floors.items()}
