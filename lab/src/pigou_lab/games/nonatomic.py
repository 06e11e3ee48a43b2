"""Flows over parallel links and graphs: equilibria (Wardrop 1952), optima and their tolls."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from pigou.games import Floats

Cost = Callable[[float], float]

#: Halvings of an interval: enough to reach neighbouring floats.
HALVINGS = 100


def marginal(cost: Cost, flow: float) -> float:
    """Return d/dx of x cost(x) at ``flow``; infinite where the cost is.

    By differences, unless the cost has a method ``marginal`` that knows it.
    """
    if (known := getattr(cost, "marginal", None)) is not None:
        return float(known(flow))
    step = 1e-5 * max(flow, 1e-3)
    low = max(flow - step, 0.0)
    high = flow + step
    cost_low, cost_high = low * cost(low), high * cost(high)
    if not math.isfinite(cost_high):
        return math.inf
    return (cost_high - cost_low) / (high - low)


def check_cost(name: str, cost: Cost, demand: float) -> None:
    """Raise ValueError if a cost is negative, falls or is no number, up to flow `demand`."""
    before = 0.0
    for flow in (0.0, 0.5 * demand, demand):
        value = cost(flow)
        if not value >= 0:
            raise ValueError(f"{name} is {value} at a flow of {flow:g}; it must be at least 0")
        if value < before:
            raise ValueError(f"{name} falls to {value} at a flow of {flow:g}; it must never fall")
        before = value


class NonatomicGame(ABC):
    """Infinitesimal parts of flow that each choose the cheapest way over priced edges.

    Flows have shape (edges,), and ``costs[i]`` is edge i's cost of flow.
    """

    costs: Sequence[Cost]

    @abstractmethod
    def _level_flows(self, prices: Sequence[Cost]) -> Floats:
        """Return flows at which no part finds a cheaper way, by these prices of the edges."""

    def wardrop(self) -> Floats:
        """Return equilibrium flows: each used way costs the same, and no unused one less."""
        return self._level_flows(self.costs)

    def optimum(self) -> Floats:
        """Return flows of least total cost, where x cost(x) is convex: marginal costs are level."""
        return self._level_flows([partial(marginal, cost) for cost in self.costs])

    def cost(self, flows: Floats) -> float:
        """Return the total cost: the sum over edges of flow times cost."""
        pairs = zip(flows.tolist(), self.costs, strict=True)
        return math.fsum(x * cost(x) for x, cost in pairs if x > 0)

    def price_of_anarchy(self) -> float:
        """Return the equilibrium's total cost over the optimum's (all equilibria cost the same)."""
        best = self.cost(self.optimum())
        if best <= 0:
            raise ValueError(f"the optimum costs {best}: a ratio needs a cost above 0")
        return self.cost(self.wardrop()) / best

    def tolls(self) -> Floats:
        """Return Pigou's tolls, x cost'(x) at the optimum: with them, it is the equilibrium."""
        flows = self.optimum().tolist()
        return np.array(
            [max(0.0, marginal(c, x) - c(x)) for c, x in zip(self.costs, flows, strict=True)]
        )


class ParallelLinks(NonatomicGame):
    """A demand that spreads over parallel links, each infinitesimal part selfishly.

    ``costs[i]`` is link i's cost of flow: non-negative, non-decreasing, perhaps infinite. Flows
    have shape (links,). Raises ValueError for an invalid cost, or if no finite cost carries
    ``demand``.
    """

    def __init__(self, costs: Sequence[Cost], demand: float) -> None:
        if not costs or not 0 < demand < math.inf:
            raise ValueError(f"{len(costs)} links, demand {demand}: give a link, and a demand > 0")
        for link, cost in enumerate(costs):
            check_cost(f"costs[{link}]", cost, demand)
        self.costs = list(costs)
        self.demand = float(demand)

    def with_tolls(self, tolls: Floats) -> ParallelLinks:
        """Return the same links, each with its toll added to its cost."""
        return ParallelLinks(
            [_plus(c, t) for c, t in zip(self.costs, tolls, strict=True)], self.demand
        )

    def _level_flows(self, prices: Sequence[Cost]) -> Floats:
        """Spread the demand so that prices are level; links with flat prices share the rest."""
        low, high = 0.0, self._enough(prices)
        for _ in range(2 * HALVINGS):
            middle = 0.5 * (low + high)
            if not low < middle < high:
                break
            if self._taken(prices, middle).sum() >= self.demand:
                high = middle
            else:
                low = middle
        min_flows, max_flows = self._taken(prices, low), self._taken(prices, high)
        jump = max_flows.sum() - min_flows.sum()
        share = (self.demand - min_flows.sum()) / jump if jump > 0 else 0.0
        flows: Floats = min_flows + min(max(share, 0.0), 1.0) * (max_flows - min_flows)
        return flows * float(self.demand / flows.sum())

    def _enough(self, prices: Sequence[Cost]) -> float:
        level = 1.0
        while self._taken(prices, level).sum() < self.demand:
            level *= 2.0
            if level > 1e30:
                raise ValueError(f"no finite cost carries a demand of {self.demand}: add capacity")
        return level

    def _taken(self, prices: Sequence[Cost], level: float) -> Floats:
        return np.array([self._flow_up_to(price, level) for price in prices])

    def _flow_up_to(self, price: Cost, level: float) -> float:
        """The largest flow, at most the demand, whose price is at or under ``level``."""
        if price(self.demand) <= level:
            return self.demand
        if price(0.0) > level:
            return 0.0
        low, high = 0.0, self.demand
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            if not low < middle < high:
                break
            if price(middle) <= level:
                low = middle
            else:
                high = middle
        return low


def _plus(cost: Cost, toll: float) -> Cost:
    return lambda flow: cost(flow) + toll


Edge = tuple[Hashable, Hashable, Cost]

MAX_PATHS = 10_000
MAX_ROUNDS = 20_000


class FlowNetwork(NonatomicGame):
    """Flows from sources to sinks over the edges of a directed graph, each part selfish.

    ``edges`` lists (tail, head, non-decreasing cost of flow); ``demands`` maps (source, sink) to
    flow. Flows have shape (edges,). Raises ValueError beyond 10,000 simple paths, or without a
    path.
    """

    def __init__(
        self, edges: Sequence[Edge], demands: Mapping[tuple[Hashable, Hashable], float]
    ) -> None:
        self.edges = list(edges)
        self.costs = [cost for _, _, cost in self.edges]
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

    def _simple_paths(
        self, node: Hashable, sink: Hashable, seen: set[Hashable]
    ) -> Iterator[list[int]]:
        if node == sink:
            yield []
            return
        for index, (tail, head, _) in enumerate(self.edges):
            if tail == node and head not in seen:
                for paths_before, rest in enumerate(self._simple_paths(head, sink, seen | {head})):
                    if paths_before >= MAX_PATHS:
                        raise ValueError(f"more than {MAX_PATHS} paths: use a smaller graph")
                    yield [index, *rest]

    def _level_flows(self, prices: Sequence[Cost]) -> Floats:
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
