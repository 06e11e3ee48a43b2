"""A fleet for tests of planners: requests flow as a fluid, workers start, drain and flip."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from pigou.control.planner.messages import (
    Action,
    AddWorkers,
    DrainWorker,
    FlipRole,
    PlannerDecision,
    RemoveWorker,
)
from pigou.control.planner.planner import Planner
from pigou.games.latency import LatencyLaw
from pigou.objectives import ProvisioningTimes
from pigou.performance.model import PerformanceModel
from pigou.performance.speed import DecodeLaw, PrefillLine, RequestMix
from pigou.request import SECOND, Role
from pigou.windows.planner_window import (
    LatencySummary,
    LoadWindow,
    PlannerWindow,
    PoolWindow,
    WorkerState,
    WorkerWindow,
)

#: The anchor's V2: bare prefill .246 s for 3,000 tokens; decode 1.2 rps within an ITL of 50 ms.
PREFILL = PerformanceModel(PrefillLine(0.0, 0.246 / 3000), DecodeLaw(LatencyLaw(0.0005, 0.01)))
MIX = RequestMix(isl=3000, osl=300)


@dataclass
class FluidWorker:
    id: str
    state: WorkerState
    since_s: float
    until_s: float = math.inf
    pool_after: str | None = None


@dataclass
class FluidPool:
    role: Role
    model: str = ""
    gpus: int = 1
    performance: PerformanceModel = PREFILL
    can_start: bool = True
    work_s: float = 0.0  # of prompts that wait
    workers: list[FluidWorker] = field(default_factory=list)

    @property
    def ready(self) -> int:
        return sum(w.state is WorkerState.READY for w in self.workers)

    @property
    def backlog_s(self) -> float:
        return self.work_s / max(self.ready, 1)

    @property
    def supply(self) -> int:
        return sum(w.state is not WorkerState.DRAINING for w in self.workers)


class FluidFleet:
    """Pools by name, driven in steps of `seconds` by a planner.

    Args:
        pools: by name.
        counts: ready workers of each at first.
        rates: requests a second of each model, of the time in seconds.
        times: start-up, drain and flip.
        mix: of the requests, of the time and the model.
        seed: arrivals are Poisson draws; None for exact ones.
    """

    def __init__(
        self,
        pools: Mapping[str, FluidPool],
        counts: Mapping[str, int],
        rates: Mapping[str, Callable[[float], float]],
        times: ProvisioningTimes,
        mix: Callable[[float, str], RequestMix] = lambda t, model: MIX,
        seconds: float = 5.0,
        seed: int | None = None,
    ) -> None:
        self.pools, self.rates, self.times, self.mix = dict(pools), rates, times, mix
        self.seconds, self.now_s, self._next = seconds, 0.0, 0
        self._rng = None if seed is None else np.random.default_rng(seed)
        self.decisions: list[PlannerDecision] = []
        self.log: list[tuple[float, Action]] = []
        self.history: list[dict[str, int]] = []
        self.peak_gpus = 0
        self.gpu_s = 0.0
        self.edit: Callable[[PlannerWindow], PlannerWindow] = lambda window: window
        for name, count in counts.items():
            for _ in range(count):
                self._start(name, WorkerState.READY)

    def _start(self, pool: str, state: WorkerState, since_s: float = -1e6) -> None:
        self._next += 1
        worker = FluidWorker(f"{pool}-{self._next}", state, since_s)
        if state is WorkerState.STARTING:
            worker.since_s = self.now_s
            worker.until_s = self.now_s + self.times.start_up_s
        self.pools[pool].workers.append(worker)

    def run(self, planner: Planner, until_s: float) -> FluidFleet:
        while self.now_s < until_s - 1e-9:
            self.step(planner)
        return self

    def step(self, planner: Planner) -> PlannerDecision:
        self.now_s += self.seconds
        self._advance()
        planner.observe(self.edit(self.window()))
        decision = planner.tick(int(self.now_s * SECOND))
        for action in decision.actions:
            self._apply(action)
        self.decisions.append(decision)
        gpus = self.used_gpus
        self.peak_gpus = max(self.peak_gpus, gpus)
        self.gpu_s += gpus * self.seconds
        self.history.append({name: pool.supply for name, pool in self.pools.items()})
        return decision

    @property
    def used_gpus(self) -> int:
        return sum(pool.gpus * len(pool.workers) for pool in self.pools.values())

    @property
    def counts(self) -> dict[str, int]:
        return {name: pool.supply for name, pool in self.pools.items()}

    @property
    def moves(self) -> list[tuple[float, Action]]:
        kinds = (AddWorkers, RemoveWorker, DrainWorker, FlipRole)
        return [(at, action) for at, action in self.log if isinstance(action, kinds)]

    def _advance(self) -> None:
        for name, pool in self.pools.items():
            for worker in list(pool.workers):
                if worker.state is WorkerState.STARTING and not pool.can_start:
                    continue
                if self.now_s < worker.until_s:
                    continue
                if worker.state is WorkerState.STARTING:
                    worker.state, worker.since_s = WorkerState.READY, self.now_s
                    worker.until_s = math.inf
                elif worker.state is WorkerState.DRAINING:
                    pool.workers.remove(worker)
                    if worker.pool_after:
                        self.pools[worker.pool_after].workers.append(
                            replace(worker, state=WorkerState.READY, since_s=self.now_s,
                                    until_s=math.inf, pool_after=None)
                        )  # fmt: skip
            assert name

    def _find(self, worker: str) -> tuple[FluidPool, FluidWorker]:
        for pool in self.pools.values():
            for own in pool.workers:
                if own.id == worker:
                    return pool, own
        raise AssertionError(f"no worker {worker}")

    def _apply(self, action: Action) -> None:
        self.log.append((self.now_s, action))
        match action:
            case AddWorkers(pool=pool, count=count):
                for _ in range(count):
                    self._start(pool, WorkerState.STARTING)
            case RemoveWorker(worker=worker):
                pool_, own = self._find(worker)
                assert own.state is WorkerState.STARTING
                pool_.workers.remove(own)
            case DrainWorker(worker=worker):
                _, own = self._find(worker)
                assert own.state is WorkerState.READY
                own.state, own.since_s = WorkerState.DRAINING, self.now_s
                own.until_s = self.now_s + self.times.drain_s
            case FlipRole(worker=worker, pool=pool, role=role):
                old, own = self._find(worker)
                assert own.state is WorkerState.READY
                assert self.pools[pool].role is role
                assert (self.pools[pool].gpus, self.pools[pool].model) == (old.gpus, old.model)
                own.state, own.since_s = WorkerState.DRAINING, self.now_s
                own.until_s, own.pool_after = self.now_s + self.times.flip_s, pool

    def window(self) -> PlannerWindow:
        loads, pools = [], []
        for model, rate in self.rates.items():
            loads.append(self._load(model, rate(self.now_s)))
        for name, pool in self.pools.items():
            pools.append(self._pool(name, pool, self.rates[pool.model](self.now_s)))
        now_ns = int(self.now_s * SECOND)
        return PlannerWindow(
            now_ns=now_ns, seconds=self.seconds, loads=tuple(loads), pools=tuple(pools)
        )

    def _load(self, model: str, rps: float) -> LoadWindow:
        count = rps * self.seconds
        arrivals = round(count) if self._rng is None else int(self._rng.poisson(count))
        mix = self.mix(self.now_s, model)
        ttft = itl = request_s = None
        if arrivals:
            ttft, itl = self._latency(model, rps, mix)
            request_s = ttft + mix.osl * itl
        return LoadWindow(
            model=model,
            arrivals=arrivals,
            isl=mix.isl if arrivals else None,
            osl=mix.osl if arrivals else None,
            hit_rate=mix.hit_rate if arrivals else None,
            arrival_scv=1.0,
            ttft=LatencySummary(mean=ttft, p95=ttft),
            itl=LatencySummary(mean=itl, p95=itl),
            request_s=request_s,
            completed=arrivals,
            output_tokens=arrivals * mix.osl,
            queued=0,
        )

    def _latency(self, model: str, rps: float, mix: RequestMix) -> tuple[float, float]:
        ttft = itl = 0.0
        for pool in self.pools.values():
            if pool.model != model:
                continue
            latency = pool.performance.latency(pool.role, rps, max(pool.ready, 1), mix, 0.5)
            if pool.role.prefills:
                mean = min(latency.mean_ttft_s, 60.0)
                ttft = max(ttft, mean, pool.backlog_s)
            if pool.role.decodes:
                itl = max(itl, min(latency.itl_s, 1.0))
        return ttft, itl

    def _pool(self, name: str, pool: FluidPool, rps: float) -> PoolWindow:
        mix = self.mix(self.now_s, pool.model)
        model, ready = pool.performance, pool.ready
        workers = []
        share = rps / max(ready, 1)
        cap = model.max_streams(mix)
        streams = model.streams(pool.role, rps, max(ready, 1), mix) if pool.role.decodes else 0.0
        streams = min(streams, cap)
        if pool.role.prefills:
            work = rps * model.service_s(mix) * self.seconds
            pool.work_s = max(pool.work_s + work - ready * self.seconds, 0.0)
        for worker in pool.workers:
            base = WorkerWindow(
                id=worker.id,
                state=worker.state,
                since_ns=int(worker.since_s * SECOND),
                unplaceable=worker.state is WorkerState.STARTING and not pool.can_start,
            )
            if worker.state is WorkerState.READY:
                prompt_s = model.service_s(mix)
                if pool.role is Role.BOTH:
                    prompt_s = model._chunked_s(mix, streams)
                prompts = round(min(share, 1.0 / model.service_s(mix)) * self.seconds)
                queue = pool.backlog_s / model.service_s(mix) * mix.computed
                held = streams * mix.context
                base = replace_window(
                    base,
                    running=round(streams),
                    waiting=round(pool.backlog_s / model.service_s(mix)),
                    mean_running=streams,
                    held_tokens=held,
                    mean_held_tokens=held,
                    queued_prefill_tokens=queue,
                    kv_usage=min(streams / cap, 1.0),
                    kv_tokens=int(cap * mix.context),
                    cached_tokens=10_000.0,
                )
                if pool.role.prefills and prompts:
                    base = replace_window(
                        base,
                        computed_prompts=prompts,
                        computed_tokens=prompts * mix.computed,
                        prefill_s=prompts * prompt_s,
                    )
                if pool.role.decodes and streams:
                    busy = min(share * model.service_s(mix), 0.9) if pool.role.prefills else 0.0
                    itl_s = model.itl_at(streams, mix) / (1.0 - busy)
                    base = replace_window(base, itl_s=itl_s)
            workers.append(base)
        return PoolWindow(
            name=name,
            role=pool.role,
            model=pool.model,
            gpus=pool.gpus,
            workers=tuple(workers),
            can_start=pool.can_start,
        )


def replace_window(worker: WorkerWindow, **values: object) -> WorkerWindow:
    return msgspec.structs.replace(worker, **values)


def reversals(moves: list[tuple[float, Action]], pool_of: Callable[[Action], str | None]) -> int:
    """Return how often a pool that grew shrinks next, or the other way round."""
    last: dict[str, int] = {}
    count = 0
    for _, action in moves:
        name = pool_of(action)
        if name is None:
            continue
        direction = 1 if isinstance(action, AddWorkers) else -1
        count += last.get(name, direction) != direction
        last[name] = direction
    return count
