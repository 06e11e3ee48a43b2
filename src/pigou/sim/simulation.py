"""Puts a simulation together, and runs it."""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from pigou.config import ConfigError, ControlConfig, EngineConfig, KVQuota, LaneConfig
from pigou.control import prefix_index
from pigou.control.lengths import OracleParams
from pigou.control.planner.planner import Planner
from pigou.control.pull_queue.config import pull_queue_config
from pigou.control.routing.policy import RoutingPolicy
from pigou.cost.fleet_bill import FleetBill
from pigou.engine import startup_profiling
from pigou.kv.quotas import EACH_OTHER, check_quotas, read_quotas
from pigou.kv.tier_config import check_names
from pigou.registry import read_struct
from pigou.sim.client import ClientConfig, SimulatedClient
from pigou.sim.cost import simulated_cost_meter
from pigou.sim.drafts import read_drafts
from pigou.sim.fleet import SimulatedFleet
from pigou.sim.fleet_config import FleetConfig, ScalingConfig, WorkerGroup
from pigou.sim.membership import Membership
from pigou.sim.pool_performance import measure_speeds
from pigou.sim.result import SimulationResult, objectives_document
from pigou.sim.scaling import (
    OfferedRate,
    PlannedFleet,
    ScaledFleet,
    Scaling,
    build_planner,
    with_start_up,
)
from pigou.sim.setup import Setup
from pigou.sim.tiers import recompute_cost_of
from pigou.sim.timing import Timing
from pigou.sim.timing_models import build_timing, capacity, kv_bytes, kv_heads
from pigou.sim.virtual_clock import EPOCH, Clock
from pigou.sim.window_meter import WindowMeter
from pigou.sim.worker import MAX_STEPS
from pigou.sim.worker_spec import FleetWorker, WorkerSpec
from pigou.sim.workload import (
    ClosedLoop,
    OpenLoop,
    RequestLengths,
    renewal,
    with_declared_limits,
)

#: Events between progress reports.
_REPORT_EVENTS = 4096
#: Threshold of the garbage collector: a run leaves next to no cycles.
_GARBAGE = 50_000
#: Takes a limit of the control plane away. The gateway queues requests that exceed the workers'
#: capacity; a simulation of the workers alone lets them queue there.
UNLIMITED = 2**60
LIMITS = ("max_inflight", "max_inflight_tokens", "max_queued", "queue_timeout")
#: Requests of the small simulation, and how many a second: long enough for an assessment.
_REQUESTS, _RATE = 40, 6.0
_LENGTHS = RequestLengths(input=(600, 600), output=(40, 40), templates=8)
#: Prompts that the small caches hold, so that something is evicted.
_PROMPTS = 4
#: Workers of a group, at most: two cost the same at first, and one is drawn.
_WORKERS = 2


def _predicted(
    workload: OpenLoop | ClosedLoop, control: ControlConfig, seed: int
) -> OpenLoop | ClosedLoop:
    """Return a workload whose limits say nothing of its lengths, if these are predicted."""
    name = control.lengths.get("predictor")
    if name == "mean":
        return workload
    if isinstance(workload, ClosedLoop):
        raise ConfigError(
            f"lengths is {name}, and a closed loop draws its lengths evenly as it goes; give a "
            "trace or a rate, or leave --lengths out"
        )
    tau = None
    if name == "oracle":
        params = {key: value for key, value in control.lengths.items() if key != "predictor"}
        tau = read_struct("length predictor oracle", OracleParams, params).tau
    return with_declared_limits(workload, tau, seed)


def unlimited(**settings: Any) -> ControlConfig:
    """Return the configuration of a control plane without limits but those given."""
    return ControlConfig(**(dict.fromkeys(LIMITS, UNLIMITED) | settings))


class Simulation:
    """A client, and the fleet that serves it.

    Example:
        load = renewal(RequestLengths(), rate=5.0, cv=1.0, count=100, seconds=0.0, seed=0)
        setup = Setup(model="llama-3.1-8b", gpu="H100")
        simulation = Simulation(load, read_fleet("4xboth"), setup, ControlConfig(), ClientConfig())
        print(simulation.run().document()["ttft_s"])
    """

    def __init__(
        self, workload: OpenLoop | ClosedLoop, fleet: FleetConfig, setup: Setup,
        control: ControlConfig, client: ClientConfig, *, seed: int = 0,
        policy: RoutingPolicy | None = None, stepwise: bool = False, assess_every: float = 60.0,
        scaling: ScalingConfig | None = None, planner: Planner | None = None,
        clock: Clock | None = None,
    ) -> None:  # fmt: skip
        """Build the fleet, its client and its planner.

        `policy` and `planner` replace the configured ones; `stepwise` plans one step at a time,
        with equal results; `assess_every` is the seconds between Price of Anarchy windows.
        """
        workload = _predicted(workload, control, seed)
        self.clock, self.workload = clock or Clock(), workload
        scaling = scaling or ScalingConfig()
        self.objectives = scaling.objectives
        fleet = with_start_up(fleet, scaling)
        if self.objectives.classes:
            control = msgspec.structs.replace(control, classes=self.objectives.queue_classes)
            tokens = min(setup.max_batched_tokens, self.objectives.chunk_of("") or 2**62)
            setup = msgspec.structs.replace(setup, max_batched_tokens=tokens)
        if control.queue_timeout >= UNLIMITED and not client.timeout:
            _check_end(fleet)
        quotas = _kv_quotas(setup, workload)
        specs, overhead_s = _worker_specs(fleet, setup, workload.max_tokens, quotas)
        if fleet.overhead_ms is None:
            fleet = msgspec.structs.replace(fleet, overhead_ms=overhead_s * 1000)
        cost_meter = None
        if setup.prices:
            cost_meter = simulated_cost_meter(setup, fleet, self.objectives)
        self.cost_meter = cost_meter
        self.fleet = SimulatedFleet(
            fleet, specs, control, self.clock, policy=policy, seed=seed, stepwise=stepwise,
            assess_every=assess_every, pull=pull_queue_config(setup.prefill_queue),
            cost_meter=cost_meter,
        )  # fmt: skip
        self.fleet.dispatcher.objectives = self.objectives
        self.membership = Membership(self.fleet, fleet, specs, self.clock, seed)
        self.client = SimulatedClient(workload, client, self.fleet.dispatcher, self.clock, seed)
        rates = workload.rates if isinstance(workload, OpenLoop) else ()
        self.arrivals = OfferedRate(rates, self.client)
        self.config, self.model = fleet, setup.model
        self.scaling: Scaling | None = None
        if self.fleet.gateways is not None and (planner is not None or scaling.plans):
            raise ConfigError(
                f"planner is {scaling.planner!r}, and there are several gateways; a planner is "
                "simulated with one: leave one of the two out"
            )
        if planner is None and scaling.plans:
            planned = PlannedFleet("", fleet, self.membership)
            planner = build_planner(scaling, self.objectives, (planned,), seed)
        if planner is not None:
            self.scaling = Scaling(planner, (self.scaled_fleet(""),), self.clock, scaling)

    def scaled_fleet(self, prefix: str) -> ScaledFleet:
        """Return the fleet as a planner changes it, under names with a prefix."""
        meter = WindowMeter(self.fleet, self.membership, self.client, self.objectives, self.model)
        return ScaledFleet(prefix, self.membership, meter, self.arrivals)

    def run(self, watch: Callable[[Simulation], None] | None = None) -> SimulationResult:
        """Run until the client is done; `watch` is called now and then."""
        began = time.perf_counter()
        before = gc.get_threshold()
        gc.set_threshold(_GARBAGE, *before[1:])
        try:
            done = self.client.done
            while not done:
                done = self.clock.run(self.client, _REPORT_EVENTS)
                if watch is not None:
                    watch(self)
        finally:
            gc.set_threshold(*before)
        return self.finish(time.perf_counter() - began)

    def finish(self, wall_s: float) -> SimulationResult:
        """Return the run's result; `wall_s` is its wall-clock time."""
        clock, client, fleet = self.clock, self.client, self.fleet
        fleet.close()
        fetches = fleet.dispatcher.kv_fetches
        return SimulationResult(
            runs=client.runs,
            itl=fleet.itl,
            begin_ns=EPOCH,
            end_ns=clock.now,
            wall_s=wall_s,
            assessments=fleet.assessments,
            placements=fleet.placements,
            caching=fleet.plane.cache_monitor.summary(fleet.plane.index),
            workers=_figures(fleet.workers, clock.now - EPOCH),
            tier_hits=_tier_hits(fleet.workers),
            shed=fleet.dispatcher.shed,
            transfers=(fleet.network.transfers, fleet.network.bytes),
            reads=(fetches.count, fetches.tokens, fetches.failed),
            objectives=self.objectives,
            planner=None if self.scaling is None else self.scaling.summary(clock.now),
            gateways=None if fleet.gateways is None else fleet.gateways.figures(),
            bill=None if self.cost_meter is None else self._bill(),
        )

    def _bill(self) -> FleetBill:
        assert self.cost_meter is not None
        attained = None
        if self.objectives.known:
            attained = objectives_document(self.objectives, self.client.runs)["attained"]
        return self.cost_meter.bill(self.clock.now, attained)


def _check_end(fleet: FleetConfig) -> None:
    """Refuse a fleet whose decode workers all die for good: requests would wait without end."""
    if all(
        any(outage.end == math.inf for outage in group.fails)
        for group in fleet.workers
        if group.role.decodes
    ):
        raise ConfigError(
            "fleet: every worker that decodes fails for good, and requests would wait for ever; "
            "give one of them no fails without end, or give --queue-timeout, or the workload "
            "timeout=SECONDS"
        )


def _kv_quotas(setup: Setup, workload: OpenLoop | ClosedLoop) -> dict[str, KVQuota]:
    """Return the quotas of KV by tenant; raises ConfigError, also for one who sends nothing."""
    quotas = read_quotas(setup.kv_quotas)
    check_quotas(quotas)
    tenants = workload.tenants if quotas else set()
    for unknown in sorted(quotas.keys() - tenants - {EACH_OTHER}):
        raise ConfigError(
            f"kv_quotas has tenant {unknown!r}, who sends no request; give * or a tenant of the "
            f"workload ({', '.join(map(repr, sorted(tenants)[:8]))})"
        )
    return quotas


def _worker_specs(
    fleet: FleetConfig, setup: Setup, max_tokens: int, quotas: dict[str, KVQuota]
) -> tuple[list[WorkerSpec], float]:
    """Return each group's worker spec, and the seconds from client to worker."""
    specs, overhead_s, vllm = [], 0.0, setup.engine == "vllm"
    for group in fleet.workers:
        gpu, split = group.gpu or setup.gpu, group.parallelism(setup)
        built = build_timing(
            group.timing or setup.timing, setup.model, gpu, split, setup.kv_dtype,
            setup.expert_load, eplb=setup.eplb and split.ep,
        )  # fmt: skip
        overhead_s = max(overhead_s, built.overhead_s)
        limits: dict[str, Any] = {
            "block_size": group.block_size,
            "max_seqs": group.max_seqs or setup.max_seqs,
            "max_batched_tokens": group.max_batched_tokens or setup.max_batched_tokens,
        }
        blocks = group.blocks or setup.blocks
        blocks = blocks or capacity(
            built, setup.model, gpu, split, kv_dtype=setup.kv_dtype, **limits
        )
        for name in ("max_seqs", "max_batched_tokens"):  # limits of each rank
            limits[name] *= split.dp
        # A sequence longer than all blocks is refused anyway, and needs no rows in the tables.
        kv_tokens = blocks * group.block_size + 1
        drafts = read_drafts(setup.speculation)
        engine = EngineConfig(
            num_speculative_tokens=drafts.num_speculative_tokens if drafts is not None else 0,
            blocks=blocks,
            max_model_len=min(setup.max_model_len or max_tokens, kv_tokens),
            prefix_caching=group.prefix_caching,
            order=setup.order or ("fcfs" if vllm else "priority"),  # as either is by default
            ageing=setup.ageing,
            input_weight=setup.input_weight,
            lane=LaneConfig.parse(setup.long_lane),
            kv_quotas=quotas,
            headroom=0 if vllm else 1,
            max_repeat=MAX_STEPS,
            repeat_chunks=True,
            **limits,
        )
        spec = _worker_spec(group, setup, engine, built.timing)
        reads = not vllm if setup.peer_reads is None else setup.peer_reads
        layout = f"tp{split.tp}" if reads and group.prefix_caching else ""
        rehearses = not vllm if setup.rehearses is None else setup.rehearses
        rehearsed = measure_speeds(built.timing, engine) if rehearses else ()
        heads = kv_heads(setup.model)
        specs.append(replace(spec, layout=layout, rehearsed=rehearsed, gpus=split.gpus,
                             dp=split.dp, kv_heads=heads, drafts=drafts))  # fmt: skip
    return specs, overhead_s


def _worker_spec(
    group: WorkerGroup, setup: Setup, engine: EngineConfig, timing: Timing
) -> WorkerSpec:
    size, vllm = kv_bytes(setup.model, setup.kv_dtype), setup.engine == "vllm"
    tiers = group.tiers or (setup.tiers if group.prefix_caching else ())
    if not tiers:
        return WorkerSpec(group, engine, timing, size, vllm)
    check_names(tiers)
    if not size:
        raise ConfigError("tiers are given, and no model; its KV's size is needed: give --model")
    recompute_cost = recompute_cost_of(timing, engine.block_size, engine.max_batched_tokens)
    spec = WorkerSpec(group, engine, timing, size, vllm, tiers, recompute_cost, setup.tier_recall)
    spec.make_tiers()  # refuses what cannot be made
    return spec


def _figures(workers: Sequence[FleetWorker], duration_ns: int) -> list[dict[str, Any]]:
    figures = []
    for worker in workers:
        steps, busy_ns, queries, hits = worker.totals
        figures.append(
            {
                "worker": worker.name,
                "steps": steps,
                "busy": busy_ns / duration_ns if duration_ns else 0.0,
                "prefix_hit_ratio": hits / queries if queries else 0.0,
                **_tiers(worker),
                **_drafts(worker),
            }
        )
    return figures


def _drafts(worker: FleetWorker) -> dict[str, Any]:
    pricer = worker.sim.core.drafts if worker.sim is not None else None
    if pricer is None:
        return {}
    return {"draft_tokens": pricer.draft_tokens, "accepted_tokens": pricer.accepted_tokens}


def _tiers(worker: FleetWorker) -> dict[str, Any]:
    tiers = worker.sim.core.tiers if worker.sim is not None else None
    if tiers is None:
        return {}
    names = [config.name for config in worker.spec.tiers]
    figures = {}
    for name, tier, counts in zip(names, tiers.tiers, tiers.counts, strict=True):
        figures[name] = {
            "used_bytes": tier.used_bytes,
            "cap_bytes": tier.cap_bytes,
            "stored_blocks": counts.stored,
            "restored_blocks": counts.restored,
            "evicted_blocks": counts.evicted,
        }
    return {"tiers": figures}


#: Level of a tier by its name; others have their name.
_LEVELS = {"host": "G2", "disk": "G3", "bucket": "G4"}


def _tier_hits(workers: Sequence[FleetWorker]) -> dict[str, dict[str, float]]:
    """Return prompt tokens found on devices (G1) and in tiers, their share and their bytes."""
    tokens, size = Counter({"G1": 0}), Counter({"G1": 0})

    def add(level: str, count: int, worker: FleetWorker) -> None:
        tokens[level] += count
        size[level] += count * worker.spec.kv_bytes

    for worker in workers:
        add("G1", worker.totals[3], worker)
        for config, blocks in zip(worker.spec.tiers, worker.restored, strict=False):
            level = _LEVELS.get(config.name, config.name)
            add(level, blocks * worker.spec.engine.block_size, worker)
    total = max(1, tokens.total())
    return {
        level: {"tokens": count, "share": count / total, "bytes": size[level]}
        for level, count in tokens.items()
    }


def warm_up(fleet: FleetConfig, setup: Setup, control: ControlConfig) -> None:
    """Compile or load the kernels by a small simulation."""
    startup_profiling.warm_up()
    prefix_index.warm_up()  # small caches never outgrow its tables
    groups = tuple(
        msgspec.structs.replace(
            group,
            count=min(group.count, _WORKERS),
            starts=0.0,
            slow=(),
            fails=(),
            blocks=-(-_PROMPTS * _LENGTHS.max_tokens // group.block_size),
        )
        for group in fleet.workers
    )
    small = msgspec.structs.replace(fleet, workers=groups)
    setup = msgspec.structs.replace(setup, max_model_len=0, kv_quotas=())
    load = renewal(_LENGTHS, _RATE, 1.0, _REQUESTS, 0.0, seed=0)
    Simulation(load, small, setup, control, ClientConfig()).run()
