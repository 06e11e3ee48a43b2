"""One concurrency level: ramp, hold, drain, and what was seen of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from pigou.experiments.fleets import LENGTHS, Fleet, Reading, Setting, simulation
from pigou.experiments.laws import RAMP
from pigou.experiments.window import Marks, Measured, measure
from pigou.sim.client import ClientConfig
from pigou.sim.result import Result
from pigou.sim.simulation import Simulation
from pigou.sim.timing_law import Law
from pigou.sim.workload import ClosedLoop

_DEFAULT = Setting()
#: Called with a simulation before it runs.
Follow = Callable[[Simulation], None]


@dataclass(frozen=True, slots=True)
class Level:
    """What is run.

    Attributes:
        fleet: of the paper.
        reading: of the paper.
        users: concurrency.
        hold: seconds after the ramp.
        ramped: whether the ramp counts (Experiment 1), or only what comes after it.
        setting: of the router.
        client: in place of the reading's.
        law: in place of the reading's.
        templates: different prompts that there are.
        settle: seconds after the ramp that do not count, where the ramp does not.
    """

    fleet: Fleet
    reading: Reading
    users: int
    hold: float = 120.0
    ramped: bool = True
    setting: Setting = _DEFAULT
    client: ClientConfig | None = None
    law: Law | None = None
    templates: int = LENGTHS.templates
    settle: float = 0.0

    @property
    def end(self) -> float:
        """Seconds from the beginning to the end of the hold."""
        return RAMP + self.hold


@dataclass(frozen=True, slots=True)
class Seen:
    """A run of a level: its figures, and all of it."""

    measured: Measured
    result: Result


def run(
    level: Level, seed: int, follow: Sequence[Follow] = (),
    saturation: dict[str, object] | None = None,
) -> Seen:  # fmt: skip
    """Run a level.

    Args:
        level: what.
        seed: of everything that is drawn.
        follow: told of the simulation before it runs.
        saturation: detector of the control plane.

    Raises:
        ValueError: nothing completed in the window.
    """
    lengths = replace(LENGTHS, templates=level.templates)
    loop = ClosedLoop(lengths=lengths, phases=((level.users, level.hold),), ramp=RAMP)
    made = simulation(
        level.fleet, level.reading, loop, seed, setting=level.setting, sender=level.client,
        law=level.law, saturation=saturation,
    )  # fmt: skip
    begin = 0.0 if level.ramped else RAMP + level.settle
    marks = Marks((begin, level.end))
    marks.follow(made)
    for each in follow:
        each(made)
    result = made.run()
    workers = level.fleet.decoders
    found = measure(result.calls, begin, level.end, marks.between(0, 1), workers)
    if found is None:
        raise ValueError(f"C = {level.users}: nothing completed in {level.end:g} s; hold longer")
    return Seen(found, result)
