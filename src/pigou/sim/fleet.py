"""The simulated fleet: ControlPlane over EngineCores under a virtual clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

import msgspec

from pigou.config import ConfigError, ControlConfig
from pigou.control.caching_game import Placement
from pigou.control.messages import (
    Assess,
    Assessed,
    CacheChanged,
    CacheLost,
    Decision,
    LoadReport,
    SetEngineLimits,
    WorkerDown,
    WorkerDraining,
    WorkerUp,
)
from pigou.control.plane import ControlPlane
from pigou.control.price_of_anarchy import PoAEstimate
from pigou.control.pull_queue.config import PullQueueConfig
from pigou.control.routing.policy import RoutingPolicy
from pigou.cost.cost_meter import CostMeter, MeteredControlPlane
from pigou.placement.gang import (
    Gang,
    GangPlaced,
    GangRefused,
    PlacementRefusal,
    Replica,
    RoleDemand,
)
from pigou.placement.gang_scheduler import GangScheduler
from pigou.placement.topology import Distance, distance
from pigou.request import SECOND, UNKNOWN_LOCATION, EngineLimits, KVEvent, Location, Role, Worker
from pigou.sim.dispatch import Dispatcher
from pigou.sim.drafts import SimDrafts
from pigou.sim.fleet_config import FleetConfig, TopologyConfig
from pigou.sim.gateways import make_gateways
from pigou.sim.network import Network, Way
from pigou.sim.request_run import Leg
from pigou.sim.streams import ITLHistogram
from pigou.sim.timing import Slowed
from pigou.sim.virtual_clock import EPOCH, Clock, Phase
from pigou.sim.worker import LaggingWorkers, SimWorker
from pigou.sim.worker_spec import FleetWorker, WorkerSpec, rank_splits
from pigou.windows.planner_window import WorkerState

_GANG = "fleet"
#: Tick interval of the control plane, as in the gateway.
TICK = SECOND // 10
_MS = 1_000_000


class FleetPlacer:
    """Hosts of the workers, by cost as one gang or at random."""

    def __init__(
        self, config: TopologyConfig, wanted: Sequence[tuple[Role, int]], seed: int
    ) -> None:
        self._config, self._rng = config, Random(f"{seed} placement")
        self._scheduler = GangScheduler(config.nodes, config.costs)
        self.nodes = self._scheduler.nodes
        self._free = {host: node.gpus for host, node in self.nodes.items()}
        self._gpus = dict(wanted)
        if set(wanted) != set(self._gpus.items()):
            raise ConfigError("topology: the workers of a role differ in their GPUs; give one tp")
        self._begin: dict[Role, list[Replica]] = {role: [] for role in self._gpus}
        if config.placement == "random":
            for role, _ in wanted:
                self._begin[role].append(self._draw(role))
        else:
            self._submit(Counter(role for role, _ in wanted))

    def _submit(self, counts: Counter[Role]) -> None:
        demands = [
            RoleDemand(role=role, replicas=count, gpus=self._gpus[role])
            for role, count in counts.items()
        ]
        gang = Gang(name=_GANG, roles=tuple(demands), pack=self._config.pack)
        (effect, *_) = self._scheduler.submit(gang)
        if isinstance(effect, GangRefused):
            raise ConfigError(f"topology: {effect.reason}")
        assert isinstance(effect, GangPlaced)
        for replica in effect.added:
            self._begin[replica.role].append(replica)

    def add(self, role: Role) -> Location:
        """Return the host of one more worker of a role."""
        if self._begin.get(role):
            return self._located(self._begin[role].pop(0))
        if self._config.placement == "random":
            return self._located(self._draw(role))
        replica = self._scheduler.scale_out(_GANG, role)
        if isinstance(replica, PlacementRefusal):
            raise ConfigError(f"topology: {replica.reason}")
        return self._located(replica)

    def refusal(self, role: Role) -> str:
        """Return why no worker of a role can be placed now, or ""."""
        if self._config.placement == "random":
            gpus = self._gpus.get(role, 1)
            return "" if max(self._free.values()) >= gpus else f"no host has {gpus} GPUs free"
        addition = self._scheduler.addition(_GANG, role)
        return addition.reason if isinstance(addition, PlacementRefusal) else ""

    def remove(self, role: Role, location: Location) -> None:
        """A worker of a role is gone."""
        gpus = self._gpus.get(role, 1)
        if self._config.placement == "random":
            self._free[location.host] += gpus
        else:
            self._scheduler.remove(_GANG, Replica(role, location.host, gpus))

    def flip(self, role: Role, location: Location, next_role: Role) -> None:
        """A worker has another role now."""
        gpus = self._gpus.setdefault(next_role, self._gpus.get(role, 1))
        if self._config.placement == "cost":
            self._scheduler.flip(_GANG, Replica(role, location.host, gpus), next_role)

    def _draw(self, role: Role) -> Replica:
        gpus = self._gpus.get(role, 1)
        able = [host for host, free in self._free.items() if free >= gpus]
        if not able:
            raise ConfigError(f"topology: no host has {gpus} GPUs free for a {role.value} worker")
        host = self._rng.choice(able)
        self._free[host] -= gpus
        return Replica(role, host, gpus)

    def _located(self, replica: Replica) -> Location:
        return self.nodes[replica.host].location


class SimulatedFleet:
    """Serves the requests of a simulated client."""

    def __init__(
        self, config: FleetConfig, specs: Sequence[WorkerSpec], control: ControlConfig,
        clock: Clock, *, policy: RoutingPolicy | None = None, seed: int = 0, stepwise: bool = False,
        assess_every: float = 60.0, pull: PullQueueConfig | None = None,
        cost_meter: CostMeter | None = None,
    ) -> None:  # fmt: skip
        if len({spec.engine.block_size for spec in specs}) != 1:
            raise ConfigError("fleet: workers have different block_size; give all the same")
        # To explain a decision takes longer than to make it.
        control = msgspec.structs.replace(control, max_decisions=0)
        self.gateways = make_gateways(
            config.gateways, control, clock, policy, seed, pull is not None
        )
        if self.gateways:
            self.plane = self.gateways.planes[0]
        elif cost_meter is not None:
            self.plane = MeteredControlPlane(control, cost_meter, policy)
        else:
            self.plane = ControlPlane(control, policy)
        self.workers: list[FleetWorker] = []
        splits = rank_splits(config, specs, self.workers)
        self.network = Network(config.link, clock, self._way if config.topology else None, splits)
        self.placer: FleetPlacer | None = None
        if config.topology is not None:
            wanted = [
                (group.role, spec.gpus)
                for group, spec in zip(config.workers, specs, strict=True)
                for _ in range(group.count)
            ]
            self.placer = FleetPlacer(config.topology, wanted, seed)
            self._links = [
                Way(8.0 / way.gbps, round(way.latency_us * 1000), level is not Distance.HOST)
                for level, way in zip(Distance, config.topology.links, strict=True)
            ]
        self.itl = ITLHistogram()
        self.assessments: list[PoAEstimate] = []
        self.placements: list[Placement] = []
        self.limits: dict[str, EngineLimits] = {}  # a planner's, by pool; they go first
        self._limits = EngineLimits()  # limits of workers that decode
        self.limited = False  # whether any were set
        self._by_name: dict[str, FleetWorker] = {}
        self._config, self._clock, self._stepwise = config, clock, stepwise
        self._rng, self._seed = Random(seed), seed
        self._assess_every = round(assess_every * SECOND)
        self._assess_next = 0
        self._lagging: LaggingWorkers = {}
        self.dispatcher = Dispatcher(
            self.gateways or self.plane, clock, self.network, self._by_name,
            round((config.overhead_ms or 0) * _MS), round(config.lease_s * SECOND), self._act,
            round(config.leg_ms * _MS), self._lagging, pull,
        )  # fmt: skip
        if self.gateways is not None:
            self.gateways.follow(self._deliver)
        for group, spec in zip(config.workers, specs, strict=True):
            for _ in range(group.count):
                self._begin_life(self.add_worker(spec))
        clock.at(EPOCH + TICK, Phase.TICK, -2, self._tick)
        if config.signals.report_every_ms:
            self._report_every = max(1, round(config.signals.report_every_ms * _MS))
            clock.at(EPOCH + self._report_every, Phase.TICK, -3, self._send_reports)

    @property
    def planes(self) -> list[ControlPlane]:
        """Control planes of all gateways."""
        return [self.plane] if self.gateways is None else self.gateways.planes

    def close(self) -> None:
        """Count the current plan's ended steps, at the end of the run."""
        for worker in self.workers:
            if worker.sim is not None:
                worker.sim.close()

    def check(self) -> None:
        """Check the laws of all cores; raises `IntegrityError`."""
        for worker in self.workers:
            if worker.sim is not None:
                worker.sim.core.check_integrity()

    # --- workers ------------------------------------------------------------------------------

    def add_worker(self, spec: WorkerSpec) -> FleetWorker:
        """Add a worker that has not started."""
        group, engine = spec.group, spec.engine
        number = len(self.workers)
        name = f"{group.role.value}-{number}"
        info = Worker(
            name,
            "",
            group.role,
            engine.block_size,
            engine.blocks,
            engine.max_seqs,
            group.events,
            overtakes=engine.order == "priority",
            layout=spec.layout,
            rehearsed=spec.rehearsed,
            location=UNKNOWN_LOCATION if self.placer is None else self.placer.add(group.role),
        )
        worker = FleetWorker(number, info, spec, since_ns=self._clock.now)
        self._by_name[name] = worker
        self.workers.append(worker)
        self.dispatcher.tokens.add_slots(engine.max_seqs)
        return worker

    def _begin_life(self, worker: FleetWorker) -> None:
        spec, number = worker.spec, worker.number
        group = spec.group
        if group.starts:
            self._at_fault(group.starts, number, lambda now: self.start(worker, now))
        else:
            self.start(worker, self._clock.now)
        for outage in group.fails:
            back = outage.end < float("inf")
            self._at_fault(outage.start, number, lambda now, b=back: self.lose(worker, now, b))
            if back:
                self._at_fault(outage.end, number, lambda now: self.start(worker, now))
        for slow in group.slow:
            slowed = Slowed(spec.timing, slow.factor)
            self._at_fault(slow.start, number, lambda now, to=slowed: self._retime(worker, to, now))
            if slow.end < float("inf"):
                self._at_fault(slow.end, number, lambda now: self._retime(worker, spec.timing, now))

    def _at_fault(self, seconds: float, number: int, event: object) -> None:
        self._clock.at(EPOCH + round(seconds * SECOND), Phase.FAULT, number, event)  # type: ignore[arg-type]

    def start(self, worker: FleetWorker, now: int) -> None:
        """A worker is ready, with an empty cache, unless it is, or is gone for good."""
        if worker.sim is not None or worker.state is None:
            return
        worker.enter(WorkerState.READY, now)
        spec, signals = worker.spec, self._config.signals
        late = signals.event_loss or signals.event_delay_ms  # when events are sent off matters
        worker.sim = SimWorker(
            worker.number, spec.engine, spec.timing, self._clock,
            self.dispatcher, partial(self._publish, worker), self.itl, ahead=spec.ahead,
            stepwise=self._stepwise, lagging=None if late else self._lagging,
            tiers=spec.make_tiers(), seed=self._seed,
        )  # fmt: skip
        if spec.drafts is not None:
            worker.sim.drafts = SimDrafts(
                spec.drafts, spec.engine.max_seqs, self._seed, worker.number
            )
        worker.missed_events = []
        if worker.registered:  # it died and came back before the death was noticed
            self.dispatcher.observe(WorkerDown(worker.name), now)
        worker.registered = True
        self.dispatcher.observe(WorkerUp(worker.info), now)
        self.limit(worker, now)

    def limit(self, worker: FleetWorker, now: int) -> None:
        """Apply its pool's limits to a worker, else the fleet's if it decodes, else its own."""
        fleet = self._limits if worker.info.role.decodes else EngineLimits()
        limits = self.limits.get(worker.pool, EngineLimits()).over(fleet)
        if worker.sim is None or not self.limited:
            return
        engine, core = worker.spec.engine, worker.sim.core
        seqs = limits.max_seqs or engine.max_seqs
        tokens = limits.max_batched_tokens or engine.max_batched_tokens
        worker.sim.call_core(lambda _: core.set_limits(seqs, tokens), now)

    def remove(self, worker: FleetWorker, now: int) -> None:
        """Remove a worker at once, for good; its requests migrate."""
        if worker.registered:  # so that its return is not expected
            self.dispatcher.observe(WorkerDraining(worker.name), now)
        legs = self._end_life(worker)
        worker.enter(None, now)
        self._free_host(worker)
        self._notice_death(worker, now)
        for leg in legs:
            self.dispatcher.broken(leg, now)

    def _free_host(self, worker: FleetWorker) -> None:
        if self.placer is not None:
            self.placer.remove(worker.info.role, worker.info.location)

    def _way(self, source: int, target: int) -> Way:
        locations = (self.workers[number].info.location for number in (source, target))
        return self._links[distance(*locations)]

    def readmit(self, worker: FleetWorker, now: int) -> None:
        """Let a worker serve again in its present role, with its requests and cache."""
        worker.enter(WorkerState.READY, now)
        self.dispatcher.observe(WorkerUp(worker.info), now)

    def _end_life(self, worker: FleetWorker) -> list[Leg]:
        if worker.sim is None:
            return []
        legs = worker.sim.die()
        worker.past_totals, worker.past_restored = worker.totals, worker.restored
        worker.sim = None
        worker.held_ids.clear()
        return legs

    def lose(self, worker: FleetWorker, now: int, comes_back: bool = False) -> None:
        """A worker dies: for a time, or for good."""
        if worker.sim is None:
            return
        legs = self._end_life(worker)
        worker.enter(WorkerState.STARTING if comes_back else None, now)
        if not comes_back:
            self._free_host(worker)
        detect = round(self._config.detect_ms * _MS)
        if detect:
            self._clock.at(
                now + detect, Phase.FAULT, worker.number, lambda at: self._notice_death(worker, at)
            )
        else:
            self._notice_death(worker, now)
        for leg in legs:
            self.dispatcher.broken(leg, now)

    def _notice_death(self, worker: FleetWorker, now: int) -> None:
        if worker.sim is None and worker.registered:
            worker.registered = False
            self.dispatcher.observe(WorkerDown(worker.name), now)

    def _retime(self, worker: FleetWorker, timing: object, now: int) -> None:
        if worker.sim is not None:
            worker.sim.retime(timing, now)  # type: ignore[arg-type]

    # --- events of workers --------------------------------------------------------------------

    def _publish(self, origin: FleetWorker, events: tuple[KVEvent, ...], now: int) -> None:
        """KV events are published: they arrive late, or get lost, as the signals have it."""
        signals = self._config.signals
        if not origin.info.events:
            return
        if signals.event_loss and self._rng.random() < signals.event_loss:
            origin.missed_events += events
            return
        missed: tuple[KVEvent, ...] = ()
        if origin.missed_events:
            missed, origin.missed_events = tuple(origin.missed_events), []
        if signals.event_delay_ms:
            sim = origin.sim
            self._clock.at(
                now + round(signals.event_delay_ms * _MS), Phase.TICK, origin.number,
                lambda at: self._deliver_events(origin, missed, events, at)
                if origin.sim is sim else None,
            )  # fmt: skip
        else:
            self._deliver_events(origin, missed, events, now)

    def _deliver_events(
        self, worker: FleetWorker, missed: tuple[KVEvent, ...], events: tuple[KVEvent, ...],
        now: int,
    ) -> None:  # fmt: skip
        if not worker.registered:
            return
        if missed and not self._config.signals.replay:
            self.dispatcher.observe(CacheLost(worker.name), now)
            missed = ()
        self.dispatcher.cache_changed(CacheChanged(worker.name, missed + events), now)

    # --- time ---------------------------------------------------------------------------------

    def _tick(self, now: int) -> None:
        self.dispatcher.tokens.publish(self.workers, now)
        self.dispatcher.tick(now)
        caching = self.plane.cache_monitor
        if caching.placement is not None and caching.games > len(self.placements):
            self.placements.append(caching.placement)
        self._clock.at(now + TICK, Phase.TICK, -2, self._tick)

    def _send_reports(self, now: int) -> None:
        signals = self._config.signals
        delay = round(signals.report_delay_ms * _MS)
        for worker in self.workers:
            if worker.sim is None:
                continue
            if signals.report_loss and self._rng.random() < signals.report_loss:
                continue
            running, waiting, usage = worker.sim.load(now)
            preemptions = worker.sim.core.stats.preemptions
            report = LoadReport(worker.name, running, waiting, usage, preemptions)
            if delay:
                tell = partial(self.dispatcher.observe, report)
                self._clock.at(now + delay, Phase.TICK, worker.number, tell)
            else:
                self.dispatcher.observe(report, now)
        self._clock.at(now + self._report_every, Phase.TICK, -3, self._send_reports)

    def _deliver(self, call: Callable[[], Sequence[Decision]], now: int) -> None:
        """Apply a control plane's decisions on another gateway's message."""
        if self.gateways is not None and len(self.gateways.queue):
            self.dispatcher.catch_up()
        self.dispatcher.perform(call(), now)

    def _act(self, action: Assess | SetEngineLimits, now: int) -> None:
        """Carry out what the control plane asks of the fleet."""
        if isinstance(action, Assess):
            self._assess(action, now)
            return
        self._limits, self.limited = action.limits, True
        for worker in self.workers:
            self.limit(worker, now)

    def _assess(self, request: Assess, now: int) -> None:
        snapshot = None
        if now >= self._assess_next:
            self._assess_next = now + self._assess_every
            snapshot = self.plane.assess(request.snapshot)
            if snapshot is not None:
                self.assessments.append(snapshot)
        self.dispatcher.observe(Assessed(snapshot), now)
