"""One concurrency level: ramp, hold and drain, and its figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from pigou.sim.client import ClientConfig
from pigou.sim.result import SimulationResult
from pigou.sim.simulation import Simulation
from pigou.sim.streams import ITLHistogram
from pigou.sim.timing import Law
from pigou.sim.workload import ClosedLoop
from pigou_lab.experiments.fleets import (
    LENGTHS,
    PaperFleet,
    PolicySetting,
    Reading,
    make_simulation,
)
from pigou_lab.experiments.paper import RAMP_S
from pigou_lab.experiments.results import run_simulation
from pigou_lab.experiments.window import Marks, WindowFigures, measure

_DEFAULT = PolicySetting()
#: Called with a simulation before it runs.
Follow = Callable[[Simulation], None]


@dataclass(frozen=True, slots=True)
class Level:
    """The configuration of a run."""

    fleet: PaperFleet
    reading: Reading
    users: int
    hold_s: float = 120.0  # seconds after the ramp
    ramped: bool = True  # whether the ramp counts (Experiment 1)
    setting: PolicySetting = _DEFAULT
    client: ClientConfig | None = None  # in place of the reading's
    law: Law | None = None  # in place of the reading's
    templates: int = LENGTHS.templates  # number of different prompts
    settle: float = 0.0  # seconds after the ramp that do not count, where the ramp does not

    @property
    def end(self) -> float:
        """Seconds from the beginning to the end of the hold."""
        return RAMP_S + self.hold_s


@dataclass(frozen=True, slots=True)
class LevelRun:
    """A run of a level and its figures."""

    measured: WindowFigures
    result: SimulationResult
    gaps: Sequence[ITLHistogram]  # gaps between tokens until the window's begin and end


def run(
    level: Level, seed: int, follow: Sequence[Follow] = (),
    saturation: dict[str, object] | None = None,
) -> LevelRun:  # fmt: skip
    """Run a level; raises ValueError if nothing completed in the window."""
    lengths = replace(LENGTHS, templates=level.templates)
    loop = ClosedLoop(lengths=lengths, phases=((level.users, level.hold_s),), ramp=RAMP_S)
    simulation = make_simulation(
        level.fleet, level.reading, loop, seed, setting=level.setting, sender=level.client,
        law=level.law, saturation=saturation,
    )  # fmt: skip
    begin = 0.0 if level.ramped else RAMP_S + level.settle
    marks = Marks((begin, level.end))
    marks.follow(simulation)
    for follow_one in follow:
        follow_one(simulation)
    result = run_simulation(simulation, users=level.users, seed=seed)
    workers = level.fleet.decoders
    figures = measure(result.runs, begin, level.end, marks.between(0, 1), workers)
    if figures is None:
        raise ValueError(f"C = {level.users}: nothing completed in {level.end:g} s; hold longer")
    return LevelRun(figures, result, marks.taken)
