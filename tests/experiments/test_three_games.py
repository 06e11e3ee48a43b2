"""The coupled games: what is hidden from a planner, and the planner of the Price of Anarchy."""

from __future__ import annotations

import numpy as np
import pytest

from pigou.control.planner.messages import FlipRole
from pigou.control.routing.toll.policy import Toll
from pigou.control.routing.view import Candidates, FleetView
from pigou.request import SECOND, Request, Role
from pigou.windows.planner_window import LoadWindow, PlannerWindow, PoolWindow, WorkerWindow
from pigou_lab.experiments.fleets import fleet
from pigou_lab.experiments.results import Row
from pigou_lab.experiments.three_games import (
    ARMS,
    COMPARED,
    AnarchyPlanner,
    BlindPlanner,
    FreeMemoryToll,
    coupled_run,
    hide_cache,
    hide_routes,
    verdict,
)


def window(second: int, prefill: int = 2, better: int = 3, anarchy: float = 1.5) -> PlannerWindow:
    def workers(role: Role, count: int) -> tuple[WorkerWindow, ...]:
        return tuple(
            WorkerWindow(id=f"{role}-{n}", running=9 - n, cached_tokens=5.0, routed_tokens=7.0)
            for n in range(count)
        )

    pools = tuple(
        PoolWindow(name=role.value, role=role, workers=workers(role, count))
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, 3))
    )
    return PlannerWindow(
        now_ns=second * SECOND, seconds=5.0, pools=pools, price_of_anarchy={"": anarchy},
        better_prefill={"": better}, loads=(LoadWindow(arrivals=10, hit_rate=0.5),),
    )  # fmt: skip


def flips(planner: AnarchyPlanner, **values: float) -> list[FlipRole]:
    actions = []
    for second in range(5, 45, 5):
        planner.observe(window(second, **values))  # type: ignore[arg-type]
        actions += planner.tick(second * SECOND).actions
    return [action for action in actions if isinstance(action, FlipRole)]


def test_anarchy_flips_towards_the_better_split_when_it_stays() -> None:
    (flip,) = flips(AnarchyPlanner())
    assert flip == FlipRole("decode-2", Role.PREFILL, "prefill")
    (back,) = flips(AnarchyPlanner(), better=1)
    assert back == FlipRole("prefill-1", Role.DECODE, "decode")


@pytest.mark.parametrize("values", [{"better": 2}, {"anarchy": 1.0}, {"prefill": 1, "better": 0}])
def test_anarchy_stays_where_the_split_costs_nothing_or_is_the_last(
    values: dict[str, float],
) -> None:
    assert not flips(AnarchyPlanner(), **values)


def test_a_blind_planner_is_told_of_nothing_that_is_hidden() -> None:
    seen = hide_cache(window(5))
    assert seen.loads[0].hit_rate is None
    assert {w.cached_tokens for pool in seen.pools for w in pool.workers} == {None}
    assert {w.routed_tokens for pool in seen.pools for w in pool.workers} == {7.0}
    seen = hide_routes(window(5))
    assert {w.routed_tokens for pool in seen.pools for w in pool.workers} == {None}
    assert seen.loads[0].hit_rate == 0.5
    inner = AnarchyPlanner()
    BlindPlanner(inner, cache=False).observe(window(5))
    assert inner._window == seen


def test_each_row_of_the_coupled_games_differs_from_the_coupled_one() -> None:
    one = fleet("340b-1p2d")
    made = [coupled_run(one, 90, changes) for changes in ARMS.values()]
    assert made[0].policy == "toll"
    assert made[0].caching
    assert sum(run == made[0] for run in made) == 4  # coupled, and three that see or pay less


def test_differences_are_against_the_coupled_row_of_the_load() -> None:
    def row(arm: str, *attained: float) -> Row:
        runs = [dict.fromkeys(COMPARED, 1.0) | {"attained": share} for share in attained]
        return {"concurrency": 90, "arm": arm, "runs": runs}

    differences = verdict([row("coupled", 0.9, 0.7), row("static", 0.5, 0.5)])["static_at_90"]
    assert differences["attained"] == [pytest.approx(-0.3), pytest.approx(1.27, rel=0.3)]
    assert differences["gpu_hours"] == [0.0, 0.0]
    assert verdict([row("coupled", 0.9), row("static", 0.5)])["static_at_90"]["attained"][1] == 0.0


def test_memory_is_free_to_a_router_without_its_price() -> None:
    columns = {"decode_requests": [4, 4], "overlap": [0, 30]}
    fleet = FleetView.of(2, recomputed_share=[0.5, 0.5], output=100.0, **columns)
    free = FleetView.of(2, output=100.0, **columns)
    request, candidates = Request("r", 1000, 100), Candidates(np.array([-1, -1]), np.array([0, 1]))
    parts = FreeMemoryToll().parts(request, fleet, candidates)
    assert not parts["toll_memory"].any()
    assert Toll().parts(request, fleet, candidates)["toll_memory"].all()
    assert parts.rows == pytest.approx(Toll().parts(request, free, candidates).rows)
