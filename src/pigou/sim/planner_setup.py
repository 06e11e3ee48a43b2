"""What the planner of a simulation is told of the fleets that it changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pigou.config import ConfigError
from pigou.control.planner.planner import Planner, PlannerSetup, load
from pigou.objectives import Budget, Objectives, ProvisioningTimes, Slo
from pigou.performance.sweep_tables import SweepTables
from pigou.sim.fleet_config import FleetConfig
from pigou.sim.membership import Membership
from pigou.sim.pool_performance import measure_performance
from pigou.sim.scaling_config import ScalingConfig
from pigou.small_file import read_bytes

#: Seconds of a drain that a planner reckons with, where there is no limit.
_DRAIN_S = 10.0


class PlannedFleet(NamedTuple):
    """A fleet as a planner is told of it."""

    prefix: str
    config: FleetConfig
    membership: Membership


def with_start_up(fleet: FleetConfig, config: ScalingConfig) -> FleetConfig:
    """Return a fleet with the start-up time that the scaling has, where it has one."""
    if config.start_up is None:
        return fleet
    start_up = msgspec.structs.replace(fleet.start_up, seconds=config.start_up)
    return msgspec.structs.replace(fleet, start_up=start_up)


def build_planner(
    config: ScalingConfig, objectives: Objectives, fleets: Sequence[PlannedFleet], seed: int
) -> Planner:
    """Return the planner that a configuration names."""
    params = dict(config.planner)
    return load(params.pop("planner"), planner_setup(config, objectives, fleets, seed), params)


def planner_setup(
    config: ScalingConfig, objectives: Objectives, fleets: Sequence[PlannedFleet], seed: int
) -> PlannerSetup:
    """Return what every planner of these fleets is given."""
    tables = _tables(config, fleets)
    performance = {
        fleet.prefix + pool.name: measure_performance(pool.spec, pool.role, fleet.config)
        if tables is None
        else tables.performance(pool.role)
        for fleet in fleets
        for pool in fleet.membership.pools.values()
    }
    return PlannerSetup(
        slo=objectives.slo or Slo(),
        classes=objectives.classes,
        budget=budget_of(config, fleets),
        times=times_of(fleets),
        performance=performance,
        seed=seed,
    )


def _tables(config: ScalingConfig, fleets: Sequence[PlannedFleet]) -> SweepTables | None:
    """Return the tables that are given instead of measuring; None without any."""
    if not config.performance:
        return None
    makes = {pool.make for fleet in fleets for pool in fleet.membership.pools.values()}
    if len(fleets) > 1 or len(makes) > 1:
        raise ConfigError(
            f"performance is {config.performance!r}, and the fleet has workers of several kinds; "
            "leave it out, and they are measured"
        )
    try:
        return SweepTables.parse(read_bytes(config.performance))
    except OSError as error:
        raise ConfigError(f"performance is {config.performance!r}: {error.strerror}") from None


def budget_of(config: ScalingConfig, fleets: Sequence[PlannedFleet]) -> Budget:
    """Return GPUs for as many workers of the widest pool as there may be."""
    if not config.max_workers:
        return Budget()
    pools = [pool for fleet in fleets for pool in fleet.membership.pools.values()]
    return Budget(max_gpus=config.max_workers * max(pool.spec.gpus for pool in pools))


def times_of(fleets: Sequence[PlannedFleet]) -> ProvisioningTimes:
    """Return what changes take, that of the slowest fleet each."""
    start_ups = [fleet.config.start_up for fleet in fleets]
    drain_s = max(fleet.config.drain_s or _DRAIN_S for fleet in fleets)
    flips = [
        fleet.config.flip.seconds + (drain_s if fleet.config.flip.drains else 0.0)
        for fleet in fleets
        if any(fleet.membership.can_flip(a, b) for a in fleet.membership.pools
               for b in fleet.membership.pools)
    ]  # fmt: skip
    return ProvisioningTimes(
        start_up_s=max(start.seconds for start in start_ups),
        warm_up_s=max(start.warm_up_s for start in start_ups),
        drain_s=drain_s,
        flip_s=max(flips, default=math.inf),
    )
