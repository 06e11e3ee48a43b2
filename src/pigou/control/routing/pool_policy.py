"""Policies made for one pool of workers, applied to pairs of workers."""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.control.routing.policy import CostParts, Costs, RequestView, total
from pigou.control.routing.view import Candidates, FleetView
from pigou.request import Counts

#: Indices of workers, distinct.
Rows: TypeAlias = NDArray[np.integer]


class Pool(Enum):
    """The pool to choose from: whole requests, prefill, or decode."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"


class PoolPolicy:
    """A policy that scores one pool of workers; pairs are scored pool by pool.

        cost(-1, d) = W(d)                            in a fleet without separate pools
        cost(p, d)  = D(d) + (P(p) - min over p' of P(p'))
        cost(-1, d) = D(d), and infinity where the same d is also offered with a prefill worker

    W, P and D score a whole request, its prefill and its decode. The choice equals that of two
    routers in a row, with remote prefill whenever possible (`ConditionalDisaggregation` adds a
    threshold).
    """

    def pool_costs(
        self, request: RequestView, fleet: FleetView, rows: Rows, pool: Pool
    ) -> dict[str, Costs]:
        """Return the parts of the score of workers `rows` for a pool, (rows,) each."""
        raise NotImplementedError

    def costs(self, request: RequestView, fleet: FleetView, candidates: Candidates) -> Costs:
        """Return one cost per candidate, in the policy's own unit."""
        return total(self.parts(request, fleet, candidates), len(candidates))

    def parts(self, request: RequestView, fleet: FleetView, candidates: Candidates) -> CostParts:
        """Return the parts of the cost, those of the prefill pool named `prefill_...`."""
        remote = candidates.prefill >= 0
        if not remote.any():
            apart = request.splits and bool((fleet.prefills != fleet.decodes).any())
            pool = Pool.DECODE if apart else Pool.AGGREGATED
            return self.pool_costs(request, fleet, candidates.decode, pool)
        workers = len(fleet.ids)
        streams = _distinct(candidates.decode, workers)
        computes = _distinct(candidates.prefill, workers)
        parts = {}
        for name, part in self.pool_costs(request, fleet, streams, Pool.DECODE).items():
            parts[name] = _spread(part, streams, candidates.decode, workers)
        prefill = self.pool_costs(request, fleet, computes, Pool.PREFILL)
        for name, part in prefill.items():
            parts[f"prefill_{name}"] = _spread(part, computes, candidates.prefill, workers)
        best = total(prefill, len(computes)).min()
        parts["prefill_best"] = remote * (-best if best < np.inf else 0.0)
        local_cost = np.zeros(workers)
        local_cost[candidates.decode[remote]] = np.inf
        parts["local_too"] = local_cost[candidates.decode]
        parts["local_too"][remote] = 0.0
        return parts


def pending(fleet: FleetView, rows: Rows, pool: Pool) -> Counts:
    """Return the requests in flight on workers for a pool, (rows,)."""
    counts = fleet.prefill_requests if pool is Pool.PREFILL else fleet.decode_requests
    requests: Counts = counts[rows]
    return requests


def _distinct(at: Rows, workers: int) -> Rows:
    marks = np.zeros(workers + 1, dtype=np.bool_)
    marks[at] = True
    return np.flatnonzero(marks[:-1])


def _spread(part: Costs, rows: Rows, at: Rows, workers: int) -> Costs:
    whole = np.zeros(workers + 1)
    whole[rows] = part
    entries: Costs = whole[at]
    return entries
