"""Small runs and their records, for tests of reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from pigou.config import ControlConfig
from pigou.report.run_record import RunRecord, record
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import read_fleet
from pigou.sim.setup import Setup
from pigou.sim.simulation import UNLIMITED, Simulation
from pigou.sim.streams import ITLHistogram
from pigou.sim.timeline import Timeline
from pigou.sim.workload import ClosedLoop, RequestLengths

LAW = "law:itl_a=0.008,itl_b=0.0003,prefill=0.004,prefill_token=0.00005"


def made(
    users: int = 12, fleet: str = "1p+2d", policy: str = "toll", *, seed: int = 3,
    blocks: int = 400, client: ClientConfig | None = None, nothing: bool = False,
) -> RunRecord:  # fmt: skip
    """Return the record of a short run; of one in which `nothing` was asked for."""
    lengths = RequestLengths(input=(16, 200), output=(1, 40), templates=4)
    loop = ClosedLoop(lengths=lengths, phases=((users, 4.0),), ramp=1.0)
    limits: dict[str, Any] = {"max_inflight": UNLIMITED, "max_inflight_tokens": UNLIMITED}
    simulation = Simulation(
        loop,
        read_fleet(fleet),
        Setup(timing=LAW, blocks=blocks, max_seqs=16, max_batched_tokens=256),
        msgspec.convert(limits | {"policy": policy}, ControlConfig),
        client or ClientConfig(pool=10),
        seed=seed,
        assess_every=1.0,
    )
    timeline = Timeline(simulation)
    result = simulation.run()
    if nothing:
        result = replace(
            result, runs=[], itl=ITLHistogram(), assessments=[], end_ns=result.begin_ns
        )
    config = {"run": {"workload": f"closed:C={users}", "fleet": fleet, "policy": policy,
                      "seed": seed}, "workers": {"blocks": blocks}}  # fmt: skip
    return record(result, timeline, result.document(), f"{policy} on {fleet}", config)
