"""Studies of caching games: the price by topology, the cache paradox, tiers that lead.

Chun et al., "Selfish Caching in Distributed Systems" (PODC 2004); Georgiou 2026, section 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import NamedTuple

import numpy as np

from pigou.games import Floats
from pigou_lab.games.caching import CachingGame
from pigou_lab.games.hierarchy import two_levels
from pigou_lab.games.normal_form import Commitment, NormalFormGame


class SocialCosts(NamedTuple):
    """Social costs of a game's optimum, and of its best and worst pure equilibrium."""

    optimum: float
    best: float
    worst: float

    @property
    def price_of_anarchy(self) -> float:
        """Return the worst equilibrium's cost over the optimum's."""
        return self.worst / self.optimum

    @property
    def price_of_stability(self) -> float:
        """Return the best equilibrium's cost over the optimum's."""
        return self.best / self.optimum


def costs_of(game: CachingGame) -> SocialCosts:
    """Return the social costs of an enumerated game; ValueError without a pure equilibrium."""
    if not game.exact:
        raise ValueError("the game is too large to enumerate: give fewer nodes or objects")
    found = [game.social_cost(placement) for placement in game.equilibria()]
    if not found:
        raise ValueError("no pure equilibrium: the price is not defined")
    return SocialCosts(game.social_cost(game.optimum()), min(found), max(found))


def line_costs(nodes: int, alpha: float) -> SocialCosts:
    """Return the social costs of one object on a line with unit spacing, in O(nodes^2).

    Everybody wants it once, and a copy costs alpha. Copies are an equilibrium where neighbouring
    ones are alpha apart or more, and no node is further than alpha from one.
    """
    _check_single(nodes, alpha)
    inner = [sum(min(k, gap - k) for k in range(1, gap)) for gap in range(nodes + 1)]
    tail = [k * (k + 1) // 2 for k in range(nodes)]
    best = list[float]()
    for stable, pick in ((False, min), (True, min), (True, max)):
        bad = math.inf if pick is min else -math.inf
        ends: list[float] = [bad] * nodes  # cost up to a copy at q, the last so far
        several: list[float] = [bad] * nodes  # cost of the same with a copy before it
        for q in range(nodes):
            if not stable or q <= alpha:
                ends[q] = tail[q] + alpha
            for p in range(q):
                gap = q - p
                if not stable or (gap >= alpha and gap // 2 <= alpha):
                    several[q] = pick(several[q], ends[p] + inner[gap] + alpha)
            ends[q] = pick(ends[q], several[q])
        closed = [ends[q] + tail[nodes - 1 - q] for q in range(nodes)
                  if not stable or nodes - 1 - q <= alpha]  # fmt: skip
        best.append(float(pick(closed)))
    return SocialCosts(*best)


def cluster_costs(
    clusters: int, size: int, alpha: float, near: float = 1.0, far: float = 1.0
) -> SocialCosts:
    """Return the social costs of one object in clusters: `near` within one, `far` between them.

    One cluster is a complete graph. Everybody wants the object once, and a copy costs alpha.
    """
    _check_single(clusters * size, alpha)
    if not 0 <= near <= far:
        raise ValueError(f"near is {near} and far {far}: give 0 <= near <= far")
    optimum, stable = math.inf, list[float]()
    # A cluster has no copy, one, or as many as any number: only the counts matter.
    for counts in combinations_of(clusters, size):
        if not any(counts):
            continue
        alone = sum(map(bool, counts)) == 1
        cost = sum(alpha * c + (size - c) * (near if c else far) for c in counts)
        optimum = min(optimum, cost)
        stays = all(
            (c < 2 or alpha <= near) and (c != 1 or alone or alpha <= far)
            and (c == size or (near if c else far) <= alpha)
            for c in counts
        )  # fmt: skip
        if stays:
            stable.append(cost)
    return SocialCosts(optimum, min(stable), max(stable))


def combinations_of(clusters: int, size: int) -> list[tuple[int, ...]]:
    """Return the numbers of copies in clusters that are alike, in falling order."""
    found: list[tuple[int, ...]] = [()]
    for _ in range(clusters):
        found = [(*c, k) for c in found for k in range((c[-1] if c else size) + 1)]
        if len(found) > 200_000:
            raise ValueError(f"{clusters} clusters of {size} are too many: give fewer")
    return found


def _check_single(nodes: int, alpha: float) -> None:
    if nodes < 1 or not 0 <= alpha < math.inf:
        raise ValueError(f"{nodes} nodes, alpha {alpha}: give a node, and a finite alpha >= 0")


def crowded(distance: Floats, miss: float) -> CachingGame:
    """Return a game of slots: node 0 wants two objects, all others hardly want one of their own.

    Each node has one slot. Node 1 could serve node 0, and holds what it wants 1 / miss of instead.
    """
    nodes = len(distance)
    demand = np.zeros((nodes, nodes + 1))
    demand[0, :2] = 1.0
    for node in range(1, nodes):
        demand[node, node + 1] = 1.0 / miss
    return CachingGame(distance, demand, 0.0, capacity=1, miss_cost=miss)


class Paradox(NamedTuple):
    """A caching game, and the same with more of something: all equilibria are dearer."""

    change: str
    before: CachingGame
    after: CachingGame


def cache_paradoxes(miss: float = 10.0) -> list[Paradox]:
    """Return games in which a larger cache, or a new link, raises the cost of every equilibrium.

    Worker C has no cache, and reads y from its neighbour B. B holds y, until it can read y from A:
    because A has room for y too, or because a link to A opens. Then B holds z, which it wants a
    little less, and C reads y from afar. Costs grow by up to miss / 1. In the manner of Braess;
    Ma et al. show the like on directed graphs.
    """
    if not 2 < miss < math.inf:
        raise ValueError(f"miss is {miss}: give a finite cost above 2")
    away = miss - 1.0
    linked = np.array([[0, away, miss], [away, 0, 1], [miss, 1, 0]])
    apart = np.array([[0, miss, miss], [miss, 0, 1], [miss, 1, 0]])
    # B's value of y, 1.05 misses, is above that of z, one; at `away` it is below.
    wish = 1.0 + 0.5 / miss
    demand = [[1.0, 0.01, 0.0], [0.0, wish, 1.0], [0.0, 10.0, 0.0]]  # objects x, y, z

    def game(distance: Floats, slots: int) -> CachingGame:
        return CachingGame(distance, demand, 0.0, capacity=[slots, 1, 0], miss_cost=miss)

    return [
        Paradox("one more slot for A", game(linked, 1), game(linked, 2)),
        Paradox("a link between A and B", game(apart, 2), game(linked, 2)),
    ]


@dataclass(frozen=True)
class TierGame:
    """Tiers of a worker as players: each holds objects for what it and those above pay.

    Requests go down the tiers to the first that holds their object, or are missed. Tier t pays for
    the requests that come to it, and for its own slots: c_t a request that it holds, the cost below
    for others, and `price[t]` an object held. HBM is the first. Raises ValueError for wrong values.
    """

    demand: Sequence[float]  # accesses of each object
    access: Sequence[float]  # cost of an access to each tier, rising
    capacity: Sequence[int]  # objects of each tier
    price: Sequence[float]  # cost of holding an object, by tier
    miss: float  # cost of an access that no tier holds; at least that of the last

    def __post_init__(self) -> None:
        tiers = len(self.access)
        if not tiers or {len(self.capacity), len(self.price)} != {tiers}:
            raise ValueError(
                f"{tiers} tiers, {len(self.capacity)} capacities, {len(self.price)} prices: give "
                "one of each a tier"
            )
        values = [*self.demand, *self.access, *self.price, *self.capacity, self.miss]
        if not self.demand or not all(0 <= value < math.inf for value in values):
            raise ValueError("demand, costs, capacities and prices must be finite, at least 0")
        if list(self.access) != sorted(self.access) or self.miss < self.access[-1]:
            raise ValueError(
                f"access is {list(self.access)} and miss {self.miss}: list tiers from cheap to "
                "dear, and the miss as the dearest"
            )

    def strategies(self, tier: int) -> list[tuple[int, ...]]:
        """Return the sets of objects that a tier may hold."""
        most = min(self.capacity[tier], len(self.demand))
        return [held for count in range(most + 1)
                for held in combinations(range(len(self.demand)), count)]  # fmt: skip

    def normal_form(self) -> NormalFormGame:
        """Return the tiers' game; its social cost is that of all requests and all slots."""
        choices = [self.strategies(tier) for tier in range(len(self.access))]
        shape = tuple(map(len, choices))
        if math.prod(shape) > 200_000:
            raise ValueError(f"{math.prod(shape)} profiles are too many: give fewer objects")
        costs = [np.empty(shape) for _ in choices]
        social = np.empty(shape)
        for at in product(*map(range, shape)):
            own, social[at] = self._costs([choices[tier][index] for tier, index in enumerate(at)])
            for table, cost in zip(costs, own, strict=True):
                table[at] = cost
        return NormalFormGame(costs, costs=True, social=social)

    def held(self, commitment: Commitment) -> list[tuple[int, ...]]:
        """Return what each tier holds after a pure commitment."""
        profile = (int(commitment.strategy.argmax()), *commitment.replies)
        return [self.strategies(tier)[choice] for tier, choice in enumerate(profile)]

    def _costs(self, held: Sequence[tuple[int, ...]]) -> tuple[list[float], float]:
        slots = [price * len(own) for price, own in zip(self.price, held, strict=True)]
        below = [self.miss] * len(self.demand)  # cost of an access to the tier below
        requests = [0.0] * len(held)
        for tier in reversed(range(len(held))):
            for item in held[tier]:
                below[item] = self.access[tier]
            above = {item for own in held[:tier] for item in own}
            requests[tier] = sum(rate * below[item] for item, rate in enumerate(self.demand)
                                 if item not in above)  # fmt: skip
        own = [paid + kept for paid, kept in zip(requests, slots, strict=True)]
        return own, requests[0] + sum(slots)


#: HBM and DRAM of one slot each: HBM pays 24 where it leads, and 40 in the worse equilibrium.
TIERS = TierGame((10, 6), (0, 4), (1, 1), (0, 13), 10)


class Leading(NamedTuple):
    """What leading is worth to HBM."""

    leads: Commitment
    held: list[tuple[int, ...]]  # by tier, HBM first
    equilibria: list[tuple[float, float]]  # (HBM's cost, social cost) of each pure equilibrium

    @property
    def worth(self) -> tuple[float, float] | None:
        """HBM's saving over its best and its worst equilibrium without a leader; None if none."""
        own = [cost for cost, _ in self.equilibria]
        return (min(own) - self.leads.payoffs[0], max(own) - self.leads.payoffs[0]) if own else None


def lead(game: TierGame) -> Leading:
    """Solve a tier game with HBM leading, and without a leader.

    Each tier sees what those above it hold, and replies. With one tier below, the best commitment
    is itself an equilibrium, HBM's best: a hotter object below would be the better one to commit
    to. With two, the second leads the third, and HBM may pay more than in an equilibrium.
    """
    form = game.normal_form()
    leads = form.commitment()
    pairs = [(form.payoffs(p)[0], float(form.social[p])) for p in form.pure_equilibria()]
    return Leading(leads, game.held(leads), pairs)


def topology_costs(topology: str, nodes: int, alpha: float, clusters: int = 2) -> SocialCosts:
    """Return the social costs of one object on "complete", "line" or "two-level".

    Nodes of a complete graph are 1 apart. Clusters of two levels are `alpha` apart, and 1 within.
    """
    if topology == "line":
        return line_costs(nodes, alpha)
    if topology == "complete":
        return cluster_costs(1, nodes, alpha)
    if topology != "two-level":
        raise ValueError(f"topology is {topology!r}: give complete, line or two-level")
    if nodes % clusters:
        raise ValueError(f"{nodes} nodes in {clusters} clusters: give a multiple of the clusters")
    return cluster_costs(clusters, nodes // clusters, alpha, 1.0, max(1.0, alpha))


def topology_distances(topology: str, nodes: int, clusters: int = 2) -> Floats:
    """Return the distances of a topology; clusters are 2 apart."""
    if topology == "line":
        return np.abs(np.subtract.outer(np.arange(nodes), np.arange(nodes))).astype(np.float64)
    if topology == "complete":
        return two_levels(1, nodes, 1.0, 1.0)
    return two_levels(clusters, nodes // clusters, 1.0, 2.0)
