"""Transition: which workers go, where a pool has too many."""

from __future__ import annotations

import pytest

from pigou.control.planner.messages import DrainWorker
from pigou.control.planner.price.transition import MoveRates, PoolMembership, Transition
from pigou.objectives import Budget, ProvisioningTimes
from pigou.placement.gang import removal_costs
from pigou.placement.topology import DistanceCosts
from pigou.request import SECOND, Location, Role
from pigou.windows.planner_window import PlannerWindow, PoolWindow, WorkerWindow

NEAR, FAR, UNKNOWN = Location("a", "r1", "z"), Location("b", "r2", "z"), Location()


def window(seconds: int, *decode: WorkerWindow) -> PlannerWindow:
    prefill = WorkerWindow(id="p", location=NEAR)
    pools = (
        PoolWindow(name="prefill", role=Role.PREFILL, workers=(prefill,)),
        PoolWindow(name="decode", role=Role.DECODE, workers=decode),
    )
    return PlannerWindow(now_ns=seconds * SECOND, seconds=1.0, pools=pools)


@pytest.mark.parametrize(
    ("places", "losses", "gone"),
    [
        ((NEAR, FAR, NEAR), (0.0, 0.0, 0.0), "d1"),  # without it KV has the shortest way
        ((NEAR, FAR, NEAR), (0.0, 0.1, 0.0), "d0"),  # a cache is worth more
        ((UNKNOWN, UNKNOWN, UNKNOWN), (0.0, 0.0, 0.0), "d0"),
    ],
)
def test_of_workers_with_equal_loss_the_farthest_goes(
    places: tuple[Location, ...], losses: tuple[float, ...], gone: str
) -> None:
    decode = [WorkerWindow(id=f"d{i}", location=place) for i, place in enumerate(places)]
    times, budget = ProvisioningTimes(start_up_s=10), Budget()
    members = PoolMembership(times)
    for seconds in (1, 200):
        seen = window(seconds, *decode)
        members.observe(seen)
    moves = Transition(seen, {"prefill": 1, "decode": 2}, members, budget, times, 30.0)
    loss_s = dict(zip(("d0", "d1", "d2"), losses, strict=True))
    rates = MoveRates({name: lambda w: loss_s.get(w.id, 0.0) for name in ("prefill", "decode")}, {})
    assert moves.moves(rates, seen.now_ns) == (DrainWorker(gone),)


def test_the_cost_without_a_worker_is_the_mean_over_the_pairs_that_stay() -> None:
    costs = DistanceCosts(host=1.0, rack=2.0, zone=4.0, remote=8.0)
    assert removal_costs([NEAR, FAR, UNKNOWN], [NEAR, NEAR], costs) == [6.0, 4.5, 2.5]
    assert removal_costs([NEAR], [FAR], costs) == [0.0]
