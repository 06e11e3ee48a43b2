from __future__ import annotations

import pytest

from pigou.capacity.plan.analysis import (
    Configuration,
    LoadFigures,
    PlannedPool,
    WorkerKind,
    plan_joules_per_token,
)
from pigou.config import ControlConfig
from pigou.models.read import architecture
from pigou.performance.speed import RequestMix
from pigou.request import Role
from pigou.sim.client import ClientConfig
from pigou.sim.network import LinkConfig
from pigou.sim.setup import Setup
from pigou.sim.simulation import Simulation
from pigou.sim.workload import RequestLengths, renewal

KIND = WorkerKind(gpu="H100", tp=1, kv_dtype="", max_seqs=256, chunk=2048)


@pytest.mark.parametrize("roles", [{Role.BOTH: 2}, {Role.PREFILL: 1, Role.DECODE: 1}])
def test_a_plans_energy_is_near_to_the_metered_one(roles: dict[Role, int]) -> None:
    pools = tuple(PlannedPool(role=r, kind=KIND, workers=n) for r, n in roles.items())
    made, rate = Configuration(pools=pools), 10.0
    setup = Setup(model="llama-3.1-8b", gpu="H100", prices="default")
    lengths = RequestLengths(input=(1000, 1000), output=(200, 200))
    load = renewal(lengths, rate, 1.0, 0, 20.0, 1)
    result = Simulation(
        load, made.fleet(LinkConfig()), setup, ControlConfig(), ClientConfig(), seed=1
    ).run()
    document = result.document()
    figures = LoadFigures(rate, 0.1, document["itl_s"]["mean"], 1.0, 1.0, 0.0, None)
    planned = plan_joules_per_token(
        made, figures, RequestMix(1000.0, 200.0), architecture("llama-3.1-8b")
    )
    assert planned == pytest.approx(document["energy"]["joules_per_output_token"], rel=0.15)
