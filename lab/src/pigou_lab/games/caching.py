"""Caching game: each node holds what is cheap for itself, others fetch copies from it.

Chun et al., "Selfish Caching in Distributed Systems" (PODC 2004), with capacities and tiers
(Georgiou 2026, Definition 2 and Eq. 6).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from numpy.typing import ArrayLike

from pigou.games import Floats, Indices
from pigou_lab.games import improves

#: In a placement: the node does not hold the object.
ABSENT = -1
#: Games with more profiles than this are searched, not enumerated.
MAX_PROFILES = 100_000
MAX_ROUNDS = 1000


class CachingGame:
    """n nodes and m objects; each node chooses what it holds, and in which tier.

    ``distance`` (nodes, nodes) is the cost of a remote access, ``demand`` (nodes, objects) the
    access rate, ``placement_cost`` (scalar or (nodes,)) paid per object held, ``tiers`` their
    rising access costs, ``capacity`` objects per tier (scalar, (nodes,) or (nodes, tiers)),
    ``miss_cost`` that of an object nobody holds (None: infinite). A placement (nodes, objects)
    holds a tier or -1. ``exact`` enumerates, up to 100,000 profiles; else ``restarts`` seeded runs
    search. Raises ValueError.
    """

    def __init__(
        self,
        distance: ArrayLike,
        demand: ArrayLike,
        placement_cost: ArrayLike,
        capacity: ArrayLike | None = None,
        miss_cost: float | None = None,
        tiers: Sequence[float] | None = None,
        *,
        restarts: int = 50,
        seed: int = 0,
    ) -> None:
        self.distance: Floats = np.asarray(distance, dtype=np.float64)
        self.demand: Floats = np.asarray(demand, dtype=np.float64)
        if self.demand.ndim != 2 or self.distance.shape != (len(self.demand),) * 2:
            raise ValueError(
                f"distance {self.distance.shape} and demand {self.demand.shape} do not fit: give "
                "(nodes, nodes) and (nodes, objects)"
            )
        self.nodes, self.objects = self.demand.shape
        self.tiers: Floats = np.asarray([0.0] if tiers is None else tiers, dtype=np.float64)
        self.miss_cost = math.inf if miss_cost is None else float(miss_cost)
        self.placement_cost: Floats = np.broadcast_to(
            np.asarray(placement_cost, dtype=np.float64), (self.nodes,)
        )
        self.capacity = self._capacity(capacity)
        self.restarts, self.seed = restarts, seed
        self._check()
        self._choices = self._enumerate_choices()
        self._equilibria: list[Indices] | None = None

    @property
    def exact(self) -> bool:
        """Whether the game is small enough to be enumerated."""
        return self._choices is not None

    def node_costs(self, placement: ArrayLike) -> Floats:
        """Return each node's cost of placement and accesses, shape (nodes,)."""
        held = np.asarray(placement, dtype=np.intp)
        return np.array([self._own_cost(i, held[i], self._remote(i, held)) for i in self._all])

    def social_cost(self, placement: ArrayLike) -> float:
        """Return the total cost of all nodes."""
        return float(self.node_costs(placement).sum())

    def best_response(self, node: int, placement: ArrayLike) -> Indices:
        """Return ``node``'s cheapest row, the others fixed: (objects,), by exact assignment."""
        return self._best_row(node, self._remote(node, np.asarray(placement, dtype=np.intp)))

    def is_equilibrium(self, placement: ArrayLike) -> bool:
        """True if no node gains by changing its row."""
        held = np.asarray(placement, dtype=np.intp)
        return all(not self._can_improve(i, held) for i in self._all)

    def equilibria(self) -> list[Indices]:
        """Return the pure equilibria: all of them if ``exact``, else those that were reached."""
        if self._equilibria is None:
            if self._choices is not None:
                self._equilibria = [p for p in self._profiles() if self.is_equilibrium(p)]
            else:
                self._equilibria = self._reached()
        return self._equilibria

    def optimum(self) -> Indices:
        """Return a placement of least social cost, or the best found where not ``exact``."""
        if self._choices is not None:
            return min(self._profiles(), key=self.social_cost).copy()
        starts = [self._descend(self._random(k)) for k in range(self.restarts)]
        starts += [self._descend(p) for p in self.equilibria()]
        return min(starts, key=self.social_cost)

    def price_of_anarchy(self) -> float:
        """Return the social cost of the worst equilibrium over that of the optimum."""
        return self._price(max(map(self.social_cost, self._some_equilibria())))

    def price_of_stability(self) -> float:
        """Return the social cost of the best equilibrium over that of the optimum."""
        return self._price(min(map(self.social_cost, self._some_equilibria())))

    def _price(self, cost: float) -> float:
        best = self.social_cost(self.optimum())
        if best > 0:
            return cost / best
        if cost == best:
            return 1.0
        raise ValueError(f"the optimum costs {best}: a ratio needs a cost above 0")

    def _some_equilibria(self) -> list[Indices]:
        equilibria = self.equilibria()
        if not equilibria:
            raise ValueError("no pure equilibrium was found: the price is not defined")
        return equilibria

    @property
    def _all(self) -> range:
        return range(self.nodes)

    def _capacity(self, capacity: ArrayLike | None) -> Indices:
        """Slots of each tier of each node, (nodes, tiers); as many as objects where unlimited."""
        given = np.asarray(self.objects if capacity is None else capacity)
        if given.ndim == 1:
            given = given[:, None]
        shape = (self.nodes, len(self.tiers))
        if given.ndim == 2 and given.shape != shape:
            raise ValueError(f"capacity has shape {given.shape}: give {shape} (nodes, tiers)")
        limited = np.minimum(np.broadcast_to(given, shape), self.objects)
        return np.asarray(limited, dtype=np.intp)

    def _check(self) -> None:
        arrays = (self.distance, self.demand, self.tiers, self.placement_cost, self.capacity)
        if not all(np.isfinite(a).all() and (a >= 0).all() for a in arrays):
            raise ValueError("distances, demands, costs and capacities must be finite and >= 0")
        if (np.diff(self.tiers) < 0).any():
            raise ValueError(f"tiers are {self.tiers.tolist()}: list them from cheap to dear")
        if not self.miss_cost >= 0:
            raise ValueError(f"miss_cost is {self.miss_cost}: give 0 or more, or None")

    def _remote(self, node: int, held: Indices) -> Floats:
        access = np.where(held == ABSENT, np.inf, self.tiers[held])
        access = access + self.distance[node][:, None]
        access[node] = np.inf
        cheapest: Floats = np.minimum(access.min(axis=0), self.miss_cost)
        return cheapest

    def _own_cost(self, node: int, row: Indices, remote: Floats) -> float:
        access = np.where(row == ABSENT, remote, np.minimum(remote, self.tiers[row]))
        wanted = self.demand[node] > 0
        accesses = float(self.demand[node][wanted] @ access[wanted])
        return accesses + float(self.placement_cost[node]) * int(np.count_nonzero(row != ABSENT))

    def _can_improve(self, node: int, held: Indices) -> bool:
        remote = self._remote(node, held)
        best = self._own_cost(node, self._best_row(node, remote), remote)
        return improves(best, self._own_cost(node, held[node], remote))

    def _best_row(self, node: int, remote: Floats) -> Indices:
        """Assign objects to slots; a dummy slot stands for not held."""
        tier_of_slot = np.repeat(np.arange(len(self.tiers)), self.capacity[node])
        demand = self.demand[node][:, None]
        # An infinite miss is stood in for by a cost beyond all others: one miss outweighs them.
        dear = 1.0 + float(self.demand[node].max(initial=0) * self.tiers.max())
        dear += float(self.distance.max(initial=0) * self.demand.sum()) + self.placement_cost[node]
        absent = np.where(np.isinf(remote), dear * (self.objects + 1), remote)
        access = np.minimum(absent[:, None], self.tiers[tier_of_slot][None, :])
        hold_cost = demand * access + self.placement_cost[node]
        absent_cost = np.full((self.objects, self.objects), np.inf)
        np.fill_diagonal(absent_cost, self.demand[node] * absent)
        from scipy.optimize import linear_sum_assignment  # half of a gateway's import time

        rows, columns = linear_sum_assignment(np.hstack([absent_cost, hold_cost]))
        row: Indices = np.full(self.objects, ABSENT, dtype=np.intp)
        cached = columns >= self.objects
        row[rows[cached]] = tier_of_slot[columns[cached] - self.objects]
        return row

    def _enumerate_choices(self) -> list[list[Indices]] | None:
        rows = (len(self.tiers) + 1) ** self.objects
        if rows**self.nodes > MAX_PROFILES**2 or rows > MAX_PROFILES:
            return None
        choices = []
        for node in self._all:
            every = product(range(ABSENT, len(self.tiers)), repeat=self.objects)
            legal = [np.array(row, dtype=np.intp) for row in every]
            choices.append([row for row in legal if self._fits(node, row)])
        count = math.prod(len(mine) for mine in choices)
        return choices if count <= MAX_PROFILES else None

    def _fits(self, node: int, row: Indices) -> bool:
        used = np.bincount(row[row != ABSENT], minlength=len(self.tiers))
        return bool((used <= self.capacity[node]).all())

    def _profiles(self) -> Iterator[Indices]:
        for rows in product(*(self._choices or [])):
            yield np.stack(rows)

    def _random(self, run: int) -> Indices:
        rng = np.random.default_rng((self.seed, run))
        placement: Indices = np.full((self.nodes, self.objects), ABSENT, dtype=np.intp)
        for node in self._all:
            slots = np.repeat(np.arange(len(self.tiers)), self.capacity[node])
            slots = rng.permutation(slots[rng.random(len(slots)) < rng.random()])[: self.objects]
            placement[node, rng.permutation(self.objects)[: len(slots)]] = slots
        return placement

    def _reached(self) -> list[Indices]:
        equilibria: dict[bytes, Indices] = {}
        for run in range(self.restarts):
            placement = self._random(run)
            rng = np.random.default_rng((self.seed, run, 1))
            for _ in range(MAX_ROUNDS):
                if not self._one_round(placement, rng):
                    equilibria[placement.tobytes()] = placement
                    break
        return list(equilibria.values())

    def _one_round(self, placement: Indices, rng: np.random.Generator) -> bool:
        moved = False
        for node in rng.permutation(self.nodes).tolist():
            if self._can_improve(node, placement):
                placement[node] = self.best_response(node, placement)
                moved = True
        return moved

    def _descend(self, placement: Indices) -> Indices:
        """Lower the social cost by single changes and swaps."""
        best, cost = placement.copy(), self.social_cost(placement)
        improved = True
        while improved:
            improved = False
            for step in self._steps(best):
                lower = self.social_cost(step)
                if improves(lower, cost):
                    best, cost, improved = step, lower, True
                    break
        return best

    def _steps(self, placement: Indices) -> Iterator[Indices]:
        for node, item in product(self._all, range(self.objects)):
            for tier in range(ABSENT, len(self.tiers)):
                step = placement.copy()
                step[node, item] = tier
                if tier != placement[node, item] and self._fits(node, step[node]):
                    yield step
            for other in range(item):
                if placement[node, item] != placement[node, other]:
                    step = placement.copy()
                    step[node, [item, other]] = placement[node, [other, item]]
                    yield step
