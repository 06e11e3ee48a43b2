"""The cheapest assignment of requests to workers whose costs are convex in their loads."""

from __future__ import annotations

import numpy as np

from pigou.games import Floats, Indices


def cheapest_assignment(marginal: Floats, private: Floats) -> Indices:
    """Return the worker of each request, shape (requests,), at least total cost.

    ``marginal`` (workers, requests) holds at [w, k] what the load of worker w adds to the cost when
    it grows from k to k + 1; rows never fall. ``private`` (requests, workers) is what each request
    pays besides. This is a minimum-cost flow, solved by successive shortest paths (Jewell 1958;
    Ahuja, Magnanti and Orlin, "Network Flows", 9.7): each request in turn enters along the cheapest
    chain of moves, at whose end one worker's load grows by one. O(requests (workers^3 +
    requests)) time. Raises ValueError when a row falls, as the flow would then not be exact.
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
    """The cheapest move from each worker to each other: its cost, and the request that makes it."""

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
