"""The caching game (Georgiou 2026, Definition 2 and Eq. 6): any sizes, partial copies, equal links.

Its optimum is a minimum-cost flow (Korupolu, Plaxton and Rajaraman, *Placement Algorithms for
Hierarchical Cooperative Caching*, SODA 1999, one level).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linprog
from scipy.sparse import block_array, csr_array, eye_array, kron

from pigou.games import Floats


class ReplicationGame:
    """n nodes and m objects of many blocks; a node may hold any part of an object.

    Node i accesses o `demand[i, o]` times, free for its own part, else at the lower of `remote[i,
    o]` (held elsewhere) and `miss[i, o]`. Shares (nodes, objects) keep sum of `size[o] * share[i,
    o]` within `capacity[i]`. Raises ValueError for bad shapes or values.
    """

    def __init__(
        self,
        demand: ArrayLike,
        size: ArrayLike,
        capacity: ArrayLike,
        miss: ArrayLike,
        remote: ArrayLike = np.inf,
    ) -> None:
        self.demand: Floats = np.asarray(demand, dtype=np.float64)
        if self.demand.ndim != 2:
            raise ValueError(f"demand has shape {self.demand.shape}: give (nodes, objects)")
        shape = nodes, objects = self.demand.shape
        self.size = _shaped("size", size, (objects,))
        self.capacity = _shaped("capacity", capacity, (nodes,))
        self.miss = _shaped("miss", miss, shape)
        self.remote = np.asarray(remote, dtype=np.float64)
        if (self.remote < 0).any() or np.isnan(self.remote).any():
            raise ValueError("remote must be at least 0; give infinity where nobody reads another")
        if (self.size <= 0).any():
            raise ValueError("size must be above 0: leave empty objects out")
        cheapest = np.minimum(self.miss, self.remote)
        #: Savings of a local copy over a remote one, (nodes, objects).
        self.own: Floats = self.demand * cheapest
        #: Savings of all nodes from the first copy, (objects,).
        self.shared: Floats = (self.demand * (self.miss - cheapest)).sum(axis=0)

    def social_cost(self, held: ArrayLike, somewhere: ArrayLike | None = None) -> float:
        """Return the cost of all accesses, given each node's shares `held` (nodes, objects)."""
        shares = np.asarray(held, dtype=np.float64)
        anywhere = shares.max(axis=0, initial=0.0) if somewhere is None else np.asarray(somewhere)
        none = float((self.demand * self.miss).sum())
        return none - float((self.own * shares).sum()) - float(self.shared @ anywhere)

    def optimum(self) -> tuple[Floats, float]:
        """Return an optimal placement and its cost: exact, by knapsacks or a linear program."""
        wanted = self.own > 0.0
        if not self.shared.any():
            held = self._greedy()
        elif ((self.size * wanted).sum(axis=1) <= self.capacity).all() and wanted.any(axis=0).all():
            held = wanted.astype(np.float64)
        else:
            held = self._flow()
        together = np.minimum(held.sum(axis=0), 1.0)
        return held, self.social_cost(held, together)

    def _greedy(self) -> Floats:
        saved_per_block = self.own / self.size
        order = np.argsort(-saved_per_block, axis=1, kind="stable")
        sizes = self.size[order]
        before = np.cumsum(sizes, axis=1) - sizes
        share = np.clip((self.capacity[:, None] - before) / sizes, 0.0, 1.0)
        held = np.zeros_like(share)
        np.put_along_axis(held, order, share, axis=1)
        held[saved_per_block <= 0.0] = 0.0
        return held

    def _flow(self) -> Floats:
        nodes, objects = self.demand.shape
        room = kron(eye_array(nodes), self.size[None, :], format="csr")
        copies = kron(np.ones((1, nodes)), -eye_array(objects), format="csr")
        matrix = block_array([[room, None], [copies, eye_array(objects)]], format="csr")
        savings = np.concatenate([self.own.ravel(), self.shared])
        scale = float(savings.max(initial=0.0)) or 1.0
        solution: Any = linprog(
            -savings / scale,
            A_ub=csr_array(matrix),
            b_ub=np.concatenate([self.capacity, np.zeros(objects)]),
            bounds=(0.0, 1.0),
            method="highs",
        )
        if solution.x is None:
            raise ValueError(f"no optimum was found: {solution.message}")
        held: Floats = np.clip(solution.x[: nodes * objects].reshape(nodes, objects), 0.0, 1.0)
        return held


def whole_copies(demand: ArrayLike, slots: ArrayLike) -> NDArray[np.bool_]:
    """Return which nodes hold which objects, (nodes, objects), each in `slots` (nodes,) whole ones.

    All nodes access alike, `demand` (objects,) in all. What no node holds costs 1 an access. What
    only others hold costs up to 1: the more, the closer its demand comes to a node's share of all.
    """
    room = np.asarray(slots, dtype=np.float64)
    total: Floats = np.asarray(demand, dtype=np.float64)
    every = np.ones((len(room), len(total)))
    remote = np.minimum(total * len(room) / max(float(total.sum()), 1e-12), 1.0)
    game = ReplicationGame(every * total / len(room), every[0], room, every, every * remote)
    held: NDArray[np.bool_] = game.optimum()[0] > 0.5
    return held


def _shaped(name: str, values: ArrayLike, shape: tuple[int, ...]) -> Floats:
    array: Floats = np.asarray(values, dtype=np.float64)
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}: give {shape}")
    if not (np.isfinite(array).all() and (array >= 0).all()):
        raise ValueError(f"{name} must be finite and at least 0")
    return array
