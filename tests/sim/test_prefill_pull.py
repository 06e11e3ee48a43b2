"""Prefill workers that pull: nothing is lost, nothing is done twice, and one queue waits less."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from setups import (
    FleetConfig,
    Outage,
    Signals,
    Slow,
    WorkerGroup,
    differences,
    open_loop,
    run,
    simulation,
)

from pigou.control.messages import Observation, PrefillClaimed
from pigou.games.queueing import mgc_wait
from pigou.request import SECOND, Role
from pigou.sim.request_run import RunOutcome
from pigou.sim.simulation import Simulation
from pigou.sim.workload import RequestLengths, renewal

PULL = {"mode": "pull", "batch_tokens": 128, "lease_s": 0.4}
#: A prompt takes 4 ms, and decode next to nothing.
MD_LAW = "law:itl_a=0.000001,prefill=0.004"


def fleet(prefills: int = 2, **group: Any) -> FleetConfig:
    kinds = WorkerGroup(role=Role.PREFILL, count=prefills, **group), WorkerGroup(role=Role.DECODE)
    return FleetConfig(workers=kinds, signals=Signals(report_every_ms=100.0))


@pytest.mark.parametrize("order", ["price", "fifo"])
def test_single_steps_yield_the_same_figures(order: str) -> None:
    setup = {"prefill_queue": PULL | {"order": order}, "rehearses": True}
    control = {"policy": "dynamo"}
    group = {"slow": (Slow(factor=2.5, start=0.4, end=1.3),)}
    one, many = (
        run(open_loop(60.0, 80), fleet(**group), setup=setup, control=control, stepwise=stepwise)
        for stepwise in (True, False)
    )
    assert differences(one, many) == {}
    assert len(one.done) == 80


@pytest.mark.parametrize("detect_ms", [0.0, 100.0, 3000.0])
@pytest.mark.parametrize("policy", ["dynamo", "round-robin"])
def test_no_prompt_is_lost_with_its_worker(policy: str, detect_ms: float) -> None:
    """A death is noticed, or the lease ends first; TTFT is counted from the arrival."""
    group = WorkerGroup(role=Role.PREFILL, fails=(Outage(start=0.5, end=1.5),))
    others = WorkerGroup(role=Role.PREFILL), WorkerGroup(role=Role.DECODE)
    config = FleetConfig(workers=(group, *others), detect_ms=detect_ms)
    made = simulation(
        open_loop(160.0, 240), config, setup={"prefill_queue": PULL}, control={"policy": policy}
    )
    result = made.run()
    made.fleet.check()
    assert [request.outcome for request in result.runs] == [RunOutcome.DONE] * 240
    pull = made.fleet.dispatcher.pull
    assert pull is not None
    counts = pull.queue.counts
    assert counts.redelivered >= 1
    assert counts.acked + counts.cancelled == counts.queued
    assert counts.claimed == counts.acked + counts.redelivered
    late = max(request.first_token_ns - request.intended_ns for request in result.runs)
    assert late >= min(detect_ms / 1000, PULL["lease_s"]) * SECOND  # type: ignore[type-var]


def test_a_queued_prompt_weighs_where_it_is_claimed() -> None:
    made = simulation(
        open_loop(60.0, 60), fleet(3), setup={"prefill_queue": PULL}, control={"policy": "dynamo"}
    )
    plane, moved = made.fleet.plane, 0
    observe = plane.observe

    def watched(observation: Observation, now: int) -> Any:
        nonlocal moved
        decisions = observe(observation, now)
        if isinstance(observation, PrefillClaimed):
            routed = plane.state.requests[observation.request]
            moved += 1
            assert routed.prefill == observation.worker
            assert plane.state.figures(observation.worker)["prefill_requests"] >= 1
        return decisions

    plane.observe = watched  # type: ignore[method-assign]
    made.run()
    assert moved == 60
    assert sum(plane.state.columns.prefill_requests) == 0


def test_thresholds_leave_short_prompts_to_their_decode_worker() -> None:
    short = renewal(RequestLengths(input=(100, 100), output=(4, 4)), 5.0, 1.0, 20, 0.0, 1)
    queue = PULL | {"local": "thresholds"}
    result = run(short, fleet(), setup={"prefill_queue": queue}, control={"policy": "dynamo"})
    assert {request.prefill_worker for request in result.done} == {""}
    assert len(result.done) == 20


def test_a_burst_of_sixteen_is_one_round_of_batches() -> None:
    burst = renewal(RequestLengths(input=(64, 64), output=(4, 4)), 1e9, 0.0, 16, 0.0, 1)
    made = simulation(
        burst, fleet(4), control={"policy": "dynamo"},
        setup={"prefill_queue": PULL | {"batch_tokens": 1024}, "max_batched_tokens": 1024},
    )  # fmt: skip
    made.run()
    assert made.fleet.dispatcher.pull is not None
    assert made.fleet.dispatcher.pull.batches == [4, 4, 4, 4]


def mean_wait(made: Simulation) -> float:
    """Mean services for which prompts wait."""
    runs = made.run().runs
    waits = [request.first_token_ns - request.intended_ns for request in runs]
    return float(np.mean(waits)) / SECOND / 0.004 - 1.0


def test_a_pull_is_an_mdc_queue_and_a_random_split_waits_five_times_as_long() -> None:
    load = renewal(RequestLengths(input=(33, 33), output=(1, 1)), 800.0, 1.0, 1500, 0.0, 3)
    setup = {"timing": MD_LAW, "blocks": 4000, "max_batched_tokens": 33, "max_seqs": 64}
    pulled = {"prefill_queue": {"mode": "pull", "order": "fifo", "batch_tokens": 1}}
    random = {"policy": "random"}
    split = mean_wait(simulation(load, "4xboth", setup=setup, control=random))
    pull = mean_wait(simulation(load, fleet(4), setup=setup | pulled, control={"policy": "dynamo"}))
    assert pull == pytest.approx(mgc_wait(4, 0.8, 0.0), rel=0.3)
    assert split == pytest.approx(2.0, rel=0.3)
    assert 3.5 < split / pull < 7.0
