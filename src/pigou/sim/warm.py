"""Compile the kernels of a simulation before its time is taken."""

from __future__ import annotations

import msgspec

from pigou.config import ControlConfig
from pigou.control import prefix_index
from pigou.engine import startup_profiling
from pigou.sim.client import ClientConfig
from pigou.sim.config import FleetConfig
from pigou.sim.simulate import Setup, Simulation
from pigou.sim.workload import Lengths, renewal

#: Requests of the small simulation, and how many a second: long enough for an assessment.
_REQUESTS, _RATE = 40, 6.0
_LENGTHS = Lengths(input=(600, 600), output=(40, 40), templates=8)
#: Prompts that the small caches hold, so that something is evicted.
_PROMPTS = 4
#: Workers of a kind, at most: two cost the same at first, and one is drawn.
_WORKERS = 2


def warm_up(fleet: FleetConfig, setup: Setup, control: ControlConfig) -> None:
    """Run a small simulation, so that kernels are compiled or loaded.

    Takes some seconds the first time on a machine, and a fraction of one after that.
    """
    startup_profiling.warm_up()
    prefix_index.warm_up()  # small caches never outgrow its tables
    kinds = tuple(
        msgspec.structs.replace(
            each,
            count=min(each.count, _WORKERS),
            starts=0.0,
            slow=(),
            fails=(),
            blocks=-(-_PROMPTS * _LENGTHS.longest // each.block_size),
        )
        for each in fleet.workers
    )
    small = msgspec.structs.replace(fleet, workers=kinds)
    setup = msgspec.structs.replace(setup, max_model_len=0)
    load = renewal(_LENGTHS, _RATE, 1.0, _REQUESTS, 0.0, seed=0)
    Simulation(load, small, setup, control, ClientConfig()).run()
