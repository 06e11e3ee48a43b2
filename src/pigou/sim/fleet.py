"""The simulated fleet: ControlPlane over EngineCores under a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
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
    LoadReport,
    WorkerDown,
    WorkerUp,
)
from pigou.control.plane import ControlPlane
from pigou.control.price_of_anarchy import PoAEstimate
from pigou.control.routing.policy import RoutingPolicy
from pigou.engine.plan import Finished, Load
from pigou.events import KVEvent
from pigou.request import SECOND, Worker
from pigou.sim.dispatch import Dispatcher
from pigou.sim.fleet_config import FleetConfig
from pigou.sim.leg import Leg
from pigou.sim.network import Network
from pigou.sim.streams import Gaps
from pigou.sim.timing import Slowed
from pigou.sim.virtual_clock import EPOCH, Clock, Phase
from pigou.sim.worker import Behind, SimWorker
from pigou.sim.worker_spec import Member, Plant

#: As the gateway's: time passes for the control plane so often.
TICK = SECOND // 10
_MS = 1_000_000


class Fleet:
    """Serves calls.

    Attributes:
        plane: who runs where.
        dispatcher: takes calls to workers.
        network: between the workers.
        members: the workers.
        gaps: between the tokens of all streams.
        assessments: of the Price of Anarchy.
        placements: games of what lies where.
    """

    def __init__(
        self, config: FleetConfig, plants: Sequence[Plant], control: ControlConfig, clock: Clock,
        *, policy: RoutingPolicy | None = None, seed: int = 0, stepwise: bool = False,
        assess_every: float = 60.0,
    ) -> None:  # fmt: skip
        """Start the workers, and let time pass.

        Args:
            config: of the fleet.
            plants: what its workers run on, in the order of `config.workers`.
            control: of the control plane.
            clock: virtual.
            policy: used instead of the one that `control` names.
            seed: of what is lost on the way, and of how alike steps differ.
            stepwise: plan one step at a time; the results are the same, and take longer.
            assess_every: seconds between two computations of the Price of Anarchy. Those that the
                control plane asks for in between are answered with nothing new; they do not
                change what it does.

        Raises:
            ConfigError: the block sizes differ, or the policy is not known.
        """
        if len({plant.engine.block_size for plant in plants}) != 1:
            raise ConfigError("fleet: workers have different block_size; give all the same")
        # Nobody asks a simulation why; to explain a decision takes longer than to make it.
        self.plane = ControlPlane(msgspec.structs.replace(control, max_decisions=0), policy)
        self.network = Network(config.link, clock)
        self.gaps = Gaps()
        self.assessments: list[PoAEstimate] = []
        self.placements: list[Placement] = []
        self.members: list[Member] = []
        self._named: dict[str, Member] = {}
        self._config, self._clock, self._stepwise = config, clock, stepwise
        self._rng, self._seed = Random(seed), seed
        self._assess_every = round(assess_every * SECOND)
        self._assess_next = 0
        self._behind: Behind = {}
        self.dispatcher = Dispatcher(
            self.plane, clock, self.network, self._named, round((config.overhead_ms or 0) * _MS),
            round(config.lease_s * SECOND), self._assess, round(config.leg_ms * _MS), self._behind,
        )  # fmt: skip
        for kind, plant in zip(config.workers, plants, strict=True):
            for _ in range(kind.count):
                self._join(plant)
        clock.at(EPOCH + TICK, Phase.TICK, -2, self._tick)
        if config.signals.report_every_ms:
            self._report_every = max(1, round(config.signals.report_every_ms * _MS))
            clock.at(EPOCH + self._report_every, Phase.TICK, -3, self._reports)

    def close(self) -> None:
        """The run is over: count what is under way."""
        for member in self.members:
            if member.sim is not None:
                member.sim.close()

    def check(self) -> None:
        """Check the laws of all cores.

        Raises:
            IntegrityError: one does not hold.
        """
        for member in self.members:
            if member.sim is not None:
                member.sim.core.check_integrity()

    # --- members ------------------------------------------------------------------------------

    def _join(self, plant: Plant) -> None:
        kind, engine = plant.kind, plant.engine
        number = len(self.members)
        name = f"{kind.role.value}-{number}"
        worker = Worker(
            name,
            "",
            kind.role,
            engine.block_size,
            engine.blocks,
            engine.max_seqs,
            kind.events,
            overtakes=engine.order == "priority",
            layout=plant.layout,
            rehearsed=plant.rehearsed,
        )
        member = self._named[name] = Member(number, worker, plant)
        self.members.append(member)
        self.dispatcher.seat(engine.max_seqs)
        clock = self._clock
        if kind.starts:
            self._at(kind.starts, number, lambda now: self._up(member, now))
        else:
            self._up(member, clock.now)
        for outage in kind.fails:
            self._at(outage.start, number, lambda now: self._die(member, now))
            if outage.end < float("inf"):
                self._at(outage.end, number, lambda now: self._up(member, now))
        for slow in kind.slow:
            slowed = Slowed(plant.timing, slow.factor)
            self._at(slow.start, number, lambda now, to=slowed: self._pace(member, to, now))
            if slow.end < float("inf"):
                self._at(slow.end, number, lambda now: self._pace(member, plant.timing, now))

    def _at(self, seconds: float, number: int, event: object) -> None:
        self._clock.at(EPOCH + round(seconds * SECOND), Phase.FAULT, number, event)  # type: ignore[arg-type]

    def _up(self, member: Member, now: int) -> None:
        """A worker is ready, with an empty cache."""
        if member.sim is not None:
            return
        plant, signals = member.plant, self._config.signals
        late = signals.event_loss or signals.event_delay_ms  # when events are sent off matters
        member.sim = SimWorker(
            member.number, member.name, plant.engine, plant.timing, self._clock, self, self.gaps,
            ahead=plant.ahead, stepwise=self._stepwise, behind=None if late else self._behind,
            tiers=plant.make_tiers(), seed=self._seed,
        )  # fmt: skip
        member.missed = []
        if member.known:  # it died and came back before anybody noticed
            self.dispatcher.observe(WorkerDown(member.name), now)
        member.known = True
        self.dispatcher.observe(WorkerUp(member.worker), now)

    def _die(self, member: Member, now: int) -> None:
        if member.sim is None:
            return
        legs = member.sim.die()
        member.past = member.figures
        member.sim = None
        member.holding.clear()
        detect = round(self._config.detect_ms * _MS)
        if detect:
            self._clock.at(
                now + detect, Phase.FAULT, member.number, lambda at: self._miss(member, at)
            )
        else:
            self._miss(member, now)
        for leg in legs:
            self.dispatcher.broken(leg, now)

    def _miss(self, member: Member, now: int) -> None:
        """The control plane notices that a worker is dead."""
        if member.sim is None and member.known:
            member.known = False
            self.dispatcher.observe(WorkerDown(member.name), now)

    def _pace(self, member: Member, timing: object, now: int) -> None:
        if member.sim is not None:
            member.sim.retime(timing, now)  # type: ignore[arg-type]

    # --- what workers tell --------------------------------------------------------------------

    def refused(self, leg: Leg, error: Exception, now: int) -> None:
        """A leg was not taken in."""
        self.dispatcher.refused(leg, error, now)

    def first_token(self, leg: Leg, now: int) -> None:
        """A leg yielded its first token."""
        self.dispatcher.first_token(leg, now)

    def finished(self, leg: Leg, finished: Finished, now: int) -> None:
        """A leg ended by itself."""
        self.dispatcher.finished(leg, finished, now)

    def wanted(self, leg: Leg, load: Load, now: int) -> None:
        """A leg wants blocks of its source; none, if it has them all."""
        self.dispatcher.wanted(leg, load, now)

    def cache_changed(self, worker: str, events: tuple[KVEvent, ...], now: int) -> None:
        """KV events are published: they arrive late, or get lost, as the signals have it."""
        member, signals = self._named[worker], self._config.signals
        if not member.worker.events:
            return
        if signals.event_loss and self._rng.random() < signals.event_loss:
            member.missed += events
            return
        missed: tuple[KVEvent, ...] = ()
        if member.missed:
            missed, member.missed = tuple(member.missed), []
        if signals.event_delay_ms:
            sim = member.sim
            self._clock.at(
                now + round(signals.event_delay_ms * _MS), Phase.TICK, member.number,
                lambda at: self._deliver(member, missed, events, at)
                if member.sim is sim else None,
            )  # fmt: skip
        else:
            self._deliver(member, missed, events, now)

    def _deliver(
        self, member: Member, missed: tuple[KVEvent, ...], events: tuple[KVEvent, ...], now: int
    ) -> None:
        if not member.known:
            return
        if missed and not self._config.signals.replay:
            self.dispatcher.observe(CacheLost(member.name), now)
            missed = ()
        self.dispatcher.cache_changed(CacheChanged(member.name, missed + events), now)

    # --- time ---------------------------------------------------------------------------------

    def _tick(self, now: int) -> None:
        self.dispatcher.tell(self.members, now)
        self.dispatcher.tick(now)
        caching = self.plane.cache_monitor
        if caching.placement is not None and caching.games > len(self.placements):
            self.placements.append(caching.placement)
        self._clock.at(now + TICK, Phase.TICK, -2, self._tick)

    def _reports(self, now: int) -> None:
        signals = self._config.signals
        delay = round(signals.report_delay_ms * _MS)
        for member in self.members:
            if member.sim is None:
                continue
            if signals.report_loss and self._rng.random() < signals.report_loss:
                continue
            running, waiting, usage = member.sim.load(now)
            report = LoadReport(member.name, running, waiting, usage)
            if delay:
                tell = partial(self.dispatcher.observe, report)
                self._clock.at(now + delay, Phase.TICK, member.number, tell)
            else:
                self.dispatcher.observe(report, now)
        self._clock.at(now + self._report_every, Phase.TICK, -3, self._reports)

    def _assess(self, asked: Assess, now: int) -> None:
        found = None
        if now >= self._assess_next:
            self._assess_next = now + self._assess_every
            found = self.plane.assess(asked.snapshot)
            if found is not None:
                self.assessments.append(found)
        self.dispatcher.observe(Assessed(found), now)
