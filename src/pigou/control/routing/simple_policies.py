"""Baselines: random, round robin, least loaded, and power of two choices."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pigou.control.routing.policy import Costs, RequestView
from pigou.control.routing.pool_policy import Pool, PoolPolicy, Rows, pending
from pigou.control.routing.view import Candidates, FleetView
from pigou.request import Counts, Request


class PowerOfTwo(PoolPolicy):
    """Requests in flight of two random workers per pool, infinity for others.

    Mitzenmacher 2001; default of Ray Serve, and `power_of_two` of SGLang's gateway.
    """

    name: ClassVar[str] = "power-of-two"

    def __init__(self, seed: int = 0) -> None:
        self._generator = np.random.default_rng(seed)

    def pool_costs(
        self, request: RequestView, fleet: FleetView, rows: Rows, pool: Pool
    ) -> dict[str, Costs]:
        """Return requests in flight, (rows,)."""
        return {"requests": two_choices(pending(fleet, rows, pool), self._generator)}


def two_choices(load: Counts, generator: np.random.Generator) -> Costs:
    """Return the load of two random entries, infinity for others, shape of `load`."""
    costs = np.full(len(load), np.inf)
    one = int(generator.integers(len(load)))
    costs[one] = load[one]
    if len(load) > 1:
        other = int(generator.integers(len(load) - 1))
        other += other >= one
        costs[other] = load[other]
    return costs


class RandomRouting(PoolPolicy):
    """Every worker costs 0, and ties are random, in each pool."""

    name: ClassVar[str] = "random"

    def pool_costs(
        self, request: RequestView, fleet: FleetView, rows: Rows, pool: Pool
    ) -> dict[str, Costs]:
        """Return zeros, (rows,)."""
        return {"chance": np.zeros(len(rows))}


class RoundRobin(PoolPolicy):
    """Turns until worker i is next, per pool: cost_i = (i - next) mod workers."""

    name: ClassVar[str] = "round-robin"

    def __init__(self) -> None:
        self._next = dict.fromkeys(Pool, 0)

    def pool_costs(
        self, request: RequestView, fleet: FleetView, rows: Rows, pool: Pool
    ) -> dict[str, Costs]:
        """Return the turns, (rows,)."""
        turns = (rows - self._next[pool]) % len(fleet.ids)
        self._next[pool] = int(rows[turns.argmin()]) + 1
        return {"turn": turns.astype(float)}


class LeastLoaded:
    """Fewest streams on the decode worker, then fewest prompt tokens on the prefill worker.

    cost(p, d) = decode_requests[d] + s(p), s(p) = t / (2 (t + 1)) for t = prefill_tokens[p], and
    3/4 for local prefill: s only breaks ties, and prefill is remote if possible.
    """

    name: ClassVar[str] = "least-loaded"

    def costs(
        self, request: Request, fleet: FleetView, candidates: Candidates
    ) -> NDArray[np.float64]:
        """Return one cost per candidate, in streams."""
        tokens = fleet.prefill_tokens[candidates.prefill].astype(np.float64)
        share = np.where(candidates.prefill < 0, 0.75, tokens / (2 * (tokens + 1)))
        return fleet.decode_requests[candidates.decode].astype(np.float64) + share
