"""Eviction across requests: which give up how many blocks, so that memory is never exceeded.

Source: seed token-pd (Token-PD), section 3: a knapsack of tokens of equal size over all requests,
whose optimum is a threshold on their returns. Its price meets the budget on average only; here
the cut is exact, for blocks come free as wholes, and the price is what the cut shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

import numpy as np

from pigou.kv.memory_price import Floats
from pigou.request import Ints


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
    offers: Sequence[EvictionCurve],
    min_blocks: int,
    max_blocks: int,
    ceiling: float = math.inf,
    evictable_by_tenant: Mapping[str, int] | None = None,
) -> EvictionChoice | None:
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
