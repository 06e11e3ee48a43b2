"""Laws of fleets that change while they run: nothing is lost, nothing new is sent, times add up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from setups import check_times, closed_loop, figures, open_loop, simulation
from tests.lib.examples import examples

from pigou.control.saturation.regime import Regime
from pigou.request import SECOND, Role
from pigou.sim.fleet_config import FleetConfig, Outage, RoleFlipConfig, StartUpConfig, WorkerGroup
from pigou.sim.request_run import RunOutcome
from pigou.sim.simulation import Simulation
from pigou.sim.virtual_clock import EPOCH, Phase
from pigou.windows.planner_window import WorkerState

SPLIT = (WorkerGroup(role=Role.PREFILL, count=2), WorkerGroup(role=Role.DECODE, count=2))
BOTH = (WorkerGroup(count=3),)


class Fixed:
    """A detector that says what it is told to."""

    regime = Regime.BELOW


def fleet(groups: tuple[WorkerGroup, ...] = BOTH, **rest: Any) -> FleetConfig:
    """A fleet whose workers start in half a second."""
    rest.setdefault("start_up", StartUpConfig(seconds=0.5))
    return FleetConfig(workers=groups, **rest)


def at(made: Simulation, seconds: float, event: Callable[[int], object]) -> None:
    """Let something happen to a simulation."""
    made.clock.at(
        EPOCH + round(seconds * SECOND), Phase.TICK, 99, lambda now: (event(now), None)[1]
    )


def drain(made: Simulation, name: str) -> Callable[[int], object]:
    def event(now: int) -> None:
        worker = made.membership.worker(name)
        if worker is not None and worker.state is WorkerState.READY:
            made.membership.drain(worker, now)

    return event


def flip(made: Simulation, name: str, pool: str) -> Callable[[int], object]:
    def event(now: int) -> None:
        worker = made.membership.worker(name)
        if worker is not None and worker.state is WorkerState.READY and worker.pool != pool:
            made.membership.flip(worker, pool, now)

    return event


def remove(made: Simulation, name: str) -> Callable[[int], object]:
    def event(now: int) -> None:
        worker = made.membership.worker(name)
        if worker is not None:
            made.membership.remove(worker, now)

    return event


def gpu_time(made: Simulation, *states: str) -> float:
    seconds = made.membership.gpu_seconds(made.clock.now)
    states = states or ("starting", "active", "draining")
    return sum(times[state] for times in seconds.values() for state in states)


def ended_well(made: Simulation) -> None:
    result = made.run()
    made.fleet.check()
    assert {run.outcome for run in result.runs} == {RunOutcome.DONE}
    for request in result.done:
        check_times(request)


def test_a_worker_that_joins_serves_after_its_start() -> None:
    made = simulation(open_loop(60.0, 200), fleet((WorkerGroup(),)))
    at(made, 1.0, lambda now: made.membership.add("both", now))
    ended_well(made)
    routed = [run for run in made.client.runs if run.decode_worker == "both-1"]
    assert routed
    assert min(run.routed_ns for run in routed) >= EPOCH + 1.5 * SECOND
    joined = [(each.state, (each.at_ns - EPOCH) / SECOND) for each in made.membership.changes]
    assert joined == [(WorkerState.STARTING, 1.0), (WorkerState.READY, 1.5)]


@pytest.mark.parametrize("stepwise", [False, True])
def test_limits_of_a_pool_hold_from_the_next_step_on(stepwise: bool) -> None:
    made = simulation(closed_loop(12, 4.0), fleet((WorkerGroup(),)), stepwise=stepwise)
    running: dict[float, int] = {}

    def look(now: int) -> None:
        worker = made.membership.worker("both-0")
        assert worker is not None
        assert worker.sim is not None
        running[(now - EPOCH) / SECOND] = worker.sim.load(now)[0]

    at(made, 1.0, lambda now: made.membership.set_limits("both", 4, None, now))
    at(made, 2.5, lambda now: made.membership.set_limits("both", 400, 16, now))
    at(made, 2.6, lambda now: made.membership.add("both", now))
    for seconds in (0.9, 2.2, 2.4, 3.8):
        at(made, seconds, look)
    ended_well(made)
    assert running[0.9] > 8
    assert max(running[2.2], running[2.4]) <= 4
    assert running[3.8] > 4
    joined = made.membership.worker("both-1")
    assert joined is not None
    assert joined.sim is not None
    with pytest.raises(ValueError, match="at least 1"):
        joined.sim.core.set_limits(0, 1)


def test_an_operating_point_limits_workers_that_run_join_and_return_until_the_regime_falls() -> (
    None
):
    points = {"heavy": {"max_seqs": 4}}
    group = WorkerGroup(fails=(Outage(start=1.5, end=2.0),))
    made = simulation(closed_loop(24, 5.0), fleet((group,)), control={"operating_points": points})
    fixed = Fixed()
    made.fleet.plane.tracker.controller._detector = fixed
    running: dict[float, list[int]] = {}

    def look(now: int) -> None:
        ready = [worker.sim.load(now)[0] for worker in made.fleet.workers if worker.sim is not None]
        running[(now - EPOCH) / SECOND] = ready

    at(made, 1.0, lambda _: setattr(fixed, "regime", Regime.SATURATED))
    at(made, 1.6, lambda now: made.membership.add("both", now))
    at(made, 3.5, lambda _: setattr(fixed, "regime", Regime.BELOW))
    for seconds in (0.9, 3.3, 4.8):
        at(made, seconds, look)
    ended_well(made)
    assert max(running[0.9]) > 8
    assert [count <= 4 for count in running[3.3]] == [True, True]
    assert max(running[4.8]) > 4


def test_an_operating_point_leaves_prefill_workers_their_limits() -> None:
    points = {name: {"max_batched_tokens": 32} for name in ("light", "heavy")}
    made = simulation(open_loop(20.0, 40), fleet(SPLIT), control={"operating_points": points})
    ended_well(made)
    steps = {
        worker.info.role: worker.sim.core._state.config.max_batched_tokens
        for worker in made.fleet.workers
        if worker.sim is not None
    }
    assert steps == {Role.PREFILL: 128, Role.DECODE: 32}


def test_steps_that_are_planned_at_once_heed_a_limit_as_single_steps_do() -> None:
    results = []
    for stepwise in (False, True):
        made = simulation(open_loop(60.0, 150), fleet(), stepwise=stepwise)
        at(made, 0.5, lambda now, made=made: made.membership.set_limits("both", 3, 64, now))
        results.append(figures(made.run()))
    assert results[0] == results[1]


def test_a_drained_worker_takes_nothing_new_ends_its_streams_and_goes() -> None:
    made = simulation(open_loop(60.0, 200), fleet())
    at(made, 1.0, drain(made, "both-1"))
    ended_well(made)
    (draining, gone) = made.membership.changes
    assert (draining.state, gone.state) == (WorkerState.DRAINING, None)
    own = [run for run in made.client.runs if run.decode_worker == "both-1"]
    assert own
    assert max(run.routed_ns for run in own) <= draining.at_ns
    assert max(run.ended_ns for run in own) <= gone.at_ns
    assert max(run.ended_ns for run in own) > draining.at_ns  # it did have streams
    assert "both-1" not in made.fleet.plane.state.row
    assert not made.fleet.plane.returning.away(made.clock.now)


def test_streams_migrate_where_a_drain_lasts_too_long() -> None:
    made = simulation(open_loop(60.0, 200), fleet(drain_s=0.1))
    at(made, 1.0, drain(made, "both-1"))
    ended_well(made)
    assert any(run.moves for run in made.client.runs)
    (_, gone) = made.membership.changes
    assert gone.at_ns <= EPOCH + 1.21 * SECOND


def test_requests_of_a_worker_that_is_removed_go_elsewhere() -> None:
    made = simulation(open_loop(60.0, 200), fleet())
    at(made, 1.0, remove(made, "both-1"))
    ended_well(made)
    assert any(run.moves for run in made.client.runs)
    assert not made.fleet.plane.returning.away(made.clock.now)


@pytest.mark.parametrize("drains", [True, False])
@pytest.mark.parametrize("keeps_cache", [True, False])
@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_a_flip_is_a_label_with_an_epoch(drains: bool, keeps_cache: bool, seconds: float) -> None:
    change = RoleFlipConfig(drains=drains, keeps_cache=keeps_cache, seconds=seconds)
    made = simulation(open_loop(40.0, 300), fleet(SPLIT, flip=change))
    cached: list[int] = []

    def served(_: int) -> None:
        worker = made.membership.worker("decode-3")
        assert worker is not None
        assert worker.sim is not None
        cached.append(worker.sim.core.cached_blocks)

    at(made, 2.0, flip(made, "decode-3", "prefill"))
    at(made, 1.999, served)
    ended_well(made)
    worker = made.membership.worker("decode-3")
    assert worker is not None
    assert (worker.info.role, worker.epoch, worker.pool) == (Role.PREFILL, 1, "prefill")
    assert made.fleet.plane.state.columns.prefills[made.fleet.plane.state.row["decode-3"]]
    own = [run for run in made.client.runs if run.prefill_worker == "decode-3"]
    ready = made.membership.changes[-1]
    assert ready.state is WorkerState.READY
    assert own
    assert min(run.routed_ns for run in own) >= ready.at_ns
    states = [each.state for each in made.membership.changes]
    assert (WorkerState.DRAINING in states) == drains
    assert cached[0] > 0


@pytest.mark.parametrize("back_s", [2.15, 5.0])
def test_a_worker_that_dies_while_it_flips_comes_back_in_its_new_role(back_s: float) -> None:
    groups = (*SPLIT, WorkerGroup(role=Role.DECODE, fails=(Outage(start=2.1, end=back_s),)))
    change = RoleFlipConfig(drains=False, seconds=0.5)
    made = simulation(open_loop(40.0, 300), fleet(groups, flip=change))
    at(made, 2.0, flip(made, "decode-4", "prefill"))
    ended_well(made)
    worker = made.membership.worker("decode-4")
    assert worker is not None
    assert (worker.info.role, worker.pool, worker.state) == (
        Role.PREFILL, "prefill", WorkerState.READY,
    )  # fmt: skip


def test_a_flip_loses_the_cache_or_keeps_it() -> None:
    kept = {}
    for keeps in (True, False):
        made = simulation(open_loop(40.0, 300, templates=2),
                          fleet(SPLIT, flip=RoleFlipConfig(keeps_cache=keeps)))  # fmt: skip
        at(made, 2.0, flip(made, "prefill-1", "decode"))
        blocks: list[int] = []

        def look(_: int, made: Simulation = made, blocks: list[int] = blocks) -> None:
            worker = made.membership.worker("prefill-1")
            assert worker is not None
            if worker.epoch and worker.sim is not None and not blocks:
                blocks.append(worker.sim.core.cached_blocks)

        for step in range(60):
            at(made, 2.0 + step / 20, look)
        ended_well(made)
        kept[keeps] = blocks[0]
    assert kept[True] > kept[False]


def test_start_ups_vary_fail_and_are_slow_at_first() -> None:
    start = StartUpConfig(seconds=0.5, cv=0.5, failures=0.5, warm_up_s=0.5, warm_up_factor=4.0)
    made = simulation(open_loop(40.0, 400), fleet((WorkerGroup(),), start_up=start))
    for _ in range(20):
        at(made, 0.5, lambda now: made.membership.add("both", now))
    ended_well(made)
    ready = [each.at_ns for each in made.membership.changes if each.state is WorkerState.READY]
    assert len(set(ready)) == len(ready) > 10
    took = [(time - EPOCH) / SECOND - 0.5 for time in ready]
    assert 0.6 < sum(took) / len(took) < 1.6  # two starts each, in the mean


def test_a_start_that_always_fails_never_serves_and_can_be_cancelled() -> None:
    start = StartUpConfig(seconds=0.5, failures=1.0)
    made = simulation(open_loop(40.0, 200), fleet((WorkerGroup(),), start_up=start))
    at(made, 0.1, lambda now: made.membership.add("both", now))
    at(made, 3.0, remove(made, "both-1"))
    ended_well(made)
    worker = made.fleet.workers[1]
    assert (worker.state, worker.failed_starts) == (None, 5)
    assert gpu_time(made, "starting") == pytest.approx(2.9)


def test_workers_that_join_may_be_lost_and_nothing_else_is() -> None:
    start = StartUpConfig(seconds=0.2, losses_per_hour=3600.0)
    made = simulation(open_loop(60.0, 300), fleet((WorkerGroup(),), start_up=start))
    for second in range(5):
        at(made, float(second), lambda now: made.membership.add("both", now))
    ended_well(made)
    lost = [each for each in made.membership.changes if each.state is None]
    assert len(lost) >= 3
    assert {each.worker for each in lost}.isdisjoint({"both-0"})
    assert any(run.moves for run in made.client.runs)


def test_a_worker_that_is_removed_while_it_starts_does_not_come_up() -> None:
    made = simulation(open_loop(40.0, 200), fleet((WorkerGroup(),)))
    at(made, 0.5, lambda now: made.membership.add("both", now))
    at(made, 0.75, remove(made, "both-1"))
    ended_well(made)
    assert all(run.decode_worker == "both-0" for run in made.client.runs)


def test_groups_of_one_role_and_make_are_one_pool() -> None:
    groups = (
        WorkerGroup(role=Role.DECODE), WorkerGroup(role=Role.DECODE, starts=1.0),
        WorkerGroup(role=Role.DECODE, max_seqs=4), WorkerGroup(role=Role.PREFILL, count=2),
    )  # fmt: skip
    membership = simulation(open_loop(), fleet(groups)).membership
    sizes = {name: len(membership.members(name)) for name in membership.pools}
    assert sizes == {"decode": 2, "decode.2": 1, "prefill": 2}
    assert membership.can_flip("decode", "prefill")
    assert not membership.can_flip("decode.2", "prefill")
    assert not membership.can_flip("decode", "decode")
    assert not membership.can_flip("decode", "nowhere")


def test_a_lost_worker_costs_nothing_any_more_and_its_requests_go_elsewhere() -> None:
    groups = (WorkerGroup(count=2), WorkerGroup(fails=(Outage(start=1.0),)))
    made = simulation(open_loop(60.0, 200), fleet(groups))
    ended_well(made)
    assert made.fleet.workers[2].state is None
    span_s = (made.clock.now - EPOCH) / SECOND
    assert gpu_time(made) == pytest.approx(2 * span_s + 1.0)


@st.composite
def changes(draw: st.DrawFn) -> list[tuple[str, float, str]]:
    """Changes of a fleet of four, of which worker 0 stays."""
    split = draw(st.booleans())
    names = ["prefill-1", "decode-2", "decode-3"] if split else ["both-1", "both-2", "both-3"]
    kinds = ["drain", "remove", "add", "flip"] if split else ["drain", "remove", "add"]
    return [
        (draw(st.sampled_from(kinds)), draw(st.floats(0.0, 4.0)), draw(st.sampled_from(names)))
        for _ in range(draw(st.integers(0, 6)))
    ] + [("split" if split else "both", 0.0, "")]


@settings(max_examples=examples(25), suppress_health_check=list(HealthCheck))
@given(changes(), st.booleans(), st.booleans(), st.sampled_from(["vllm", "pigou"]))
def test_no_request_is_lost_and_gpu_time_is_the_integral_of_the_workers(
    events: list[tuple[str, float, str]], drains: bool, keeps_cache: bool, engine: str
) -> None:
    split = events[-1][0] == "split"
    config = fleet(
        SPLIT if split else (WorkerGroup(count=4),),
        flip=RoleFlipConfig(drains=drains, keeps_cache=keeps_cache, seconds=0.2),
        drain_s=0.5 if drains else 0.0,
    )

    def made(stepwise: bool) -> tuple[Simulation, str]:
        one = simulation(open_loop(40.0, 150), config, setup={"engine": engine}, stepwise=stepwise)
        for kind, seconds, name in events[:-1]:
            if kind == "add":
                pool = name.partition("-")[0]
                at(one, seconds, lambda now, pool=pool: one.membership.add(pool, now))
            elif kind == "flip":
                pool = "decode" if name.startswith("prefill") else "prefill"
                at(one, seconds, flip(one, name, pool))
            else:
                at(one, seconds, (drain if kind == "drain" else remove)(one, name))
        if split:  # somebody decodes at all times
            at(one, 0.0, lambda now: one.membership.add("decode", now))
        return one, figures(one.run())

    one, first = made(stepwise=False)
    _, second = made(stepwise=True)
    assert first == second
    one.fleet.check()
    assert {run.outcome for run in one.client.runs} == {RunOutcome.DONE}
    # The integral of the number of workers, from the log of changes.
    sizes, gone, now = 4, set(), EPOCH
    integral = 0
    for change in one.membership.changes:
        integral += sizes * (change.at_ns - now)
        now = change.at_ns
        number = int(change.worker.rpartition("-")[2])
        if change.state is None and number not in gone:
            gone.add(number)
            sizes -= 1
        elif change.state is WorkerState.STARTING and number >= 4 and number not in gone:
            sizes += 1
    integral += sizes * (one.clock.now - now)
    assert gpu_time(one) == pytest.approx(integral / SECOND)
