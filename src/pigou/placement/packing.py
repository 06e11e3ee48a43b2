"""Packing: the cheapest nodes for a gang, by branch and bound; exact within `max_steps`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from pigou.placement.gang import (
    Gang,
    GangPlacement,
    PlacementRefusal,
    Replica,
    RoleDemand,
    count_roles,
    placement_of,
)
from pigou.placement.topology import DistanceCosts, Node, domain
from pigou.request import Role

#: Search steps of about 30 microseconds; six hosts take fewer.
MAX_STEPS = 5_000
#: Hosts beyond which placement is greedy.
_MAX_HOSTS = 200
#: Starting hosts of the greedy placement.
_STARTS = 32
#: Demands of a gang with the replicas still to place.
Lacking: TypeAlias = Sequence[tuple[RoleDemand, int]]
_PAIRED = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


def pack_gang(
    gang: Gang,
    nodes: Sequence[Node],
    free: Mapping[str, int],
    wanted: Mapping[Role, int],
    costs: DistanceCosts,
    placed: Sequence[Replica] = (),
    max_steps: int = MAX_STEPS,
) -> GangPlacement | PlacementRefusal:
    """Return the cheapest nodes for a gang's missing workers, or why there are none."""
    counts = count_roles(placed)
    lacking = [(d, wanted[d.role] - counts.get(d.role, 0)) for d in gang.roles]
    lacking = [(demand, count) for demand, count in lacking if count > 0]
    if reason := _lacks_room(gang, nodes, free, lacking, "the fleet"):
        return PlacementRefusal(reason=reason)
    if gang.pack is None or not gang.pack.required:
        groups = [list(nodes)]
    else:
        groups = _domains(gang, nodes, placed)
    best: GangPlacement | None = None
    for group in groups:
        if _lacks_room(gang, group, free, lacking, "it"):
            continue
        packed = _Packing(gang, group, nodes, free, lacking, costs, placed).solve(max_steps)
        if packed is not None and (best is None or packed.cost < best.cost):
            best = packed
    return best or PlacementRefusal(reason=_refusal(gang, nodes, free, lacking, placed))


def _domains(gang: Gang, nodes: Sequence[Node], placed: Sequence[Replica]) -> list[list[Node]]:
    assert gang.pack is not None
    groups: dict[str, list[Node]] = {}
    for node in nodes:
        groups.setdefault(domain(node.location, gang.pack.level), []).append(node)
    groups.pop("", None)
    hosts = {replica.host for replica in placed}
    return [g for g in groups.values() if hosts <= {node.host for node in g}]


def _room(demand: RoleDemand, nodes: Sequence[Node], free: Mapping[str, int]) -> int:
    return sum(free[node.host] // demand.gpus for node in nodes if demand.fits(node))


def _lacks_room(
    gang: Gang,
    nodes: Sequence[Node],
    free: Mapping[str, int],
    lacking: Lacking,
    where: str,
) -> str:
    """Return why the sums of replicas cannot fit; empty if they may."""
    for demand, count in lacking:
        room = _room(demand, nodes, free)
        if room < count:
            kind = f" of kind {demand.kind}" if demand.kind else ""
            return (
                f"gang {gang.name} needs {count} {demand.role.value} replicas of {demand.gpus} "
                f"GPUs{kind}, and {where} has room for {room} now"
            )
    return ""


def _refusal(
    gang: Gang,
    nodes: Sequence[Node],
    free: Mapping[str, int],
    lacking: Lacking,
    placed: Sequence[Replica],
) -> str:
    gpus = sum(demand.gpus * count for demand, count in lacking)
    if gang.pack is None or not gang.pack.required:
        total = sum(free[node.host] for node in nodes)
        why = f"{total} are free" if total < gpus else f"the {total} free ones are too scattered"
        return f"gang {gang.name} needs {gpus} GPUs, and {why}"
    level = gang.pack.level
    groups = _domains(gang, nodes, placed)
    unlabelled = sum(not domain(node.location, level) for node in nodes)
    rest = f"; {unlabelled} nodes have no {level.value} label" if unlabelled else ""
    if not groups:
        return f"gang {gang.name} requires one {level.value}, and there is none for it{rest}"
    freest = max(groups, key=lambda group: sum(free[node.host] for node in group))
    total = sum(free[node.host] for node in freest)
    return (
        f"gang {gang.name} requires one {level.value} with {gpus} GPUs for it; the most are free "
        f"in {domain(freest[0].location, level)}: {total}{rest}"
    )


class _Packing:
    def __init__(
        self,
        gang: Gang,
        nodes: Sequence[Node],
        every_node: Sequence[Node],
        free: Mapping[str, int],
        lacking: Lacking,
        costs: DistanceCosts,
        placed: Sequence[Replica],
    ) -> None:
        self._gang, self._costs, self._placed = gang, costs, placed
        self._every_node = {node.host: node for node in every_node}
        self._demands = [demand for demand, _ in lacking]
        self._counts = [count for _, count in lacking]
        usable = [n for n in nodes if any(d.fits(n) and free[n.host] >= d.gpus for d, _ in lacking)]
        order = sorted(usable, key=lambda n: (n.zone, n.rack, -free[n.host], n.host))
        self._hosts = order
        self._free_by_host = free
        self._free = [free[node.host] for node in order]
        locations = [node.location for node in order]
        self._seconds = [[costs.seconds(a, b) for b in locations] for a in locations]
        self._opposite = [self._index(_PAIRED.get(d.role)) for d in self._demands]
        # Seconds a byte to all placed replicas of the other role, by role and host.
        self._to_placed = [
            [
                sum(
                    costs.seconds(self._every_node[r.host].location, location)
                    for r in placed
                    if r.role is _PAIRED.get(d.role)
                )
                for location in locations
            ]
            for d in self._demands
        ]
        self._same_as_before = [self._same(i - 1, i) for i in range(len(order))]
        self._best: list[tuple[int, ...]] | None = None
        self._best_cost = (math.inf, 0)
        self._steps = 0

    def solve(self, max_steps: int) -> GangPlacement | None:
        self._greedy()
        self._steps = max_steps if len(self._hosts) <= _MAX_HOSTS else 0
        if not self._hosts:
            self._best = []
        else:
            self._branch(0, tuple(self._counts), [list(row) for row in self._to_placed], 0.0, [])
        if self._best is None:
            return None
        replicas = list(self._placed)
        for node, counts in zip(self._hosts, self._best, strict=True):
            for demand, count in zip(self._demands, counts, strict=True):
                replicas += [Replica(demand.role, node.host, demand.gpus)] * count
        nodes = self._every_node
        return placement_of(
            self._gang, replicas, nodes, self._costs, optimal=self._steps > 0 or not self._hosts
        )

    def _index(self, role: Role | None) -> int:
        roles = [demand.role for demand in self._demands]
        return roles.index(role) if role in roles else -1

    def _same(self, i: int, j: int) -> bool:
        """True if two hosts are interchangeable."""
        if i < 0:
            return False
        a, b = self._hosts[i], self._hosts[j]
        apart = (a.rack, a.zone, self._free[i]) == (b.rack, b.zone, self._free[j])
        hosts = {replica.host for replica in self._placed}
        fits = all(d.fits(a) == d.fits(b) for d in self._demands)
        return apart and fits and a.host not in hosts and b.host not in hosts

    # --- greedy -------------------------------------------------------------------------------

    def _greedy(self) -> None:
        stride = max(1, len(self._hosts) // _STARTS)
        for start in range(0, len(self._hosts), stride):
            counts = self._greedy_from(start)
            if counts is not None:
                self._offer(counts, self._cost_of(counts))

    def _greedy_from(self, start: int) -> list[tuple[int, ...]] | None:
        free, near = list(self._free), self._seconds[start]
        counts = [[0] * len(self._demands) for _ in self._hosts]
        sums = [list(row) for row in self._to_placed]
        for r in self._interleaved():
            demand, other = self._demands[r], self._opposite[r]
            able = [
                h
                for h in range(len(free))
                if free[h] >= demand.gpus and demand.fits(self._hosts[h])
            ]
            if not able:
                return None
            h = min(able, key=lambda host: (sums[r][host], near[host], free[host], host))
            free[h] -= demand.gpus
            counts[h][r] += 1
            if other >= 0:
                for host, seconds in enumerate(self._seconds[h]):
                    sums[other][host] += seconds
        return [tuple(row) for row in counts]

    def _interleaved(self) -> list[int]:
        order = [
            (-self._demands[r].gpus, (number + 0.5) / count, r)
            for r, count in enumerate(self._counts)
            for number in range(count)
        ]
        return [r for _, _, r in sorted(order)]

    def _cost_of(self, counts: Sequence[Sequence[int]]) -> float:
        cost = 0.0
        for h, row in enumerate(counts):
            for r, count in enumerate(row):
                cost += count * self._to_placed[r][h]
                other = self._opposite[r]
                if other > r and count:
                    cost += sum(
                        count * counts[g][other] * self._seconds[h][g] for g in range(len(counts))
                    )
        return cost

    def _offer(self, counts: Sequence[tuple[int, ...]], cost: float) -> None:
        used = sum(any(row) for row in counts)
        if (cost, used) < self._best_cost:
            self._best, self._best_cost = list(counts), (cost, used)

    # --- branch and bound ---------------------------------------------------------------------

    def _branch(
        self,
        h: int,
        left: tuple[int, ...],
        sums: list[list[float]],
        cost: float,
        taken: list[tuple[int, ...]],
    ) -> None:
        """Try all counts on host `h`; `left` replicas of each role remain to be placed."""
        if not any(left):
            self._offer([*taken, *[(0,) * len(left)] * (len(self._hosts) - h)], cost)
            return
        if h == len(self._hosts) or self._steps <= 0:
            return
        self._steps -= 1
        if self._lower_bound(h, left, sums, cost) > self._best_cost[0] or not self._holds(h, left):
            return
        top = taken[-1] if self._same_as_before[h] else None
        for counts in self._choices(h, left):
            if top is not None and counts > top:
                continue
            after = tuple(a - b for a, b in zip(left, counts, strict=True))
            self._branch(h + 1, after, *self._with(h, counts, sums, cost), [*taken, counts])

    def _with(
        self, h: int, counts: tuple[int, ...], sums: list[list[float]], cost: float
    ) -> tuple[list[list[float]], float]:
        sums = list(sums)
        for r, count in enumerate(counts):
            if not count:
                continue
            cost += count * sums[r][h]
            other = self._opposite[r]
            if other >= 0:
                row = zip(sums[other], self._seconds[h], strict=True)
                sums[other] = [total + count * seconds for total, seconds in row]
        return sums, cost

    def _lower_bound(
        self, h: int, left: tuple[int, ...], sums: list[list[float]], cost: float
    ) -> float:
        """Return a lower bound of the rest: each replica where cheapest to the placed ones."""
        for r, count in enumerate(left):
            if not count:
                continue
            cost += count * min(sums[r][h:])
            if self._opposite[r] > r:
                cost += count * left[self._opposite[r]] * self._costs.host
        return cost * (1.0 - 1e-12)

    def _holds(self, h: int, left: tuple[int, ...]) -> bool:
        """True if the rest may still fit on hosts from `h` on."""
        return all(
            count <= _room(demand, self._hosts[h:], self._free_by_host)
            for demand, count in zip(self._demands, left, strict=True)
            if count
        )

    def _choices(self, h: int, left: tuple[int, ...]) -> list[tuple[int, ...]]:
        choices: list[tuple[tuple[int, ...], int]] = [((), self._free[h])]
        for demand, count in zip(self._demands, left, strict=True):
            able = demand.fits(self._hosts[h])
            choices = [
                ((*counts, more), gpus - more * demand.gpus)
                for counts, gpus in choices
                for more in range(min(count, gpus // demand.gpus) if able else 0, -1, -1)
            ]
        return [counts for counts, _ in sorted(choices, key=lambda choice: choice[1])]


def free_gpus(nodes: Sequence[Node], replicas: Sequence[Replica]) -> dict[str, int]:
    """Return free GPUs by host."""
    used: Counter[str] = Counter()
    for replica in replicas:
        used[replica.host] += replica.gpus
    return {node.host: node.gpus - used[node.host] for node in nodes}
