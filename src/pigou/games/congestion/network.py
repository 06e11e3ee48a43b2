"""A flow over a general graph (Wardrop 1952, Braess 1968)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np

from pigou.games import Floats
from pigou.games.congestion.links import HALVINGS, Cost, check_cost, marginal

Edge = tuple[Hashable, Hashable, Cost]

MAX_PATHS = 10_000
MAX_ROUNDS = 20_000


class Network:
    """Flows from sources to sinks over the edges of a directed graph, each part to its own liking.

    ``edges`` lists (tail, head, cost of flow); a cost must be at least 0, and never fall.
    ``demands`` maps (source, sink) to a flow above 0. Every simple path is listed, so graphs are to
    be small: ValueError beyond 10,000 paths, or for a demand without a path. Flows have shape
    (edges,).
    """

    def __init__(
        self, edges: Sequence[Edge], demands: Mapping[tuple[Hashable, Hashable], float]
    ) -> None:
        self.edges = list(edges)
        self.demands = dict(demands)
        self._paths: list[list[list[int]]] = []
        total = math.fsum(self.demands.values())
        for tail, head, cost in self.edges:
            check_cost(f"the cost of edge {tail!r} to {head!r}", cost, max(total, 0.0))
        for (source, sink), flow in self.demands.items():
            if not flow > 0:
                raise ValueError(f"demand {source!r} to {sink!r} is {flow}: give a flow above 0")
            paths = list(self._simple_paths(source, sink, {source}))
            if not paths:
                raise ValueError(f"no path from {source!r} to {sink!r}: add edges")
            self._paths.append(paths)

    def wardrop(self) -> Floats:
        """Return equilibrium flows: of each demand, every used path costs the same, and least."""
        return self._equilibrate([cost for _, _, cost in self.edges])

    def optimum(self) -> Floats:
        """Return flows of least total cost, where each edge's x cost(x) is convex."""
        return self._equilibrate([_marginal_of(cost) for _, _, cost in self.edges])

    def cost(self, flows: Floats) -> float:
        """Return the total cost: the sum over edges of flow times cost."""
        pairs = zip(flows.tolist(), self.edges, strict=True)
        return math.fsum(x * edge[2](x) for x, edge in pairs if x > 0)

    def price_of_anarchy(self) -> float:
        """Return the equilibrium's total cost over the optimum's."""
        best = self.cost(self.optimum())
        if best <= 0:
            raise ValueError(f"the optimum costs {best}: a ratio needs a cost above 0")
        return self.cost(self.wardrop()) / best

    def tolls(self) -> Floats:
        """Return an edge's toll, x cost'(x) at the optimum: with them, it is an equilibrium."""
        flows = self.optimum().tolist()
        pairs = zip(self.edges, flows, strict=True)
        return np.array([max(0.0, marginal(c, x) - c(x)) for (_, _, c), x in pairs])

    def _simple_paths(
        self, node: Hashable, sink: Hashable, seen: set[Hashable]
    ) -> Iterator[list[int]]:
        if node == sink:
            yield []
            return
        for index, (tail, head, _) in enumerate(self.edges):
            if tail == node and head not in seen:
                for found, rest in enumerate(self._simple_paths(head, sink, seen | {head})):
                    if found >= MAX_PATHS:
                        raise ValueError(f"more than {MAX_PATHS} paths: use a smaller graph")
                    yield [index, *rest]

    def _equilibrate(self, prices: Sequence[Cost]) -> Floats:
        """Move flow from each demand's dearest used path to its cheapest until all are level."""
        flows = np.zeros(len(self.edges))
        shares = [[0.0] * len(paths) for paths in self._paths]
        for demand, flow in enumerate(self.demands.values()):
            shares[demand][0] = flow
            flows[self._paths[demand][0]] += flow
        for _ in range(MAX_ROUNDS):
            gaps = [self._level(prices, flows, d, shares[d]) for d in range(len(shares))]
            if max(gaps) <= 1e-10:
                return flows
        raise RuntimeError(f"not level after {MAX_ROUNDS} rounds: is some cost falling?")

    def _level(
        self, prices: Sequence[Cost], flows: Floats, demand: int, shares: list[float]
    ) -> float:
        """One move of flow within a demand; returns the relative gap of prices before it."""
        paths = self._paths[demand]
        price = [sum(prices[e](float(flows[e])) for e in path) for path in paths]
        used = [p for p, share in enumerate(shares) if share > 1e-13 * sum(shares)]
        dear = max(used, key=price.__getitem__)
        cheap = min(range(len(paths)), key=price.__getitem__)
        gap = (price[dear] - price[cheap]) / max(abs(price[dear]), 1e-300)
        if gap <= 1e-10:
            return gap
        leave = [e for e in paths[dear] if e not in paths[cheap]]
        enter = [e for e in paths[cheap] if e not in paths[dear]]

        def still_dearer(moved: float) -> bool:
            left = sum(prices[e](float(flows[e]) - moved) for e in leave)
            entered = sum(prices[e](float(flows[e]) + moved) for e in enter)
            return left > entered

        low, high = 0.0, shares[dear]
        if still_dearer(high):
            low = high
        for _ in range(HALVINGS if low < high else 0):
            middle = 0.5 * (low + high)
            if still_dearer(middle):
                low = middle
            else:
                high = middle
        shares[dear] -= low
        shares[cheap] += low
        flows[leave] = np.maximum(flows[leave] - low, 0.0)
        flows[enter] += low
        return gap if low > 1e-13 * sum(shares) else 0.0


def _marginal_of(cost: Cost) -> Cost:
    return lambda flow: marginal(cost, flow)
