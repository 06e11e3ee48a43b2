"""llm-d's Workload Variant Autoscaler, version 2: capacity and demand in tokens."""

from __future__ import annotations

import math
from collections import deque
from typing import ClassVar

import msgspec

from pigou.control.planner.planner import PlannerSetup
from pigou.control.planner.target_planner import TargetPlanner, supply
from pigou.request import Role
from pigou.windows.planner_window import LoadWindow, PlannerWindow, PoolWindow, WorkerState
from pigou_lab.planner.history_planner import known_mean

#: Mean output tokens up to which a bucket of observed capacities goes.
OUTPUT_BUCKETS = (100.0, 500.0, math.inf)


class WvaParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `LlmDWva`, with its defaults."""

    kv_threshold: float = 0.8  # share of the KV cache that counts as capacity
    queue_threshold: int = 5  # requests that wait on a worker from which on it counts as full
    up: float = 0.85  # utilisation above which workers are added
    down: float = 0.7  # utilisation below which they are removed, at most `up`
    samples: int = 10  # capacities of full workers that are averaged

    def __post_init__(self) -> None:
        if not 0 < self.down <= self.up <= 1 or not 0 < self.kv_threshold <= 1:
            raise ValueError("give 0 < down <= up <= 1 and 0 < kv_threshold <= 1")
        if self.queue_threshold < 1 or self.samples < 1:
            raise ValueError("queue_threshold and samples must be at least 1")


class LlmDWva(TargetPlanner):
    """need = demand / up - (ready + pending) capacity; spare = supply - demand / down.

    | symbol | meaning |
    |---|---|
    | k1 | kv_threshold times a worker's KV tokens |
    | k2 | tokens in use of workers with a full queue, the mean of the last `samples` |
    | capacity | min(k1, k2), of one worker |
    | demand | tokens in use + queued requests times mean prompt + tokens at the gateway |

    ceil(need / capacity) workers come, or floor(spare / capacity) go. Pending workers count as
    supply, so that additions do not stack. k2 is kept by mean output tokens (up to 100, up to 500,
    more). llm-d `analyzer.go`. Prefill and decode are not modelled: each pool goes by its own KV
    cache, and the gateway's queue is demand of each pool that takes prompts.
    """

    name: ClassVar[str] = "wva"
    Params: ClassVar[type[msgspec.Struct]] = WvaParams

    def __init__(self, setup: PlannerSetup, params: WvaParams) -> None:
        super().__init__(setup)
        self.params = params
        self._observed: dict[tuple[str, int], deque[float]] = {}

    def _targets(
        self,
        window: PlannerWindow,
        now_ns: int,  # noqa: ARG002
    ) -> tuple[dict[str, int], list[str]]:
        targets: dict[str, int] = {}
        for pool in window.pools:
            loads = [load for load in window.loads if load.model == pool.model]
            capacity = self._capacity(pool, loads)
            demand = self._demand(pool, loads)
            if capacity is None or demand is None:
                continue
            current = supply(pool)
            need = demand / self.params.up - current * capacity
            spare = current * capacity - demand / self.params.down
            if need > 0:
                targets[pool.name] = current + math.ceil(need / capacity - 1e-9)
            elif spare > 0:
                targets[pool.name] = current - math.floor(spare / capacity + 1e-9)
        return targets, []

    def _capacity(self, pool: PoolWindow, loads: list[LoadWindow]) -> float | None:
        """Return the tokens of one worker; None where its KV cache is not known."""
        ready = pool.in_state(WorkerState.READY)
        sizes = [worker.kv_tokens for worker in ready if worker.kv_tokens]
        if not sizes:
            return None
        osl = known_mean(load.osl for load in loads) or 0.0
        bucket = next(i for i, top in enumerate(OUTPUT_BUCKETS) if osl <= top)
        observed = self._observed.setdefault((pool.name, bucket), deque(maxlen=self.params.samples))
        for worker in ready:
            full = worker.waiting is not None and worker.waiting >= self.params.queue_threshold
            if full and worker.held_tokens:
                observed.append(worker.held_tokens)
        capacity = self.params.kv_threshold * sum(sizes) / len(sizes)
        return min(capacity, sum(observed) / len(observed)) if observed else capacity

    def _demand(self, pool: PoolWindow, loads: list[LoadWindow]) -> float | None:
        ready = pool.in_state(WorkerState.READY)
        in_use = [worker.held_tokens for worker in ready if worker.held_tokens is not None]
        if not in_use:
            return None
        isl = known_mean(load.isl for load in loads) or 0.0
        queued = sum(worker.waiting or 0 for worker in ready)
        gateway = 0.0
        if pool.role is not Role.DECODE:
            for load in loads:
                gateway += load.queued_tokens or (load.queued or 0) * isl
        return sum(in_use) + queued * isl + gateway
