"""Laws of what router and planner tell each other."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_fleets import PROMPT, pairs, split
from tests.control.planner.fluid_fleet import MIX, PREFILL
from tests.lib.examples import examples

from pigou.control.planner.planner import Planner, PlannerSetup, load
from pigou.control.planner.price.frontier import ModelPlan, PoolOption, RoleCapacity
from pigou.control.planner.price.terms import PricePlannerParams
from pigou.control.router import RouteMeter
from pigou.control.routing.toll.policy import Toll
from pigou.control.routing.view import FleetView
from pigou.objectives import Budget, ProvisioningTimes, Slo
from pigou.request import SECOND, Role
from pigou.windows.planner_window import (
    LoadWindow,
    PlannerWindow,
    PoolWindow,
    WorkerState,
    WorkerWindow,
)

SLO = Slo(ttft_s=0.738, itl_s=0.03)
#: One prefill worker, and two that decode.
PAIRS = pairs((-1, 1), (-1, 2), (0, 1), (0, 2))


def metered(fleet: FleetView, chosen: int) -> dict[str, float]:
    """Return the tokens of each worker after one route."""
    meter = RouteMeter()
    prices = Toll().parts(PROMPT, fleet, PAIRS)
    meter.add(PROMPT.prompt, fleet, PAIRS, chosen, prices, 0.0)
    return {worker: tokens for worker in fleet.ids if (tokens := meter.take(worker))}


def test_a_prompt_counts_where_it_is_computed_or_would_be_without_queues() -> None:
    busy = {"decode_requests": [0, 30, 30], "output": 100.0}
    assert metered(split(1, 3, **busy), chosen=2) == {"w0": 1000.0}
    # A queue sends it to a decode worker: prefill workers are still what it calls for.
    queue = {"prefill_requests": [40, 0, 0], "prefill_tokens": [400_000, 0, 0]}
    assert metered(split(1, 3, **busy, **queue), chosen=0) == {"w0": 1000.0}
    # A decode worker that holds nearly all of it is cheaper than any prefill worker.
    calm = {"decode_requests": [0, 2, 2], "output": 100.0, "overlap": [0, 62, 0]}
    assert metered(split(1, 3, **calm), chosen=0) == {"w1": 8.0}
    meter = RouteMeter()
    assert meter.take("w0") == 0.0


def plan(share: float, load_rps: float = 20.0) -> ModelPlan:
    pools = [
        PoolOption(name, role, 1, PREFILL, 0, 64, 1)
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE))
    ]
    return ModelPlan(PricePlannerParams(), load_rps, MIX, pools, [SLO], 1.0, share)


@given(share=st.floats(0.1, 1.0), workers=st.integers(1, 30))
@settings(max_examples=examples(25))
def test_a_pool_serves_the_share_that_routes_send_it(share: float, workers: int) -> None:
    """Prompts that prefill workers do not compute take time of decode workers."""
    own, whole = plan(share), plan(1.0)
    curves = whole.curves
    assert whole.capacity_rps("p", workers) == curves["p"](workers)
    assert whole.capacity_rps("d", workers) == curves["d"](workers)
    assert own.capacity_rps("p", workers) == pytest.approx(curves["p"](workers) / share)
    local_s = (1.0 - share) * PREFILL.service_s(MIX)
    busy = own.capacity_rps("d", workers) * local_s / workers
    assert own.capacity_rps("d", workers) == pytest.approx(curves["d"](workers) * (1.0 - busy))


@given(share=st.floats(0.05, 1.0), prompt_s=st.floats(0.0, 2.0), workers=st.integers(1, 30))
@settings(max_examples=examples(200))
def test_a_load_that_some_workers_serve_takes_no_more(
    share: float, prompt_s: float, workers: int
) -> None:
    """A level is lost to rounding otherwise, and its split with it."""
    option = PoolOption("p", Role.PREFILL, 1, PREFILL, 0, 64, 1)
    role = RoleCapacity([(option, plan(1.0).curves["p"])], share, prompt_s)
    assert role.counts_for(role.rps({"p": workers}))["p"] <= workers


@pytest.mark.parametrize("share", [1.0, 0.6, 0.2, 0.0])
def test_splits_serve_the_load_with_the_fewest_workers(share: float) -> None:
    best = plan(share).frontier()[-1].counts
    for pool in ("p", "d"):
        assert plan(share).capacity_rps(pool, best[pool]) >= 20.0
        assert best[pool] <= 1 or plan(share).capacity_rps(pool, best[pool] - 1) < 20.0


def planned(tokens: float | None, rps: float = 10.0) -> dict[str, int]:
    """Return the workers wanted after ten minutes in which routes bring `tokens` a request."""
    setup = PlannerSetup(slo=SLO, budget=Budget(max_gpus=64), times=ProvisioningTimes(),
                         performance=dict.fromkeys(("p", "d"), PREFILL))  # fmt: skip
    planner: Planner = load("price", setup, {})
    ready = {"state": WorkerState.READY, "since_ns": 0, "waiting": 0, "running": 1}
    for second in range(5, 600, 5):
        arrivals = int(5 * rps)
        routed = None if tokens is None else tokens * arrivals
        p = WorkerWindow(id="p-0", routed_tokens=routed, **ready)  # type: ignore[arg-type]
        d = WorkerWindow(id="d-0", routed_tokens=None, **ready)  # type: ignore[arg-type]
        planner.observe(PlannerWindow(
            now_ns=second * SECOND, seconds=5.0,
            loads=(LoadWindow(arrivals=arrivals, isl=MIX.isl, osl=MIX.osl, hit_rate=0.0),),
            pools=(PoolWindow(name="p", role=Role.PREFILL, workers=(p,)),
                   PoolWindow(name="d", role=Role.DECODE, workers=(d,))),
        ))  # fmt: skip
        decision = planner.tick(second * SECOND)
    return {pool.pool: pool.wanted for pool in decision.pools}


def test_the_planner_wants_the_prefill_workers_that_routes_call_for() -> None:
    whole = planned(None)
    assert planned(MIX.isl) == whole
    half = planned(0.5 * MIX.isl)
    assert half["p"] == pytest.approx(whole["p"] / 2, abs=1.0)
    assert half["p"] < whole["p"]
    assert half["d"] > whole["d"]
    assert planned(2.0 * MIX.isl) == whole  # a prompt has no more


def test_a_window_of_an_older_journal_says_nothing_of_routes() -> None:
    old = msgspec.json.decode(b'{"id": "w"}', type=WorkerWindow)
    assert old.routed_tokens is None
    assert math.isfinite(plan(1.0).capacity_rps("p", 1))
