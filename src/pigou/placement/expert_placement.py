"""Places copies of experts on the ranks of expert parallelism, and says when moving them pays.

Replication is EPLB's (DeepSeek, github.com/deepseek-ai/eplb). Packing starts as EPLB's does, and
goes on by exchanges until none lowers the heaviest rank: never worse, often within its bound.

Expert e with load w_e has c_e copies; each takes w_e / c_e. A layer takes as long as the rank of
the greatest sum. Loads are of one layer, tokens or seconds of a window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment

Floats = NDArray[np.float64]
#: Expert of each slot, (slots,) of a layer; rank r has slots r s to (r + 1) s - 1.
Slots = NDArray[np.int64]
#: From weights and a number of packs to the pack of each item.
Packing = Callable[[ArrayLike, int], Slots]
#: Exchanges of a packing at most, and largest table of exchanges of two for two.
_MAX_EXCHANGES, _MAX_PAIRS = 1000, 400_000
#: Imbalance of ranks above which moves are considered.
UNEVEN = 0.2
#: An exchange must lower the load by a billionth; a thousandth above the bound is near enough.
_LESS, _NEAR = 1.0 - 1e-9, 1.001


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """Ranks that hold the experts of a layer; `nodes` above 1 keep groups of experts together."""

    ranks: int
    slots: int  # slots of all ranks
    nodes: int = 1
    groups: int = 1  # groups of the router, as DeepSeek's `n_group`

    @property
    def grouped(self) -> int:
        """Nodes over which groups are split; 1 where they do not divide."""
        return self.nodes if self.groups % self.nodes == 0 else 1

    def check(self, experts: int) -> None:
        """Raise ValueError unless every expert has a slot, and all ranks have as many."""
        for name, value, of, parts in (
            ("slots", self.slots, "ranks", self.ranks),
            ("ranks", self.ranks, "nodes", self.nodes),
            ("experts", experts, "groups", self.groups),
        ):
            if parts < 1 or value % parts:
                raise ValueError(f"{name} is {value}; it must be a multiple of {of}, {parts}")
        if self.slots < experts:
            raise ValueError(f"slots is {self.slots}; {experts} experts need at least as many")


def imbalance(rank_loads: ArrayLike) -> float:
    """Return (max - mean) / mean of the ranks' loads; 0 without load."""
    loads = np.asarray(rank_loads, dtype=np.float64)
    mean = float(loads.mean())
    return float(loads.max()) / mean - 1.0 if mean > 0.0 else 0.0


def rank_loads(placement: Slots, loads: ArrayLike, ranks: int) -> Floats:
    """Return the load of each rank, (ranks,): copies of an expert share its load equally."""
    weights = np.asarray(loads, dtype=np.float64)
    per_copy = weights / np.maximum(np.bincount(placement, minlength=len(weights)), 1)
    summed: Floats = per_copy[placement].reshape(ranks, -1).sum(axis=1)
    return summed


def replicate(loads: ArrayLike, slots: int) -> Slots:
    """Return copies of each expert, (experts,): each further slot to the greatest load / copies."""
    weights = np.asarray(loads, dtype=np.float64)
    copies = np.ones(len(weights), dtype=np.int64)
    for _ in range(slots - len(weights)):
        copies[np.argmax(weights / copies)] += 1
    return copies


def pack_greedy(weights: ArrayLike, packs: int) -> Slots:
    """Return the pack of each item, equally many in each: heaviest into the lightest with room."""
    items = np.asarray(weights, dtype=np.float64)
    room = np.full(packs, len(items) // packs)
    sums, pack = np.zeros(packs), np.empty(len(items), dtype=np.int64)
    for item in np.argsort(-items, kind="stable"):
        lightest = int(np.argmin(np.where(room > 0, sums, np.inf)))
        pack[item] = lightest
        sums[lightest] += items[item]
        room[lightest] -= 1
    return pack


def pack_bound(weights: ArrayLike, packs: int) -> float:
    """Return what the heaviest pack weighs at least: the mean, or the heaviest item's company."""
    items = np.sort(np.asarray(weights, dtype=np.float64))
    size = len(items) // packs
    return max(float(items.sum()) / packs, float(items[-1] + items[: size - 1].sum()))


def pack(weights: ArrayLike, packs: int) -> Slots:
    """Return the pack of each item, equally many in each: greedy, then exchanges."""
    return exchange(weights, pack_greedy(weights, packs), packs)


def exchange(weights: ArrayLike, pack: Slots, packs: int, max_steps: int = _MAX_EXCHANGES) -> Slots:
    """Exchange items, or pairs, of the heaviest pack with others until none makes it lighter."""
    items, pack, size = np.asarray(weights, dtype=np.float64), pack.copy(), len(pack) // packs
    near, pairs = pack_bound(items, packs) * _NEAR, np.stack(np.triu_indices(size, 1), axis=1)
    parts = [np.arange(size)[:, None]]  # single items, then pairs
    if 0 < len(pairs) ** 2 * packs <= _MAX_PAIRS:
        parts.append(pairs)
    for _ in range(max_steps):
        members = np.argsort(pack, kind="stable").reshape(packs, size)
        sums = items[members].sum(axis=1)
        top = int(np.argmax(sums))
        if sums[top] <= near:
            break
        for part in parts:
            held = items[members[:, part]].sum(axis=2)
            moved = held[top][:, None, None] - held[None]
            after = np.maximum(sums[top] - moved, sums[:, None] + moved)
            mine, other, theirs = np.unravel_index(int(np.argmin(after)), after.shape)
            if after[mine, other, theirs] < sums[top] * _LESS:
                pack[members[top, part[mine]]] = other
                pack[members[other, part[theirs]]] = top
                break
        else:
            break
    return pack


def balance(loads: ArrayLike, ranks: ExpertRanks, packing: Packing | None = None) -> Slots:
    """Return a placement of a layer, (slots,); by `pack_greedy` it is EPLB's.

    Without a packing it is the better of greedy and `pack`, so never heavier than EPLB's.
    """
    weights = np.asarray(loads, dtype=np.float64)
    ways = (packing,) if packing else (pack, pack_greedy)
    made = [_placed(weights, ranks, way) for way in ways]
    return min(made, key=lambda slots: float(rank_loads(slots, weights, ranks.ranks).max()))


def _placed(weights: Floats, ranks: ExpertRanks, packing: Packing) -> Slots:
    """Groups onto nodes, copies within each, then onto its ranks; flat unless groups divide."""
    ranks.check(len(weights))
    nodes, placed = ranks.grouped, []
    grouped = weights.reshape(ranks.groups if nodes > 1 else 1, -1)
    node_of = packing(grouped.sum(axis=1), nodes)
    experts = np.arange(len(weights)).reshape(grouped.shape)
    for node in range(nodes):
        own = experts[node_of == node].ravel()
        copies = replicate(weights[own], ranks.slots // nodes)
        held = np.repeat(np.arange(len(own)), copies)
        per_copy = (weights[own] / copies)[held]
        order = np.argsort(packing(per_copy, ranks.ranks // nodes), kind="stable")
        placed.append(own[held[order]])
    slots: Slots = np.concatenate(placed)
    return slots


def keep_slots(placement: Slots, current: Slots, ranks: ExpertRanks) -> tuple[Slots, int]:
    """Permute ranks (and nodes) of a placement so that the fewest experts move.

    Returns the placement, and how many experts ranks must fetch; kept ones keep their slots.
    """
    nodes = ranks.grouped
    new, old = (slots.reshape(nodes, ranks.ranks // nodes, -1) for slots in (placement, current))
    experts = int(max(placement.max(), current.max())) + 1
    holds = [np.zeros((*made.shape[:2], experts), dtype=np.int64) for made in (new, old)]
    for held, made in zip(holds, (new, old), strict=True):
        np.put_along_axis(held, made, 1, axis=2)
    shared = np.einsum("aie,bje->abij", holds[1], holds[0])  # old node and rank with new ones
    pairs, overlaps = {}, np.empty((nodes, nodes))
    for a, b in np.ndindex(nodes, nodes):
        pairs[a, b] = linear_sum_assignment(-shared[a, b])
        overlaps[a, b] = shared[a, b][pairs[a, b]].sum()
    placed = np.empty_like(old)
    of_old, of_new = linear_sum_assignment(-overlaps)
    for a, b in zip(of_old, of_new, strict=True):
        for i, j in zip(*pairs[a, b], strict=True):
            placed[a, i] = _in_place(new[b, j].tolist(), old[a, i].tolist())
    moved = int(holds[0].sum() - overlaps[of_old, of_new].sum())
    return placed.ravel(), moved


def _in_place(wanted: list[int], held: list[int]) -> list[int]:
    """Return `wanted` with experts that are held already in their old slots."""
    slots = [-1] * len(held)
    for slot, expert in enumerate(held):
        if expert in wanted:
            wanted.remove(expert)
            slots[slot] = expert
    return [expert if expert >= 0 else wanted.pop(0) for expert in slots]


@dataclass(frozen=True, slots=True)
class Rebalance:
    """A placement that is worth its moves."""

    placement: Slots
    moved: int  # experts that ranks fetch
    moved_bytes: float
    before: float  # imbalance
    after: float
    gain: float  # seconds saved a second


def rebalance(
    current: Slots, loads: ArrayLike, ranks: ExpertRanks, *, expert_bytes: float,
    bytes_per_s: float, horizon_s: float, threshold: float = UNEVEN,
) -> Rebalance | None:  # fmt: skip
    """Return the placement of most worth for a layer, or None if no move pays.

    `loads` are seconds of a rank for each expert in a second of the window. A move needs an
    imbalance above `threshold`, and gain * horizon_s > moved bytes / bytes_per_s. Candidates: a
    new placement, and the first 1, 2, 4, ... exchanges of the present one.
    """
    weights = np.asarray(loads, dtype=np.float64)
    ranks.check(len(weights))
    copies = np.bincount(current, minlength=len(weights))
    if not copies.all():
        raise ValueError("the present placement lacks an expert; every expert needs a slot")
    before = rank_loads(current, weights, ranks.ranks)
    if imbalance(before) <= threshold:
        return None
    candidates = [balance(weights, ranks)]
    if ranks.grouped == 1:  # else exchanges would part groups
        rank_of = np.repeat(np.arange(ranks.ranks), ranks.slots // ranks.ranks)
        per_copy = (weights / copies)[current]
        for steps in 2 ** np.arange(ranks.slots.bit_length()):
            made = exchange(per_copy, rank_of, ranks.ranks, int(steps))
            candidates.append(current[np.argsort(made, kind="stable")])
    best, best_net = None, 0.0
    for candidate in candidates:
        placement, moved = keep_slots(candidate, current, ranks)
        after = rank_loads(placement, weights, ranks.ranks)
        gain, size = float(before.max() - after.max()), moved * expert_bytes
        net = gain * horizon_s - size / bytes_per_s
        if net > best_net:
            best_net = net
            best = Rebalance(placement, moved, size, imbalance(before), imbalance(after), gain)
    return best
