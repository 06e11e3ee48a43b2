"""The coupled games: what is hidden from a planner, and the planner of the Price of Anarchy."""

from __future__ import annotations

import pytest

from pigou.control.planner.messages import FlipRole
from pigou.request import SECOND, Role
from pigou.windows.planner_window import LoadWindow, PlannerWindow, PoolWindow, WorkerWindow
from pigou_lab.experiments.fleets import fleet
from pigou_lab.experiments.three_games import (
    ARMS,
    AnarchyPlanner,
    BlindPlanner,
    coupled_run,
    hide_anarchy,
    hide_cache,
    verdict,
)


def window(second: int, prefill: int = 2, better: int = 3, anarchy: float = 1.5) -> PlannerWindow:
    def workers(role: Role, count: int) -> tuple[WorkerWindow, ...]:
        return tuple(
            WorkerWindow(id=f"{role}-{n}", running=9 - n, cached_tokens=5.0) for n in range(count)
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
    assert seen.better_prefill == {"": 3}
    assert hide_anarchy(window(5)).better_prefill == {}
    blind = BlindPlanner(AnarchyPlanner(), cache=False)
    for second in range(5, 45, 5):
        blind.observe(window(second))
        assert not blind.tick(second * SECOND).actions


def test_each_row_of_the_coupled_games_differs_from_the_coupled_one() -> None:
    one = fleet("340b-1p2d")
    made = [coupled_run(one, 90, changes) for changes in ARMS.values()]
    assert made[0].policy == "toll"
    assert made[0].caching
    assert sum(run == made[0] for run in made) == 3  # coupled, and the two whose windows differ


def test_differences_are_against_the_coupled_row_of_the_load() -> None:
    rows = [
        {"concurrency": 90, "arm": "coupled", "attained": 0.9, "gpu_hours": 2.0},
        {"concurrency": 90, "arm": "static", "attained": 0.5, "gpu_hours": 1.0},
    ]
    assert verdict(rows) == {
        "static_at_90": {"attained_difference": pytest.approx(-0.4), "gpu_hours_ratio": 0.5}
    }
