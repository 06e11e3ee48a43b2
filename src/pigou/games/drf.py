"""Dominant Resource Fairness (Ghodsi et al., NSDI 2011), and max-min over periods.

| symbol | meaning |
|---|---|
| C_r, D_ir | capacity of resource r; what a task of tenant i needs of it |
| w_ir, x_i | tenant i's weight (for each resource, or one for all), and its tasks |
| s_i = x_i max_r D_ir / (C_r w_ir) | weighted dominant share |

Progressive filling raises the lowest shares at one speed. A full resource stops all who need it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from pigou.games import Floats, checked, spread

T = TypeVar("T", bound=Hashable)
#: Share of a capacity below which the remainder is rounding.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Tasks:
    """An allocation of tasks, and what they take."""

    tasks: Floats  # (tenants,)
    shares: Floats  # dominant share of each tenant, without weights
    levels: Floats  # the same over its weights
    used: Floats  # units of each resource


def drf(
    demands: ArrayLike, capacities: ArrayLike, *, weights: ArrayLike | None = None,
    limits: ArrayLike | None = None, indivisible: bool = False,
) -> Tasks:  # fmt: skip
    """Return tasks by DRF; `limits` (tenants,) are the most tasks that tenants want.

    `demands` is (tenants, resources); `weights` is (tenants,) or (tenants, resources). A tenant
    that needs nothing gets its limit, or no task without one. `indivisible` starts whole tasks,
    always of the lowest share that fits; ties go to the first tenant.
    """
    job = _Filling.of(demands, capacities, weights, limits)
    return job.result(job.whole() if indivisible else job.fill(np.zeros(len(job.rates))))


def asset_fair(
    demands: ArrayLike, capacities: ArrayLike, *, weights: ArrayLike | None = None,
    limits: ArrayLike | None = None,
) -> Tasks:  # fmt: skip
    """Return tasks that level the *sum* of a tenant's shares of all resources; compare `drf`."""
    job = _Filling.of(demands, capacities, weights, limits, total=True)
    return job.result(job.fill(np.zeros(len(job.rates))))


def max_min(demands: ArrayLike, capacity: float, *, weights: ArrayLike | None = None) -> Floats:
    """Return the weighted max-min fair allocation of one resource, (tenants,)."""
    wanted = checked("demands", demands, (None,))
    allocated: Floats = dynamic_max_min(wanted[None], capacity, weights=weights)[0]
    return allocated


def dynamic_max_min(
    demands: ArrayLike, capacity: ArrayLike, *, weights: ArrayLike | None = None
) -> Floats:
    """Return allocations (periods, tenants) that keep cumulative ones as max-min as possible.

    `demands` is (periods, tenants), `capacity` one number or (periods,).
    """
    wanted = checked("demands", demands, (None, None))
    periods, tenants = wanted.shape
    room = spread("capacity", capacity, periods)[:, None]
    return dynamic_drf(np.ones((tenants, 1)), room, wanted, weights=weights)


def dynamic_drf(
    demands: ArrayLike, capacities: ArrayLike, limits: ArrayLike, *,
    weights: ArrayLike | None = None,
) -> Floats:  # fmt: skip
    """Return tasks (periods, tenants) by dynamic DRF (Fikioris, Agarwal, Tardos 2023).

    Each period raises the lowest *cumulative* dominant shares first. `limits` is (periods,
    tenants); `demands` and `capacities` are of one period, or have a leading axis of periods.
    """
    wanted = checked("limits", limits, (None, None), finite=False)
    needs = np.asarray(demands, dtype=np.float64)
    room = np.asarray(capacities, dtype=np.float64)
    periods, tenants = wanted.shape
    if {needs.ndim - 2, room.ndim - 1} - {0, 1} or any(
        len(array) != periods for array, n in ((needs, 3), (room, 2)) if array.ndim == n
    ):
        raise ValueError(
            f"demands {needs.shape} and capacities {room.shape} do not fit limits {wanted.shape}: "
            "give those of one period, or of each period first"
        )
    level, tasks = np.zeros(tenants), np.zeros_like(wanted)
    for t in range(periods):
        per_task, capacity = (
            needs[t] if needs.ndim == 3 else needs,
            room[t] if room.ndim == 2 else room,
        )
        job = _Filling.of(per_task, capacity, weights, wanted[t])
        tasks[t] = job.fill(level)
        level += np.where(tasks[t] > 0, tasks[t] * job.rates, 0.0)
    return tasks


class DominantShares:
    """Dominant shares of tenants whose use comes and goes, for orders that serve one at a time."""

    def __init__(self, capacities: Sequence[float]) -> None:
        self._capacities = checked("capacities", capacities, (None,)).tolist()
        self._used: dict[Hashable, list[float]] = {}

    def charge(self, tenant: Hashable, amounts: Sequence[float]) -> None:
        """Add to what a tenant uses, by resource; negative amounts give back."""
        used = self._used.setdefault(tenant, [0.0] * len(self._capacities))
        for r, amount in enumerate(amounts):
            used[r] = max(0.0, used[r] + amount)
        if not any(used):
            del self._used[tenant]

    def resize(self, capacities: Sequence[float]) -> None:
        """Change the capacities, as workers come and go; of as many resources."""
        self._capacities = checked("capacities", capacities, (len(self._capacities),)).tolist()

    def share(self, tenant: Hashable, weight: float = 1.0) -> float:
        """Return a tenant's dominant share over its weight; use of what has no capacity is inf."""
        used = self._used.get(tenant, ())
        pairs = zip(used, self._capacities, strict=False)
        return max((u / c if c else math.inf for u, c in pairs if u), default=0.0) / weight

    def lowest(self, tenants: Iterable[tuple[T, float]]) -> T:
        """Return the tenant of the lowest share, of (tenant, weight); ties go to the first."""
        return min(tenants, key=lambda pair: self.share(*pair))[0]


@dataclass(frozen=True, slots=True)
class _Filling:
    demands: Floats
    capacities: Floats
    weights: Floats  # (tenants, resources)
    limits: Floats
    rates: Floats  # share that a task adds, over weights; inf where it needs what is not there

    @classmethod
    def of(
        cls, demands: ArrayLike, capacities: ArrayLike, weights: ArrayLike | None,
        limits: ArrayLike | None, total: bool = False,
    ) -> _Filling:  # fmt: skip
        needs = checked("demands", demands, (None, None))
        tenants, resources = needs.shape
        room = checked("capacities", capacities, (resources,))
        given = np.ones(tenants) if weights is None else np.asarray(weights, dtype=np.float64)
        by_tenant = given.ndim == 1
        shape = (tenants,) if by_tenant else (tenants, resources)
        weight = checked("weights", given, shape, above=True)
        weight = np.broadcast_to(weight[:, None] if by_tenant else weight, needs.shape)
        wanted = np.full(tenants, np.inf) if limits is None else limits
        wanted = checked("limits", wanted, (tenants,), finite=False)
        parts = _over(needs, room) / weight
        rates = parts.sum(axis=1) if total else parts.max(axis=1, initial=0.0)
        return cls(needs, room, weight, wanted, rates)

    def free(self) -> Floats:
        """Return tasks of those who need nothing, and 0 of the others."""
        needless = (self.rates == 0.0) & np.isfinite(self.limits)
        return np.where(needless, self.limits, 0.0)

    def fill(self, level: Floats) -> Floats:
        """Return tasks by progressive filling from levels that tenants have already."""
        tasks, level, left = self.free(), level.copy(), self.capacities.copy()
        active = (self.rates > 0.0) & np.isfinite(self.rates) & (self.limits > 0.0)
        speed = np.where(active, 1.0 / np.where(active, self.rates, 1.0), 0.0)
        while active.any():
            water = level[active].min()
            rising = active & (level <= water + _ROUNDING * max(1.0, water))
            drain = speed[rising] @ self.demands[rising]
            above = active & ~rising
            to_next = level[above].min() - water if above.any() else np.inf
            to_limit = (self.limits[rising] - tasks[rising]) * self.rates[rising]
            to_full = np.where(drain > 0, left / np.where(drain > 0, drain, 1.0), np.inf)
            rise = min(to_next, to_limit.min(), to_full.min())
            tasks[rising] += rise * speed[rising]
            level[rising] += rise
            left = np.maximum(left - rise * drain, 0.0)
            left[(to_full <= rise) | (left <= _ROUNDING * self.capacities)] = 0.0
            done = rising.copy()
            done[rising] = to_limit <= rise
            tasks[done] = self.limits[done]
            active &= ~done & ~(self.demands[:, left == 0.0] > 0).any(axis=1)
        return tasks

    def whole(self) -> Floats:
        """Return whole tasks, started one at a time."""
        tasks, left = np.floor(self.free()), self.capacities * (1 + _ROUNDING)
        active = (self.rates > 0.0) & np.isfinite(self.rates) & (self.limits >= 1.0)
        heap = [(0.0, i) for i in np.flatnonzero(active).tolist()]
        while heap:
            _, i = heap[0]
            if (self.demands[i] > left).any() or tasks[i] + 1 > self.limits[i]:
                heapq.heappop(heap)  # neither will change: what is taken stays taken
                continue
            tasks[i] += 1
            left -= self.demands[i]
            heapq.heapreplace(heap, (tasks[i] * self.rates[i], i))
        return tasks

    def result(self, tasks: Floats) -> Tasks:
        """Return tasks with their shares."""
        held = tasks[:, None] * self.demands
        shares = _over(held, self.capacities)
        levels = (shares / self.weights).max(axis=1, initial=0.0)
        return Tasks(tasks, shares.max(axis=1, initial=0.0), levels, held.sum(axis=0))


def _over(amounts: Floats, capacities: Floats) -> Floats:
    """Return shares of capacities; something of no capacity is inf, nothing of it 0."""
    positive = capacities > 0
    shares: Floats = amounts / np.where(positive, capacities, 1.0)
    return np.where(positive, shares, np.where(amounts > 0, np.inf, 0.0))
