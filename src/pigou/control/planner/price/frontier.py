"""What a model's GPUs are worth: the best split of each number of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pigou.control.planner.price.capacity import CapacityCurve, PoolOption, RoleCapacity
from pigou.control.planner.price.params import PricePlannerParams
from pigou.objectives import Slo
from pigou.performance.speed import RequestMix
from pigou.request import Role

#: Workers of a pool that does both, beyond which not every number is tried.
_EACH_MIXED = 8
#: Counts of each role that are paired where GPUs are scarce.
_LAST_COUNTS = 8
#: Part of a value that assumes that what is too much is not admitted.
_ADMITTED = 0.5


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One split of a model's GPUs."""

    gpus: int
    rps: float  # that it serves inside the objective, at most the planned load
    value: float  # weighted seconds of delay a second that it saves against serving nothing
    cost: float  # the same unit: what the moves from the present to it cost
    counts: dict[str, int]  # workers by pool


class ModelPlan:
    """Value of the pools of one model at its planned load.

    | symbol | meaning |
    |---|---|
    | lambda | planned requests a second |
    | R_k(n) | requests a second that n workers of a pool k serve inside the objective |
    | g | min(lambda, min(R_P, R_D) + R_B): goodput |
    | w | mean weight of the classes |

    Decode arrivals are what prefill lets through, and the other way round: the minimum is the
    coupling of the two games. A request outside its objective counts for `late_s` seconds of delay,
    so the delay saved is w late_s g a second (`_effective_rps` where g < lambda). At the levels
    of g where one more worker is needed, the cheapest counts make the frontier; pools B that do
    both serve a part of the load, or all.
    """

    def __init__(
        self,
        params: PricePlannerParams,
        load_rps: float,
        mix: RequestMix,
        pools: Sequence[PoolOption],
        slos: Sequence[Slo],
        weight: float = 1.0,
    ) -> None:
        self.params, self.load_rps, self.mix, self.weight = params, load_rps, mix, weight
        self.pools = tuple(pools)
        self.slos = tuple(slos)
        self.curves: dict[str, CapacityCurve] = {}
        self._cached_splits: list[dict[str, int]] | None = None
        self.set_pools(pools)

    def set_pools(self, pools: Sequence[PoolOption]) -> None:
        """Set limits and supplies of the pools; capacities that were computed stay."""
        limits = [(p.name, p.min_workers, p.max_workers) for p in self.pools]
        if limits != [(p.name, p.min_workers, p.max_workers) for p in pools]:
            self._cached_splits = None
        self.pools = tuple(pools)
        for pool in self.pools:
            if pool.name not in self.curves:
                self.curves[pool.name] = CapacityCurve(
                    pool.performance, pool.role, self.mix, self.slos
                )
        self._roles = {
            role: RoleCapacity([(p, self.curves[p.name]) for p in self.pools if p.role is role])
            for role in Role
        }

    @property
    def is_relaxed(self) -> bool:
        """Whether no number of workers meets the objective."""
        return any(self.curves[pool.name].is_relaxed for pool in self.pools)

    def rps(self, counts: Mapping[str, int]) -> float:
        """Return the requests a second that workers serve inside the objective."""
        own = dict(counts)
        split = min(self._roles[Role.PREFILL].rps(own), self._roles[Role.DECODE].rps(own))
        return split + self._roles[Role.BOTH].rps(own)

    def value(self, counts: Mapping[str, int]) -> float:
        """Return weighted seconds of delay a second that workers save."""
        return self.weight * self.params.late_s * self._effective_rps(counts)

    def _effective_rps(self, counts: Mapping[str, int]) -> float:
        """Return the requests a second that are inside, g where the load is served.

        Beyond g nobody is turned away: of pools that only prefill and decode, lambda a_P a_D / p
        requests are inside, with a their shares at the load and p the objective's. That is half of
        what counts; the other half is g, which is what is inside with admission, and which alone
        says what is best while all are late.
        """
        rps = min(self.rps(counts), self.load_rps)
        if rps >= self.load_rps or any(p.role is Role.BOTH for p in self.pools):
            return rps
        own = dict(counts)
        share = 1.0
        for role in (Role.PREFILL, Role.DECODE):
            share *= self._roles[role].inside_share(self.load_rps, own)
        goal = max(slo.share for slo in self.slos)
        inside = self.load_rps * min(share / max(goal, 1e-9), 1.0)
        return (1.0 - _ADMITTED) * inside + _ADMITTED * rps

    def marginal(self, counts: Mapping[str, int], changes: Mapping[str, int]) -> float:
        """Return what a change of counts adds to the value."""
        after = {name: counts.get(name, 0) for name in {*counts, *changes}}
        for name, change in changes.items():
            after[name] += change
        return self.value(after) - self.value(counts)

    def frontier(self, is_scarce: bool = False) -> list[FrontierPoint]:
        """Return splits of rising GPUs and value; none costs more than a better one.

        Args:
            is_scarce: whether the load cannot be served in all: then splits beside the levels count
                too, and what is inside without admission.
        """
        if self._cached_splits is None:
            self._cached_splits = self._splits()
        splits = self._cached_splits
        if is_scarce:
            splits = [*splits, *self._unbalanced_splits()]
        points = [self._point(counts, is_scarce) for counts in splits]
        points.sort(key=lambda point: (point.gpus, point.cost - point.value))
        best: list[FrontierPoint] = []
        for point in points:
            if not best or point.value - point.cost > best[-1].value - best[-1].cost + 1e-9:
                if best and best[-1].gpus == point.gpus:
                    continue
                best.append(point)
        return best

    def _splits(self) -> list[dict[str, int]]:
        mixed = self._roles[Role.BOTH]
        prefill, decode = self._roles[Role.PREFILL], self._roles[Role.DECODE]
        if prefill.is_empty or decode.is_empty:
            minimum = {
                pool.name: pool.min_workers for pool in self.pools if pool.role is not Role.BOTH
            }
            return [minimum | mixed.counts_for(g) for g in mixed.levels(self.load_rps)]
        splits = []
        mixed_levels = [0.0] if mixed.is_empty else mixed.levels(self.load_rps)
        if len(mixed_levels) > _EACH_MIXED:
            step = len(mixed_levels) // _EACH_MIXED
            mixed_levels = [*mixed_levels[::step], mixed_levels[-1]]
        for part in mixed_levels:
            both = {} if mixed.is_empty else mixed.counts_for(part)
            rest = max(self.load_rps - (mixed.rps(both) if both else 0.0), 0.0)
            levels = {*prefill.levels(rest), *decode.levels(rest)}
            splits += [both | prefill.counts_for(g) | decode.counts_for(g) for g in levels]
        return splits

    def _unbalanced_splits(self) -> list[dict[str, int]]:
        """Return all pairs of the last counts of the two roles before they serve the load."""
        roles = [self._roles[role] for role in (Role.PREFILL, Role.DECODE)]
        if any(role.is_empty for role in roles) or not self._roles[Role.BOTH].is_empty:
            return []
        sides = [
            list({tuple(role.counts_for(g).items()): None for g in role.levels(self.load_rps)})
            for role in roles
        ]
        return [
            dict(one) | dict(other)
            for one in sides[0][-_LAST_COUNTS:]
            for other in sides[1][-_LAST_COUNTS:]
        ]

    def _point(self, counts: dict[str, int], is_scarce: bool) -> FrontierPoint:
        gpus = sum(counts[pool.name] * pool.gpus for pool in self.pools)
        rps = min(self.rps(counts), self.load_rps)
        inside = self._effective_rps(counts) if is_scarce else rps
        value = self.weight * self.params.late_s * inside
        moves = sum(self._move_cost(pool, counts[pool.name]) for pool in self.pools)
        return FrontierPoint(gpus, rps, value, moves / self.params.horizon_s, counts)

    @staticmethod
    def _move_cost(pool: PoolOption, count: int) -> float:
        change = count - pool.supply
        return pool.start_cost * change if change > 0 else -pool.removal_cost * change
