"""The performance that a planner is given is that of the simulated workers."""

from __future__ import annotations

import pytest
from setups import LAW, simulation

from pigou.performance.speed import RequestMix
from pigou.request import Role
from pigou.sim.fleet_config import FleetConfig, LinkConfig, WorkerGroup
from pigou.sim.pool_performance import measure_performance
from pigou.sim.workload import RequestLengths, renewal

LENGTHS = RequestLengths(input=(300, 300), output=(40, 40))


def test_speeds_are_those_of_the_law() -> None:
    fleet = FleetConfig(workers=(WorkerGroup(),), overhead_ms=3.0, leg_ms=1.0)
    made = simulation(renewal(LENGTHS, 1.0, 0.0, 1, 0.0, 0), fleet)
    model = measure_performance(made.fleet.workers[0].spec, Role.BOTH, fleet)
    # prefill 4 ms and 50 us a token; a step of n streams 8 ms and 0.3 ms each.
    assert model.prefill.seconds(100.0, 100.0) == pytest.approx(0.009, rel=0.01)
    assert model.prefill.seconds(300.0, 300.0) == pytest.approx(0.019, rel=0.01)
    for streams in (1, 3, 16):
        assert model.decode.itl_s(streams, 200.0) == pytest.approx(0.008 + 0.0003 * streams)
    assert (model.kv_tokens, model.max_seqs) == (3200.0, 16)
    assert model.overhead_s == pytest.approx(0.004)


@pytest.mark.parametrize("rps", [1.0, 10.0])
def test_predicted_latencies_are_those_of_the_simulation(rps: float) -> None:
    made = simulation(
        renewal(LENGTHS, rps, 1.0, 300, 0.0, 1), "1xboth",
        setup={"blocks": 2000, "max_batched_tokens": 2048, "engine": "pigou"},
    )  # fmt: skip
    model = measure_performance(made.fleet.workers[0].spec, Role.BOTH, FleetConfig(
        workers=(WorkerGroup(),)
    ))  # fmt: skip
    latency = model.latency(Role.BOTH, rps, 1, RequestMix(300.0, 40.0), 0.5)
    document = made.run().document()
    assert document["tpot_s"]["p50"] == pytest.approx(latency.itl_s, rel=0.3)
    assert document["ttft_s"]["mean"] == pytest.approx(latency.mean_ttft_s, rel=0.5)


def test_prefill_pools_count_legs_transfer_and_the_first_step_of_decode() -> None:
    fleet = FleetConfig(
        workers=(WorkerGroup(role=Role.PREFILL), WorkerGroup(role=Role.DECODE)),
        link=LinkConfig(gbps=8.0, latency_us=100.0), leg_ms=1.0,
    )  # fmt: skip
    made = simulation(renewal(LENGTHS, 1.0, 0.0, 1, 0.0, 0), fleet,
                      setup={"model": "llama-3.1-8b", "timing": LAW})  # fmt: skip
    model = measure_performance(made.fleet.workers[0].spec, Role.PREFILL, fleet)
    assert model.transfer_token_s == pytest.approx(131_072 / 1e9)
    assert model.overhead_s == pytest.approx(0.002 + 0.0001 + 0.0083)
