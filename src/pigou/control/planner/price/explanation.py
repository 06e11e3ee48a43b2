"""Explanation of a decision: forecasts, predicted latencies, and the value of each move."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import msgspec
import numpy as np

from pigou.control.planner.messages import (
    Action,
    AddWorkers,
    Alternative,
    DrainWorker,
    FlipRole,
    LoadForecast,
    PlannerDecision,
    PoolPlan,
    RebalancePool,
    RemoveWorker,
)
from pigou.control.planner.price.frontier import ModelPlan
from pigou.control.planner.price.model_state import ModelState
from pigou.control.planner.price.terms import COOL, HOT, MAX_COPIES, PricePlannerParams, idle, rent
from pigou.control.planner.price.transition import PoolMembership
from pigou.objectives import ProvisioningTimes
from pigou.performance.model import PoolLatency, joint_share
from pigou.placement.expert_placement import (
    UNEVEN,
    ExpertRanks,
    balance,
    imbalance,
    keep_slots,
    rank_loads,
)
from pigou.request import Role
from pigou.windows.planner_window import ExpertWindow, PlannerWindow, PoolWindow, WorkerState


class DecisionExplanation:
    """Explains decisions; predicts latencies once per plan."""

    def __init__(self, times: ProvisioningTimes, params: PricePlannerParams) -> None:
        self._times, self._params = times, params
        self._latencies: dict[str, tuple[ModelPlan, int, PoolLatency]] = {}

    def explained(
        self,
        window: PlannerWindow,
        models: Mapping[str, ModelState],
        wanted: Mapping[str, int],
        members: PoolMembership,
        actions: tuple[Action, ...],
        shadow_price: float,
    ) -> PlannerDecision:
        """Return the decision with these actions and its explanation."""
        supplies = {pool.name: members.supply(pool, window.now_ns) for pool in window.pools}
        price = max(self._params.gpu_price, shadow_price)
        plans: list[PoolPlan] = []
        alternatives: list[Alternative] = []
        for pool in window.pools:
            target = wanted.get(pool.name, supplies[pool.name])
            pending = members.pending(pool, window.now_ns)
            known = PoolPlan(pool=pool.name, ready=pool.ready, pending=pending, wanted=target)
            plan = models[pool.model].plan
            if plan is None:
                plans.append(known)
                continue
            counts = {o.name: supplies[o.name] for o in window.pools if o.model == pool.model}
            latency = self._latency(plan, pool, target)
            plans.append(
                msgspec.structs.replace(
                    known,
                    capacity_rps=plan.capacity_rps(pool.name, target),
                    ttft_s=_finite(latency.ttft_s),
                    itl_s=_finite(latency.itl_s),
                    utilisation=_finite(latency.utilisation),
                    value=plan.marginal(counts, {pool.name: 1}),
                    price=rent(price, pool.gpus),
                )
            )
            alternatives += self._alternatives(plan, pool, counts, price, actions)
        alternatives += hot_experts(window, self._params.horizon_s)
        alternatives.sort(key=lambda alternative: not alternative.chosen)
        hot = [
            f"{hot.pool}: {hot.worker} is full while its pool is not"
            for hot in actions
            if isinstance(hot, RebalancePool)
        ]
        return PlannerDecision(
            now_ns=window.now_ns,
            planner="price",
            actions=actions,
            forecasts=_forecasts(window, models),
            pools=tuple(plans),
            alternatives=tuple(alternatives),
            shadow_price=shadow_price,
            reasons=(
                *hot,
                *(a.reason for a in alternatives if a.chosen and a.reason),
                *_uneven(window),
            ),
        )

    def _latency(self, plan: ModelPlan, pool: PoolWindow, count: int) -> PoolLatency:
        known = self._latencies.get(pool.name)
        if known is not None and known[0] is plan and known[1] == count:
            return known[2]
        share = max(joint_share(slo) for slo in plan.slos)
        rps = min(plan.load_rps, max(plan.capacity_rps(pool.name, count), 1e-9))
        rps *= plan.remote_share if pool.role is Role.PREFILL else 1.0
        performance = plan.pool(pool.name).performance
        latency = performance.latency(pool.role, rps, count, plan.mix, share)
        self._latencies[pool.name] = (plan, count, latency)
        return latency

    def _alternatives(
        self,
        plan: ModelPlan,
        pool: PoolWindow,
        counts: Mapping[str, int],
        price: float,
        actions: tuple[Action, ...],
    ) -> list[Alternative]:
        params, times = self._params, self._times
        own = {worker.id for worker in pool.workers}
        start = idle(params, pool.gpus, times.start_up_s) / params.horizon_s
        drain = idle(params, pool.gpus, times.drain_s) / params.horizon_s
        added = sum(a.count for a in actions if isinstance(a, AddWorkers) and a.pool == pool.name)
        gone = sum(isinstance(a, DrainWorker | RemoveWorker) and a.worker in own for a in actions)
        more = max(added, 1)
        moves = [
            Alternative(
                move=f"add {more} {pool.name}",
                value=plan.marginal(counts, {pool.name: more}),
                price=more * (rent(price, pool.gpus) + start),
                chosen=added > 0,
            )
        ]
        if counts[pool.name] > 0:
            number = min(max(gone, 1), counts[pool.name])
            loss = plan.pool(pool.name).removal_cost / params.horizon_s
            moves.append(
                Alternative(
                    move=f"remove {number} {pool.name}",
                    value=plan.marginal(counts, {pool.name: -number}),
                    price=number * (loss + drain - rent(price, pool.gpus)),
                    chosen=gone > 0,
                )
            )
        for other in plan.pools:
            same = other.gpus == pool.gpus and other.role is not pool.role
            if params.can_flip(times) and same and counts[other.name] > 0:
                chosen = sum(isinstance(a, FlipRole) and a.pool == pool.name for a in actions)
                number = min(max(chosen, 1), counts[other.name])
                loss = other.removal_cost + idle(params, pool.gpus, times.flip_s)
                moves.append(
                    Alternative(
                        move=f"flip {number} {other.name} to {pool.name}",
                        value=plan.marginal(counts, {pool.name: number, other.name: -number}),
                        price=number * loss / params.horizon_s,
                        chosen=chosen > 0,
                    )
                )
        return moves


def _forecasts(window: PlannerWindow, models: Mapping[str, ModelState]) -> tuple[LoadForecast, ...]:
    loads = {
        name: models[name].band.planned
        for name in window.models
        if models[name].band.estimate.is_known
    }
    return tuple(
        LoadForecast(
            model=name,
            rps=load.observed_rps,
            planned_rps=load.rps,
            low_rps=load.low_rps,
            high_rps=load.high_rps,
            isl=load.mix.isl,
            osl=load.mix.osl,
            hit_rate=load.mix.hit_rate,
            remote_share=1.0 if (plan := models[name].plan) is None else plan.remote_share,
            late_price=models[name].late.price,
            late_share=models[name].late.late_share,
        )
        for name, load in loads.items()
    )


def hot_workers(window: PlannerWindow) -> tuple[RebalancePool, ...]:
    """Return advice for pools with one full worker and a low mean, where more do not help."""
    advice = []
    for pool in window.pools:
        ready = pool.in_state(WorkerState.READY)
        usages = [(w.kv_usage, w.id) for w in ready if w.kv_usage is not None]
        known = [(usage, worker) for usage, worker in usages if math.isfinite(usage)]
        if len(known) < 2:
            continue
        mean = sum(usage for usage, _ in known) / len(known)
        usage, worker = max(known)
        if usage >= HOT and mean < COOL:
            advice.append(RebalancePool(pool.name, worker))
    return tuple(advice)


def hot_experts(window: PlannerWindow, horizon_s: float) -> list[Alternative]:
    """Return advice for workers whose ranks are uneven: copies of hot experts, where they pay.

    value = n s (1 - M' / M), price = n m e / T: n streams wait s seconds a second for the slowest
    rank, of load M; a placement of load M' fetches m experts of e seconds, and pays back in T.
    """
    advice = []
    for pool in window.pools:
        for worker in pool.in_state(WorkerState.READY):
            if (experts := worker.experts) is None:
                continue
            copies = _copies(experts)
            if copies is None:
                continue
            more, moved, before, after, hottest = copies
            streams = worker.mean_running or float(worker.running or 1)
            value = streams * experts.busy * (1.0 - (1.0 + after) / (1.0 + before))
            price = streams * moved * experts.move_s / horizon_s
            names = ", ".join(str(expert) for expert in hottest)
            advice.append(
                Alternative(
                    move=f"copy {more} more experts of {worker.id}" if more else
                    f"move {moved} experts of {worker.id}",
                    value=value, price=price, chosen=value > price,
                    reason=f"{pool.name}: the slowest rank of {worker.id} has {before:.0%} above "
                    f"the mean, {after:.0%} with {more} more copies (hottest: {names})",
                )
            )  # fmt: skip
    return advice


def _uneven(window: PlannerWindow) -> Iterator[str]:
    """Yield advice for workers that tell no more than their ranks' imbalance."""
    for pool in window.pools:
        for worker in pool.in_state(WorkerState.READY):
            uneven = worker.rank_imbalance
            if worker.experts is None and uneven is not None and uneven > UNEVEN:
                yield (
                    f"{pool.name}: the slowest rank of {worker.id} has {uneven:.0%} above the "
                    "mean; give it more redundant experts, or balance them more often"
                )


def _copies(experts: ExpertWindow) -> tuple[int, int, float, float, list[int]] | None:
    """Return the fewest further slots that even out ranks, experts moved, and the imbalances.

    None where ranks are even. No further slots halve the imbalance: the best so far is taken.
    """
    loads, slots = np.array(experts.loads), np.array(experts.placement)
    before = imbalance(rank_loads(slots, loads, experts.ranks))
    if before <= UNEVEN:
        return None
    best: tuple[int, int, float] | None = None
    held = slots.reshape(experts.ranks, -1)
    for copies in range(MAX_COPIES + 1):
        ranks = ExpertRanks(experts.ranks, len(slots) + copies * experts.ranks)
        wanted = balance(loads, ranks)
        after = imbalance(rank_loads(wanted, loads, experts.ranks))
        if best is None or after < 0.5 * best[2]:
            grown = np.concatenate([held, np.repeat(held[:, :1], copies, axis=1)], axis=1)
            moved = keep_slots(wanted, grown.ravel(), ranks)[1]
            best = (copies * experts.ranks, moved, after)
        if after <= UNEVEN:
            break
    assert best is not None
    per_copy = loads / np.bincount(slots, minlength=len(loads))
    return best[0], best[1], before, best[2], np.argsort(-per_copy)[:3].tolist()


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
