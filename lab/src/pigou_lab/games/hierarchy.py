"""Equilibria of the caching game on hierarchies, in polynomial time.

Gopalakrishnan, Kanoulas, Karuturi, Pandu Rangan, Rajaraman and Sundaram, "Cache me if you can:
capacitated selfish replication games" (LATIN 2012): fictional copies that move up the tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pigou.games import Floats, Indices
from pigou_lab.games import improves
from pigou_lab.games.caching import ABSENT, CachingGame


class HierarchyEquilibrium(NamedTuple):
    """An equilibrium, and the work that it took."""

    placement: Indices  # (nodes, objects), as of the game
    swaps: int  # changes of a node's slot
    bound: int  # swaps at most: slots times objects times levels


def two_levels(clusters: int, size: int, near: float, far: float) -> Floats:
    """Return distances between nodes in clusters: `near` within one, `far` between them."""
    cluster = np.arange(clusters * size) // size
    distance: Floats = np.where(cluster[:, None] == cluster[None], float(near), float(far))
    np.fill_diagonal(distance, 0.0)
    return distance


def check_hierarchy(distance: ArrayLike) -> None:
    """Raise ValueError unless d(i, k) <= max(d(i, j), d(j, k)): leaves of a tree, equally deep."""
    d = np.asarray(distance, dtype=np.float64)
    if not np.array_equal(d, d.T) or np.diagonal(d).any():
        raise ValueError("distances of a hierarchy are symmetric, and 0 from a node to itself")
    longer = d[:, None, :] > np.maximum(d[:, :, None], d[None, :, :])
    if longer.any():
        i, j, k = (int(node) for node in np.argwhere(longer)[0])
        raise ValueError(
            f"no hierarchy: {i} to {k} is {d[i, k]:g}, and over {j} {d[i, j]:g} and {d[j, k]:g}; "
            "the longest of three distances must occur twice"
        )


@dataclass
class _Tree:
    """A game on a hierarchy; a level's balls are named by their least node."""

    game: CachingGame
    miss: float  # cost of a miss; finite, beyond all others, where the game has none
    heights: Floats  # rising distances; the last one is that of a miss
    balls: Indices  # (levels, nodes): the ball around a node of each height
    copies: list[set[int]]  # nodes that hold each object
    fictional: list[set[tuple[int, int]]]  # (level, ball) of each object's fictional copies
    room: list[int] = field(default_factory=list)  # empty slots of each node
    swaps: int = 0

    def elsewhere(self, node: int, item: int) -> float:
        """Distance from a node to the nearest copy that is not its own."""
        game = self.game
        away = [min(float(game.distance[node, other]), self.miss)
                for other in self.copies[item] if other != node]  # fmt: skip
        for level, ball in self.fictional[item]:
            inside = self.balls[level, node] == ball
            away.append(float(self.heights[level]) if inside else
                        min(float(game.distance[node, ball]), self.miss))  # fmt: skip
        return min(away, default=self.miss)

    def gain(self, node: int, item: int) -> float:
        """Saving of a node that holds an item, less its placement cost."""
        demand, game = float(self.game.demand[node, item]), self.game
        saved = demand * self.elsewhere(node, item) if demand else 0.0
        return saved - float(game.placement_cost[node])

    def lift(self, item: int, level: int, ball: int) -> None:
        """Move a fictional copy up one level; the node that wants the item then takes it."""
        self.fictional[item].discard((level, ball))
        members = np.flatnonzero(self.balls[level] == ball).tolist()
        if level + 1 < len(self.heights) - 1:  # past the root it is the origin's
            self.fictional[item].add((level + 1, int(self.balls[level + 1, ball])))
        for node in members:
            if node not in self.copies[item] and self._take(node, item, level):
                return

    def _take(self, node: int, item: int, level: int) -> bool:
        gain = self.gain(node, item)
        held = [other for other, nodes in enumerate(self.copies) if node in nodes]
        if self.room[node]:
            evicted, worth = ABSENT, 0.0
        elif held:
            worth, evicted = min((self.gain(node, other), other) for other in held)
        else:
            return False
        if not improves(-gain, -worth):
            return False
        if level + 1 < len(self.heights) - 1:
            self.fictional[item].discard((level + 1, int(self.balls[level + 1, node])))
        if evicted == ABSENT:
            self.room[node] -= 1
        else:
            self.copies[evicted].discard(node)
            self.fictional[evicted].add((0, int(self.balls[0, node])))
        self.copies[item].add(node)
        self.swaps += 1
        return True


def hierarchy_equilibrium(game: CachingGame) -> HierarchyEquilibrium:
    """Return a pure equilibrium of a caching game on a hierarchy; it always has one.

    At first a fictional copy of every object lies at every node, and nobody wants to hold one.
    Copies move up one level at a time, to the origin in the end. A move makes its object dearer
    below alone, and only where there is no other copy below. Then the first node that gains takes
    the object in place of the copy, and leaves a fictional copy of what it evicts. All others see
    what they saw, so each move ends in an equilibrium. What a slot is worth only rises, through at
    most objects times levels values. Raises ValueError for several tiers, or no hierarchy.
    """
    if len(game.tiers) != 1 or game.tiers[0] != 0:
        raise ValueError(f"tiers are {game.tiers.tolist()}: a hierarchy takes one, of cost 0")
    check_hierarchy(game.distance)
    miss = game.miss_cost
    if np.isinf(miss):  # any other cost is below that of one miss
        least = game.demand[game.demand > 0].min(initial=1.0)
        most = game.distance.max(initial=0.0) * game.demand.sum() + game.placement_cost.sum()
        miss = 10.0 * (1.0 + most * game.objects) / float(least)
    known = np.unique(np.minimum(game.distance, miss))
    heights = np.append(known[known < miss], miss)
    balls = np.array([(game.distance <= height).argmax(axis=1) for height in heights])
    tree = _Tree(
        game, miss, heights, balls, [set() for _ in range(game.objects)],
        [{(0, int(ball)) for ball in balls[0]} for _ in range(game.objects)],
        [int(slots) for slots in game.capacity[:, 0]],
    )  # fmt: skip
    while True:
        waiting = [(level, item, ball) for item, own in enumerate(tree.fictional)
                   for level, ball in own]  # fmt: skip
        if not waiting:
            break
        level, item, ball = min(waiting)
        tree.lift(item, level, ball)
    placement: Indices = np.full((game.nodes, game.objects), ABSENT, dtype=np.intp)
    for item, nodes in enumerate(tree.copies):
        placement[sorted(nodes), item] = 0
    bound = int(game.capacity.sum()) * game.objects * len(heights)
    return HierarchyEquilibrium(placement, tree.swaps, bound)
