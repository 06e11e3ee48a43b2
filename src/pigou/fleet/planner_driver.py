"""Planner driver: feeds a planner windows of the live fleet, and carries out its decisions."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Sequence

from pigou.background import Background, cancel
from pigou.config import ConfigError
from pigou.control.journal import planner_entry
from pigou.control.planner.actuation import carry_out
from pigou.control.planner.config import PlannerConfig
from pigou.control.planner.messages import PlannerDecision, RebalancePool
from pigou.control.planner.planner import Planner, PlannerStarted, PoolProfile, decide
from pigou.control.planner.tenant_load import TenantLoad
from pigou.engine.startup_profiling import CONTEXT_TOKENS
from pigou.fleet.live_fleet import LiveFleet
from pigou.fleet.planner_windows import PlannerWindows
from pigou.gateway.plan_status import PlanStatus
from pigou.gateway.plane_driver import PlaneDriver
from pigou.objectives import Budget, ProvisioningTimes, Slo
from pigou.performance.sweep_tables import SweepTables
from pigou.request import Role, Worker
from pigou.windows.planner_window import PlannerWindow

_log = logging.getLogger("pigou.fleet")

#: Seconds of a drain, and of a start that nobody has timed yet, that a planner reckons with.
_DRAIN_S, _START_UP_S = 10.0, 30.0
#: Minimum points of a profile, for prompts and for streams.
_MIN_POINTS = 2
#: Placeholder for speeds of workers that are not up yet.
_ANY_PROFILE = PoolProfile(
    prefill=((128.0, 0.1), (512.0, 0.4)), decode=((1.0, 256.0, 0.01), (16.0, 256.0, 0.02))
)


class PlannerDriver:
    """Observes, decides and acts every few seconds; a planner that raises changes nothing."""

    def __init__(
        self, config: PlannerConfig, live_fleet: LiveFleet, plane_driver: PlaneDriver,
        status: PlanStatus, drain_s: float = _DRAIN_S, others: Sequence[PlaneDriver] = (),
    ) -> None:  # fmt: skip
        """`plane_driver` is the first model's; its journal gets the entries. Raises ConfigError."""
        self._config, self._live_fleet, self._plane_driver = config, live_fleet, plane_driver
        self._plane_drivers = (plane_driver, *others)
        self._status = status
        if config.performance and others:
            raise ConfigError(
                f"performance is {config.performance!r}, which is of one model, and there are "
                f"{len(self._plane_drivers)}; leave it out"
            )
        self._drain_s = min(drain_s, _DRAIN_S)
        self._tables = SweepTables.read(config.performance) if config.performance else None
        self._started(Budget(), ProvisioningTimes(), {"": _ANY_PROFILE}).make()
        self._task: asyncio.Task[None] | None = None

    @property
    def max_workers(self) -> int:
        """Worker limit, 0 for none; by default the room."""
        given = self._config.max_workers
        return self._live_fleet.room if given is None else given

    def start(self, background: Background) -> None:
        """Begin to plan; the first workers are up. Raises ConfigError."""
        try:
            self.describe().make()
        except ConfigError as error:
            raise ConfigError(
                f"{error}; give --performance FILE of `pigou sweep`, or workers more seconds to "
                "measure themselves, as `-- --rehearse 10`"
            ) from error
        self._task = background.start("planner", self.run)

    async def stop(self) -> None:
        """End."""
        if self._task is not None:
            await cancel(self._task)

    async def run(self) -> None:
        """Plan until cancelled."""
        started = self.describe()
        planner = started.make()
        self._plane_driver.write(planner_entry(started, time.monotonic_ns()))
        self._status.begin(planner.name, self.max_workers)
        _log.info("planner %s plans every %g s", planner.name, self._config.interval_s)
        windows = PlannerWindows(self._live_fleet, *self._plane_drivers)
        interval_s = self._config.interval_s
        sample_s = min(1.0, interval_s / 4)
        due_s = time.monotonic() + interval_s
        while True:
            await asyncio.sleep(min(sample_s, max(due_s - time.monotonic(), 0.0)))
            windows.sample()
            self._live_fleet.keep_limits()
            if time.monotonic() >= due_s:
                due_s = max(due_s + interval_s, time.monotonic())
                await self.plan(planner, windows.window(time.monotonic_ns()))

    async def plan(self, planner: Planner, window: PlannerWindow) -> None:
        """Run the planner on a window, in a thread, and actuate."""
        try:
            decision = await asyncio.to_thread(decide, planner, window)
        except Exception as error:
            _log.exception("the planner failed; the fleet stays as it is")
            self._status.failed(window, error)
            entry = planner_entry(window, window.now_ns, error=type(error).__name__)
        else:
            self._status.record(window, decision, self._act(decision, window.now_ns))
            entry = planner_entry(window, window.now_ns, decision)
        self._plane_driver.write(entry)

    def _act(self, decision: PlannerDecision, now: int) -> list[str]:
        refusals, load, limit = [], self._load(), self.max_workers
        for action in decision.actions:
            try:
                why = carry_out(action, self._live_fleet, now, limit, load)
            except Exception as error:
                _log.exception("%s could not be carried out", action)
                why = f"{type(action).__name__} failed: {error or type(error).__name__}"
            if why:
                refusals.append(why)
            else:
                self._status.carried_out(action)
            if not isinstance(action, RebalancePool):
                _log.info("planner: %s%s", action, f", refused: {why}" if why else "")
        return refusals

    def _load(self) -> TenantLoad:
        work = sum((Counter(d.meter.work_by_tenant()) for d in self._plane_drivers), Counter[str]())
        return TenantLoad(work, self._plane_driver.plane.config.tenant_weights)

    # --- what the planner is made of ----------------------------------------------------------

    def describe(self) -> PlannerStarted:
        """Return the planner's configuration for the present fleet."""
        pools = self._live_fleet.provided
        max_workers = self.max_workers
        widest = max((pool.gpus for pool in pools.values()), default=1)
        budget = Budget(max_gpus=max_workers * widest) if max_workers else Budget()
        start_up_s = self._config.start_up
        if start_up_s is None:
            known = [pool.start_up_s for pool in pools.values() if pool.start_up_s is not None]
            start_up_s = max(known, default=_START_UP_S)
        ups = {id: up for driver in self._plane_drivers for id, up in driver.upstreams.items()}
        times = ProvisioningTimes(
            start_up_s=start_up_s,
            # Workers that profile themselves have run every kernel before they are ready.
            warm_up_s=0.0 if all(up.worker.rehearsed for up in ups.values()) else 10.0,
            drain_s=self._drain_s,
            flip_s=self._drain_s if self._can_flip() else math.inf,
        )
        profiles: dict[str, PoolProfile] = {}
        for member in self._live_fleet.members:
            up = ups.get(member.id)
            profile = None if up is None else profile_of(up.worker)
            if profile is not None:
                profiles.setdefault(member.pool, profile)
        return self._started(budget, times, profiles)

    def _started(
        self, budget: Budget, times: ProvisioningTimes, profiles: dict[str, PoolProfile]
    ) -> PlannerStarted:
        params = dict(self._config.planner)
        provided = self._live_fleet.provided.values()
        roles = {role.value: role for role in Role} | {pool.name: pool.role for pool in provided}
        return PlannerStarted(
            planner=params.pop("planner"),
            params=params,
            slo=self._config.objective or Slo(),
            classes=self._config.workload_classes,
            budget=budget,
            times=times,
            profiles=profiles,
            tables=self._tables,
            roles={} if self._tables is None else roles,
        )

    def _can_flip(self) -> bool:
        return any(
            pool != member.pool and not self._live_fleet.flip_refusal(member.id, pool)
            for member in self._live_fleet.members
            for pool in self._live_fleet.pools
        )


def profile_of(worker: Worker) -> PoolProfile | None:
    """Return a worker's startup profile; None if too small."""
    prompts = {entry.tokens: entry.seconds for entry in worker.rehearsed if not entry.streams}
    streams = {
        entry.streams: entry.seconds / entry.steps for entry in worker.rehearsed if not entry.tokens
    }
    is_prefill, is_decode = worker.role is Role.PREFILL, worker.role is Role.DECODE
    if (len(prompts) < _MIN_POINTS and not is_decode) or (
        len(streams) < _MIN_POINTS and not is_prefill
    ):
        return None
    if not prompts or not streams:
        return None
    return PoolProfile(
        prefill=tuple((float(n), s) for n, s in sorted(prompts.items())),
        decode=tuple((float(n), float(CONTEXT_TOKENS), s) for n, s in sorted(streams.items())),
        kv_tokens=float(worker.blocks * worker.block_size) or math.inf,
        max_seqs=worker.max_seqs or 256,
    )
