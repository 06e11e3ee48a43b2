"""Laws of a simulation: it conserves requests, repeats itself, and may skip steps."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from setups import check_times, closed_loop, differences, figures, open_loop, run, simulation
from tests.lib.examples import examples

from pigou.config import ConfigError, ControlConfig
from pigou.fleet.costs import make_plane
from pigou.gateway.config import GatewayConfig
from pigou.request import Role
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import FleetConfig, LinkConfig, Outage, Signals, Slow, WorkerGroup
from pigou.sim.request_run import RunOutcome
from pigou.sim.workload import OpenLoop, RequestLengths, renewal

POLICIES = st.sampled_from(["least-loaded", "round-robin", "toll", "lmetric"])


@st.composite
def cases(draw: st.DrawFn) -> dict[str, object]:
    """Everything that can go on at once: pressure, outages, slow times, losses, timeouts."""
    roles = draw(
        st.sampled_from(
            [
                (Role.BOTH,),
                (Role.BOTH, Role.BOTH),
                (Role.PREFILL, Role.DECODE, Role.DECODE),
            ]
        )
    )
    members = []
    for role in roles:
        outage = draw(st.booleans()) and role is not Role.PREFILL
        members.append(
            WorkerGroup(
                role=role,
                slow=(Slow(factor=2.5, start=0.4, end=1.3),) if draw(st.booleans()) else (),
                fails=(Outage(start=0.7, end=1.1),) if outage else (),
                starts=draw(st.sampled_from([0.0, 0.0, 0.5])),
            )
        )
    fleet = FleetConfig(
        workers=tuple(members),
        link=LinkConfig(
            gbps=draw(st.sampled_from([0.0, 0.5, 400.0])),
            sharing=draw(st.sampled_from(["fair", "fifo"])),
            ends=draw(st.sampled_from(["both", "receiver"])),
        ),
        signals=Signals(
            event_delay_ms=draw(st.sampled_from([0.0, 30.0])),
            event_loss=draw(st.sampled_from([0.0, 0.2])),
            replay=draw(st.booleans()),
            report_every_ms=100.0,
            report_delay_ms=draw(st.sampled_from([0.0, 10.0])),
            report_loss=draw(st.sampled_from([0.0, 0.3])),
        ),
        detect_ms=draw(st.sampled_from([0.0, 150.0])),
        overhead_ms=draw(st.sampled_from([0.0, 3.0])),
        lease_s=draw(st.sampled_from([0.05, 30.0])),
    )
    client = ClientConfig(
        pool=draw(st.sampled_from([0, 8])),
        barging=draw(st.sampled_from([0.0, 0.9])),
        take=draw(st.sampled_from(["fifo", "lifo", "random"])),
        timeout=draw(st.sampled_from([0.0, 0.5])),
        retries=draw(st.sampled_from([0, 2])),
        backoff=0.1,
    )
    blocks = draw(st.sampled_from([32, 60, 400]))
    return {
        "workload": open_loop(
            draw(st.sampled_from([10.0, 60.0])), 40, seed=draw(st.integers(0, 9))
        ),
        "fleet": fleet,
        "client": client,
        "control": {
            "policy": draw(POLICIES),
            "max_queued": draw(st.sampled_from([5, 1000])),
            "max_inflight": draw(st.sampled_from([0, 6])),
            "max_inflight_tokens": draw(st.sampled_from([0, 2**40])),
        },
        "setup": {"blocks": blocks, "engine": draw(st.sampled_from(["vllm", "pigou"]))},
        "seed": draw(st.integers(0, 3)),
    }


@settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
@given(cases())
def test_many_steps_at_once_equal_single_ones_and_conserve_requests(
    case: dict[str, object],
) -> None:
    workload = case.pop("workload")
    result = run(workload, **case)
    single = run(workload, **case, stepwise=True)
    assert differences(result, single) == {}
    assert all(request.outcome is not RunOutcome.PENDING for request in result.runs)
    assert len({request.number for request in result.runs}) == 40
    for request in result.done:
        check_times(request)


@pytest.mark.parametrize("fleet", ["2xboth", "1p+2d"])
def test_the_same_seed_gives_the_same_output_to_the_last_byte(fleet: str) -> None:
    client = ClientConfig(pool=8, barging=0.8)
    first, second, other = (
        figures(run(closed_loop(12, 3.0, ramp=1.0), fleet, client=client, seed=seed))
        for seed in (5, 5, 6)
    )
    assert first == second
    assert first != other


def test_a_run_that_is_cut_off_counts_what_is_unfinished() -> None:
    loop = closed_loop(8, 2.0, ramp=1.0, drain=False)
    document = run(loop, "1p+2d").document()
    assert document["offered"] == document["completed"] + document["failed"] + 8
    assert document["unfinished"] == 8
    assert document["simulated_s"] == 3.0
    drained = run(closed_loop(8, 2.0, ramp=1.0), "1p+2d").document()
    assert drained["unfinished"] == 0
    assert drained["simulated_s"] > 3.0


def test_a_lone_request_takes_what_the_law_says() -> None:
    lengths = RequestLengths(input=(33, 33), output=(5, 5))
    lone = renewal(lengths, 1.0, 0.0, 1, 0.0, 0)
    (request,) = run(lone, "1xboth").runs
    # prefill 4 ms and 33 tokens of 50 us; then 4 steps of 8.3 ms.
    assert request.first_token_ns - request.sent_ns == 5_650_000
    assert request.last_token_ns - request.first_token_ns == 4 * 8_300_000
    assert request.sent_ns == request.intended_ns


def test_remote_prefill_costs_the_transfer_and_one_more_step() -> None:
    lengths = RequestLengths(input=(33, 33), output=(5, 5))
    lone = renewal(lengths, 1.0, 0.0, 1, 0.0, 0)
    fleet = FleetConfig(
        workers=(WorkerGroup(role=Role.PREFILL), WorkerGroup(role=Role.DECODE)),
        link=LinkConfig(gbps=8.0, latency_us=100.0),
    )
    made = simulation(lone, fleet, setup={"model": "llama-3.1-8b"})
    result = made.run()
    (request,) = result.runs
    moved = 2 * 16 * 131_072  # two whole blocks, at a byte a nanosecond
    assert (request.prefill_worker, request.decode_worker) == ("prefill-0", "decode-1")
    assert result.transfers == (1, moved)
    # The decode worker computes the one token that was in no whole block.
    assert request.first_token_ns - request.sent_ns == 5_650_000 + moved + 100_000 + 8_300_000
    made.fleet.check()
    assert all(worker.sim is not None and not worker.sim.core.held for worker in made.fleet.workers)


def test_equal_prompts_hit_the_cache() -> None:
    lengths = RequestLengths(input=(320, 320), output=(4, 4), templates=2)
    workload = renewal(lengths, 5.0, 0.0, 40, 0.0, 0)
    document = run(workload, "1xboth").document()
    # All but the first of each template are found, but for their last token.
    assert document["prefix_hit_ratio"] == pytest.approx(38 / 40 * 319 / 320, abs=1e-9)
    alone = renewal(RequestLengths(input=(320, 320), output=(4, 4)), 5.0, 0.0, 40, 0.0, 0)
    assert run(alone, "1xboth").document()["prefix_hit_ratio"] == 0.0


def test_requests_of_a_dead_worker_go_elsewhere_with_what_they_have() -> None:
    lengths = RequestLengths(input=(64, 64), output=(100, 100))
    workload = OpenLoop(renewal(lengths, 50.0, 0.0, 20, 0.0, 0).sessions)
    fleet = FleetConfig(
        workers=(WorkerGroup(fails=(Outage(start=0.6),)), WorkerGroup()),
    )
    result = run(workload, fleet)
    assert all(request.outcome is RunOutcome.DONE for request in result.runs)
    moved = [request for request in result.runs if request.moves]
    assert moved
    assert all(
        request.decode_worker == "both-1" and request.output_tokens == 100 for request in moved
    )


def test_nobody_is_sent_to_a_worker_that_has_not_started() -> None:
    fleet = FleetConfig(workers=(WorkerGroup(), WorkerGroup(starts=1.0)))
    result = run(open_loop(20.0, 60), fleet)
    early = {request.decode_worker for request in result.runs if request.routed_ns < 2_000_000_000}
    late = {request.decode_worker for request in result.runs if request.routed_ns >= 2_000_000_000}
    assert early == {"both-0"}
    assert "both-1" in late


def test_a_slow_worker_takes_its_factor() -> None:
    lengths = RequestLengths(input=(33, 33), output=(5, 5))
    lone = renewal(lengths, 1.0, 0.0, 1, 0.0, 0)
    fleet = FleetConfig(workers=(WorkerGroup(slow=(Slow(factor=2.0),)),))
    (request,) = run(lone, fleet).runs
    assert request.first_token_ns - request.sent_ns == 11_300_000


def test_what_the_fleet_cannot_hold_fails_and_is_counted() -> None:
    lengths = RequestLengths(input=(600, 600), output=(10, 10))
    document = run(renewal(lengths, 5.0, 0.0, 3, 0.0, 0), setup={"blocks": 20}).document()
    assert (document["offered"], document["completed"], document["failed"]) == (3, 0, 3)
    assert document["ttft_s"]["mean"] is None


def test_chunks_of_a_long_prompt_are_one_plan() -> None:
    lengths = RequestLengths(input=(4000, 4000), output=(2, 2))
    made = simulation(renewal(lengths, 1.0, 1.0, 1, 0.0, 1), "1xboth", setup={"blocks": 400})
    made.run()
    (worker,) = made.fleet.workers
    assert worker.totals[0] == 33  # 32 chunks of 128 tokens at most, and one more token
    assert made.clock.events < 25


def mean_s(where: str, tau: float | None) -> float:
    """Mean seconds of 150 requests at once, that go by predictions in the gateway or the engine."""
    control: dict[str, object] = {}
    setup: dict[str, object] = {"max_seqs": 2}
    if tau is not None:
        control = {"lengths": {"predictor": "oracle", "tau": tau}}
        if where == "engine":
            setup |= {"order": "shortest", "ageing": 1.0}
        else:
            control |= {
                "admission": {"order": "shortest-remaining", "input_weight": 0, "ageing": 1}
            }
    if where == "gateway":
        control["max_inflight"] = 2
    loop = open_loop(rate=100.0, count=150, templates=0)
    runs = simulation(loop, "1xboth", control=control, setup=setup).run().runs
    for one in runs:
        check_times(one)
    return sum(one.ended_ns - one.intended_ns for one in runs) / 1e9 / len(runs)


@pytest.mark.parametrize("where", ["gateway", "engine"])
def test_the_better_lengths_are_ranked_the_sooner_requests_end_and_a_random_rank_gains_nothing(
    where: str,
) -> None:
    fcfs = mean_s(where, None)
    random, middling, true = (mean_s(where, tau) for tau in (0.0, 0.6, 1.0))
    assert random == pytest.approx(fcfs, rel=0.1)
    assert true < middling < 0.9 * fcfs


def test_lengths_are_not_predicted_where_nothing_tells_them() -> None:
    with pytest.raises(ConfigError, match="closed loop"):
        simulation(closed_loop(2, 1.0), control={"lengths": {"predictor": "online"}})
    with pytest.raises(ConfigError, match="only the simulator"):
        make_plane(ControlConfig(lengths={"predictor": "oracle"}), GatewayConfig())


def test_clients_give_no_length_away_while_lengths_are_predicted() -> None:
    made = simulation(open_loop(), control={"lengths": {"predictor": "online"}})
    made.run()
    lengths = made.fleet.plane.tracker.lengths  # type: ignore[union-attr]
    assert lengths is not None
    assert 50 <= lengths.score.observed <= 60  # all but those as long as the declared limit


@pytest.mark.parametrize(
    ("quotas", "why"),
    [
        (["acme=0:1"], "'acme', who sends no request; give \\* or a tenant of the workload \\(''"),
        (["acme"], "write TENANT=FLOOR:CEILING"),
        (["=0.6:0.5"], "a floor up to the ceiling"),
        (["=0:1", "=0:1"], "once for each tenant"),
    ],
)
def test_kv_quotas_of_nobody_or_of_no_shares_are_refused(quotas: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        simulation(open_loop(), setup={"kv_quotas": quotas})


def test_kv_quotas_that_do_not_bind_change_nothing() -> None:
    quotas = {"kv_quotas": ["=0.2:1", "*=0:0.5"]}
    plain, limited = (simulation(open_loop(), setup=setup).run() for setup in ({}, quotas))
    assert not differences(plain, limited)
