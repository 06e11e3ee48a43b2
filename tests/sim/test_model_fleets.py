"""Fleets of several models share a planner, a clock and a limit of workers, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import msgspec
import pytest
from setups import LAW, open_loop

from pigou.config import ConfigError, ControlConfig
from pigou.control.planner.messages import Action, AddWorkers, DrainWorker, PlannerDecision
from pigou.request import SECOND
from pigou.sim.fleet_config import ScalingConfig, read_fleet
from pigou.sim.request_run import RunOutcome
from pigou.sim.setup import Setup
from pigou.sim.simulation import UNLIMITED
from pigou.sim.virtual_clock import EPOCH
from pigou.sim.workload import OpenLoop
from pigou.windows.planner_window import PlannerWindow, WorkerState
from pigou_lab.model_fleets import ModelFleet, ModelFleets

CONTROL = ControlConfig(max_inflight=UNLIMITED, max_inflight_tokens=UNLIMITED,
                        queue_timeout=UNLIMITED, max_queued=UNLIMITED)  # fmt: skip
MODELS = ("llama-3.1-8b", "qwen3-32b")


class NoParameters(msgspec.Struct, frozen=True):
    """None."""


class Mover:
    """Moves a worker from the second model to the first at 2 s, and tries to exceed the limit."""

    name: ClassVar[str] = "mover"
    Params: ClassVar[type[msgspec.Struct]] = NoParameters

    def __init__(self) -> None:
        self.windows: list[PlannerWindow] = []

    def observe(self, window: PlannerWindow) -> None:
        self.windows.append(window)

    def tick(self, now_ns: int) -> PlannerDecision:
        actions: tuple[Action, ...] = ()
        if now_ns == EPOCH + 2 * SECOND:
            actions = (
                DrainWorker(f"{MODELS[1]}/both-1"), AddWorkers(f"{MODELS[0]}/both", 5),
                AddWorkers("both", 1),
            )  # fmt: skip
        return PlannerDecision(now_ns=now_ns, planner=self.name, actions=actions)


def fleets(planner: Any = None, named: str = "mover", **options: Any) -> ModelFleets:
    models = [
        ModelFleet(open_loop(40.0, 200, seed=seed), read_fleet(f"{seed + 1}xboth"),
                   Setup(model=model, timing=LAW, blocks=200, max_seqs=16))
        for seed, model in enumerate(MODELS)
    ]  # fmt: skip
    options = {"max_workers": 4, "start_up": 0.5, "interval_s": 1.0,
               "planner": {"planner": named}} | options  # fmt: skip
    return ModelFleets(models, CONTROL, ScalingConfig(**options), planner=planner)


def test_one_planner_changes_the_fleets_of_all_models_within_one_limit() -> None:
    planner = Mover()
    made = fleets(planner, slo="ttft=1")
    results = made.run()
    document = made.document(results)
    for one in made.simulations.values():
        one.fleet.check()
        assert {run.outcome for run in one.client.runs} == {RunOutcome.DONE}
    first, second = made.simulations.values()
    assert (first.membership.size, second.membership.size) == (2, 1)
    figures = document["planner"]
    assert (figures["peak_workers"], figures["moves"]) == (4, 2)
    (decision,) = figures["decisions"]
    assert decision["refused"] == [
        f"{MODELS[0]}/both: 4 workers more than max_workers allows", "there is no pool 'both'",
    ]  # fmt: skip
    assert set(figures["gpu_hours_by_role"]) == {f"{model}/both" for model in MODELS}
    window = planner.windows[-1]
    assert [load.model for load in window.loads] == list(MODELS)
    assert [pool.name for pool in window.pools] == [f"{model}/both" for model in MODELS]
    ids = [w.id for pool in window.pools for w in pool.in_state(WorkerState.READY)]
    assert len(set(ids)) == len(ids)
    assert document["models"][MODELS[0]]["slo"]["attained"] > 0.5


def test_the_same_seed_gives_the_same_figures() -> None:
    def figures() -> dict[str, Any]:
        made = fleets(Mover())
        document = made.document(made.run())
        for model in document["models"].values():
            del model["wall_s"], model["peak_rss_mb"]
        return document

    assert figures() == figures()


def test_models_need_names_and_a_planner() -> None:
    model = ModelFleet(open_loop(), read_fleet("1xboth"), Setup(timing=LAW, blocks=200))
    with pytest.raises(ConfigError, match="give each a name of its own"):
        ModelFleets([model, model], CONTROL, ScalingConfig(), planner=Mover())
    with pytest.raises(ConfigError, match="several models need one"):
        ModelFleets([model], CONTROL, ScalingConfig())


def test_planners_are_found_by_name_for_several_models_too() -> None:
    made = fleets(named="static")
    document = made.document(made.run())
    assert document["planner"]["name"] == "static"
    assert document["planner"]["moves"] == 0


def test_the_price_planner_moves_a_worker_to_the_model_whose_load_rose() -> None:
    def turning(before: float, after: float, seed: int) -> OpenLoop:
        first, second = (
            open_loop(rate, int(rate * 12), seed=seed + 10 * part).sessions
            for part, rate in enumerate((before, after))
        )
        moved = (replace(one, start_ns=one.start_ns + 12 * SECOND) for one in second)
        return OpenLoop([*first, *moved])

    loads = {MODELS[0]: (turning(45, 3, 1), 2), MODELS[1]: (turning(3, 45, 2), 1)}
    models = [
        ModelFleet(load, read_fleet(f"{count}xboth"),
                   Setup(model=model, timing=LAW, blocks=200, max_seqs=16))
        for model, (load, count) in loads.items()
    ]  # fmt: skip
    scaling = ScalingConfig(
        slo="ttft=1,itl=0.2", planner={"planner": "price", "hold_s": 3.0}, max_workers=3,
        start_up=2.0, interval_s=1.0,
    )  # fmt: skip
    made = ModelFleets(models, CONTROL, scaling)
    document = made.document(made.run())
    assert [one.membership.size for one in made.simulations.values()] == [1, 2]
    figures = document["planner"]
    assert (figures["moves"], figures["reversals"], figures["peak_workers"]) == (2, 0, 3)
    kinds = [action["kind"] for entry in figures["decisions"] for action in entry["actions"]]
    assert kinds == ["drain_worker", "add_workers"], "the budget is never exceeded"
    for one in made.simulations.values():
        assert {run.outcome for run in one.client.runs} == {RunOutcome.DONE}
