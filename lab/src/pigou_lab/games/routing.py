"""The routing game: requests choose workers, for latency and for what is cached there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np
from numpy.typing import ArrayLike

from pigou.games import Floats, Indices
from pigou_lab.games import improves

#: Seconds that each of n requests on a worker takes. A `LatencyLaw` is one.
Law = Callable[[float], float]

#: Profiles up to exchange of identical requests, beyond which equilibria are sampled.
MAX_PROFILES = 100_000


class RoutingGame:
    """R requests on W workers: on w, request i pays f_w(n_w) - omega o_iw (Georgiou 2026, Eq. 7).

    ``laws[w]`` is f_w in seconds; ``overlaps`` (requests, workers) the fixed share of each prompt
    held; ``omega`` the seconds a whole prompt saves. Assignments have shape (requests,). Social
    cost is the sum of n_w f_w(n_w), less savings. An exact potential exists, so a pure equilibrium
    does. Raises ValueError for mismatched shapes or non-finite values.
    """

    def __init__(self, laws: Sequence[Law], overlaps: ArrayLike, omega: float) -> None:
        self.laws = list(laws)
        self.overlaps = np.asarray(overlaps, dtype=np.float64)
        self.omega = float(omega)
        if self.overlaps.ndim != 2 or self.overlaps.shape[1] != len(self.laws):
            raise ValueError(
                f"overlaps have shape {self.overlaps.shape}: give (requests, {len(self.laws)}), "
                "a column for each law"
            )
        self.requests, self.workers = self.overlaps.shape
        counts = range(1, self.requests + 1)
        #: Latency at [w, k]: seconds on worker w with k + 1 requests.
        self.latency: Floats = np.array([[float(f(float(k))) for k in counts] for f in self.laws])
        self.savings: Floats = self.omega * self.overlaps
        if not (np.isfinite(self.latency).all() and np.isfinite(self.savings).all()):
            raise ValueError("laws, overlaps and omega must be finite at every possible load")

    def loads(self, assignment: ArrayLike) -> Indices:
        """Return the number of requests on each worker, shape (workers,)."""
        return np.bincount(np.asarray(assignment, dtype=np.intp), minlength=self.workers)

    def saved(self, assignment: ArrayLike) -> float:
        """Return the total seconds saved by cached prefixes."""
        chosen = np.asarray(assignment, dtype=np.intp)
        return float(self.savings[np.arange(self.requests), chosen].sum())

    def social_cost(self, assignment: ArrayLike) -> float:
        """Return the total seconds of all requests; savings can make it negative."""
        return self._over_loads(assignment, self._totals) - self.saved(assignment)

    def potential(self, assignment: ArrayLike) -> float:
        """Return the exact potential: the sum over w of f_w(1) + ... + f_w(n_w), less savings."""
        return self._over_loads(assignment, np.cumsum(self.latency, axis=1)) - self.saved(
            assignment
        )

    def tolls(self, loads: ArrayLike) -> Floats:
        """Return the tolls n_w (f_w(n_w + 1) - f_w(n_w)), (workers,)."""
        counts = [float(n) for n in np.asarray(loads, dtype=np.float64)]
        pairs = zip(self.laws, counts, strict=True)
        return np.array([n * (f(n + 1.0) - f(n)) if n > 0 else 0.0 for f, n in pairs])

    def greedy(self, order: ArrayLike | None = None, *, tolls: bool = False) -> Indices:
        """Return the assignment of requests that arrive in ``order`` and each take their best.

        Each pays f_w(n_w + 1) less savings, plus ``tolls`` if asked; ties go to the lower index.
        With tolls and equal overlaps it is optimal. Raises ValueError unless ``order`` is a
        permutation.
        """
        turns = np.arange(self.requests) if order is None else np.asarray(order, dtype=np.intp)
        if not np.array_equal(np.sort(turns), np.arange(self.requests)):
            raise ValueError(
                "order must name every request once: give a permutation of the indices"
            )
        price = self._marginals if tolls else self.latency
        workers = np.arange(self.workers)
        loads: Indices = np.zeros(self.workers, dtype=np.intp)
        assignment: Indices = np.empty(self.requests, dtype=np.intp)
        for request in turns.tolist():
            choice = int(np.argmin(price[workers, loads] - self.savings[request]))
            assignment[request] = choice
            loads[choice] += 1
        return assignment

    def is_equilibrium(self, assignment: ArrayLike) -> bool:
        """Return whether no request gains by moving alone."""
        chosen = np.asarray(assignment, dtype=np.intp)
        loads = self.loads(chosen)
        return all(self._better(i, chosen, loads) is None for i in range(self.requests))

    def equilibrium(self, seed: int) -> Indices:
        """Return the equilibrium of best responses in random order from a random start."""
        rng = np.random.default_rng(seed)
        start = rng.integers(0, self.workers, size=(self.requests,))
        assignment: Indices = np.asarray(start, dtype=np.intp)
        loads = self.loads(assignment)
        moved = True
        while moved:
            moved = False
            for request in rng.permutation(self.requests).tolist():
                choice = self._better(request, assignment, loads)
                if choice is not None:
                    loads[assignment[request]] -= 1
                    loads[choice] += 1
                    assignment[request] = choice
                    moved = True
        return assignment

    def optimum(self) -> Indices:
        """Return an optimum by min-cost flow; ValueError where some n f_w(n) is not convex."""
        return cheapest_assignment(self._marginals, -self.savings)

    def price_of_anarchy(self, restarts: int = 200, seed: int = 0) -> float:
        """Return the social cost of the worst pure equilibrium over that of the optimum.

        Exact up to 100,000 profiles (identical requests exchanged); else a lower bound from
        ``restarts`` runs. Raises ValueError unless the optimum's cost is above 0: with large
        savings compare differences.
        """
        best = self.social_cost(self.optimum())
        if best <= 0:
            raise ValueError(f"the optimum costs {best}: compare differences, a ratio needs > 0")
        types, kind = np.unique(self.savings, axis=0, return_inverse=True)
        sizes = np.bincount(kind.ravel(), minlength=len(types)).tolist()
        ways = math.prod(math.comb(size + self.workers - 1, size) for size in sizes)
        if ways > MAX_PROFILES:
            equilibria = (self.equilibrium(seed + i) for i in range(restarts))
            return max(self.social_cost(a) for a in equilibria) / best
        return max(self._equilibrium_costs(types, sizes)) / best

    @property
    def _totals(self) -> Floats:
        """n f_w(n) at [w, n - 1]."""
        return self.latency * np.arange(1, self.requests + 1)

    @property
    def _marginals(self) -> Floats:
        """(n + 1) f_w(n + 1) - n f_w(n) at [w, n]."""
        return np.diff(self._totals, axis=1, prepend=0.0)

    def _over_loads(self, assignment: ArrayLike, table: Floats) -> float:
        loads = self.loads(assignment)
        used = np.flatnonzero(loads)
        return float(table[used, loads[used] - 1].sum())

    def _better(self, request: int, assignment: Indices, loads: Indices) -> int | None:
        present = int(assignment[request])
        after = loads.copy()
        after[present] -= 1
        offers = self.latency[np.arange(self.workers), after] - self.savings[request]
        best = int(np.argmin(offers))
        return best if improves(float(offers[best]), float(offers[present])) else None

    def _equilibrium_costs(self, types: Floats, sizes: list[int]) -> Iterator[float]:
        workers = np.arange(self.workers)
        for spread in product(*(list(_compositions(size, self.workers)) for size in sizes)):
            counts = np.array(spread)  # (types, workers)
            loads = counts.sum(axis=0)
            stay = self.latency[workers, np.maximum(loads, 1) - 1] - types
            move = self.latency[workers, np.minimum(loads, self.requests - 1)] - types
            worst_stay = np.where(counts > 0, stay, -np.inf)
            gain = worst_stay[:, :, None] - move[:, None, :]
            gain[:, workers, workers] = -np.inf
            if gain.max() <= 1e-9 * max(1.0, float(np.abs(stay).max())):
                total = (loads * self.latency[workers, np.maximum(loads, 1) - 1]).sum()
                yield float(total - (counts * types).sum())


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in _compositions(total - first, parts - 1):
            yield (first, *rest)


def cheapest_assignment(marginal: Floats, private: Floats) -> Indices:
    """Return the worker of each request, shape (requests,), at least total cost.

    ``marginal`` (workers, requests) at [w, k] is the cost of raising worker w's load from k to k +
    1; ``private`` (requests, workers) is each request's own cost. Successive shortest paths (Jewell
    1958; Ahuja, Magnanti and Orlin, "Network Flows", 9.7), O(requests (workers^3 + requests)).
    Raises ValueError when a row falls.
    """
    requests, workers = private.shape
    _check_convex(marginal)
    assignment: Indices = np.full(requests, -1, dtype=np.intp)
    loads = np.zeros(workers, dtype=np.intp)
    moves = _Moves(private, assignment)
    for request in range(requests):
        cost, before = _shortest(private[request], moves.cost)
        end = int(np.argmin(cost + marginal[np.arange(workers), loads]))
        loads[end] += 1
        touched = [end]
        while before[end] >= 0:
            start = int(before[end])
            assignment[moves.who[start, end]] = end
            end = start
            touched.append(end)
        assignment[request] = end
        moves.refresh(touched)
    return assignment


class _Moves:
    """Cheapest moves between workers: cost and request."""

    def __init__(self, private: Floats, assignment: Indices) -> None:
        workers = private.shape[1]
        self._private = private
        self._assignment = assignment
        self.cost: Floats = np.full((workers, workers), np.inf)
        self.who: Indices = np.full((workers, workers), -1, dtype=np.intp)

    def refresh(self, workers: list[int]) -> None:
        for worker in workers:
            members = np.flatnonzero(self._assignment == worker)
            if not len(members):
                self.cost[worker] = np.inf
                continue
            offers = self._private[members] - self._private[members, worker][:, None]
            best = np.argmin(offers, axis=0)
            self.cost[worker] = offers[best, np.arange(offers.shape[1])]
            self.who[worker] = members[best]
            self.cost[worker, worker] = np.inf


def _shortest(entry: Floats, moves: Floats) -> tuple[Floats, Indices]:
    """Bellman-Ford from outside: cost of making room at each worker, and the worker before it."""
    cost = entry.copy()
    before: Indices = np.full(len(entry), -1, dtype=np.intp)
    slack = 1e-12 * (1.0 + float(np.abs(entry).max()))  # rounding must not make a cycle
    for _ in range(len(entry) - 1):
        through = cost[:, None] + moves
        via = np.argmin(through, axis=0)
        offer = through[via, np.arange(len(entry))]
        better = offer < cost - slack
        if not better.any():
            break
        cost = np.where(better, offer, cost)
        before = np.where(better, via, before)
    return cost, before


def _check_convex(marginal: Floats) -> None:
    fall = np.diff(marginal, axis=1) < -1e-9 * np.maximum(np.abs(marginal[:, 1:]), 1e-300)
    if fall.any():
        worker, load = (int(x) for x in np.argwhere(fall)[0])
        raise ValueError(
            f"marginal cost of worker {worker} falls at load {load + 1}: the optimum is exact only "
            "where n f(n) is convex; fit a LatencyLaw to these costs"
        )
