"""Fleets of several models under one planner, which shares a budget between them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pigou.config import ConfigError, ControlConfig
from pigou.control.planner.config import NO_PLANNER
from pigou.control.planner.planner import Planner
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import FleetConfig, ScalingConfig
from pigou.sim.result import SimulationResult
from pigou.sim.scaling import PlannedFleet, Scaling, build_planner, with_start_up
from pigou.sim.setup import Setup
from pigou.sim.simulation import Simulation
from pigou.sim.virtual_clock import Clock
from pigou.sim.workload import ClosedLoop, OpenLoop

_EVENTS = 4096


@dataclass(frozen=True, slots=True)
class ModelFleet:
    """A model's workload and its fleet; `setup.model` is its name."""

    workload: OpenLoop | ClosedLoop
    fleet: FleetConfig
    setup: Setup
    client: ClientConfig = field(default_factory=ClientConfig)


class ModelFleets:
    """Simulations of several models on one clock and planner; its names are `MODEL/NAME`."""

    def __init__(
        self, models: Sequence[ModelFleet], control: ControlConfig, scaling: ScalingConfig,
        *, seed: int = 0, planner: Planner | None = None,
    ) -> None:  # fmt: skip
        """Make the fleets; `planner` replaces that of `scaling`. Raises ConfigError."""
        names = [model.setup.model for model in models]
        if len(set(names)) < len(names):
            raise ConfigError(f"model is one of {', '.join(names)}; give each a name of its own")
        if planner is None and not scaling.plans:
            raise ConfigError(f"planner is {NO_PLANNER}; several models need one")
        self._clock = Clock()
        own = ScalingConfig(slo=scaling.slo, classes=scaling.classes)
        self.simulations: dict[str, Simulation] = {
            model.setup.model: Simulation(
                model.workload, with_start_up(model.fleet, scaling), model.setup, control,
                model.client, seed=seed, scaling=own, clock=self._clock,
            )
            for model in models
        }  # fmt: skip
        if planner is None:
            planned = [
                PlannedFleet(_prefix(name), one.config, one.membership)
                for name, one in self.simulations.items()
            ]
            objectives = next(iter(self.simulations.values())).objectives
            planner = build_planner(scaling, objectives, planned, seed)
        fleets = [one.scaled_fleet(_prefix(name)) for name, one in self.simulations.items()]
        self.scaling = Scaling(planner, fleets, self._clock, scaling)

    @property
    def done(self) -> bool:
        """Whether all clients are."""
        return all(one.client.done for one in self.simulations.values())

    def run(self) -> dict[str, SimulationResult]:
        """Run until all clients are done; return the results by model."""
        began = time.perf_counter()
        while not self._clock.run(self, _EVENTS):
            pass
        wall_s = time.perf_counter() - began
        return {name: one.finish(wall_s) for name, one in self.simulations.items()}

    def document(self, results: dict[str, SimulationResult]) -> dict[str, Any]:
        """Return the figures as a JSON document: those of each model, and of the planner."""
        return {
            "models": {name: result.document() for name, result in results.items()},
            "planner": self.scaling.summary(self._clock.now),
        }


def _prefix(model: str) -> str:
    return f"{model}/"
