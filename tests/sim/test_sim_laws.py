"""Laws of a simulation: it conserves requests, repeats itself, and may skip steps."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from setups import closed_loop, differences, figures, open_loop, run, simulation

from pigou.request import Role
from pigou.sim.call import Outcome
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import FleetConfig, LinkConfig, Members, Outage, Signals, Slow
from pigou.sim.workload import Lengths, OpenLoop, renewal

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
            Members(
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


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_many_steps_at_once_equal_single_ones_and_conserve_requests(
    case: dict[str, object],
) -> None:
    workload = case.pop("workload")
    result = run(workload, **case)
    single = run(workload, **case, stepwise=True)
    assert differences(result, single) == {}
    assert all(call.outcome is not Outcome.PENDING for call in result.calls)
    assert len({call.number for call in result.calls}) == 40
    for call in result.done:
        assert call.tokens == call.job.output
        assert call.intended <= call.sent <= call.first <= call.last == call.ended


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
    lengths = Lengths(input=(33, 33), output=(5, 5))
    lone = renewal(lengths, 1.0, 0.0, 1, 0.0, 0)
    (call,) = run(lone, "1xboth").calls
    # prefill 4 ms and 33 tokens of 50 us; then 4 steps of 8.3 ms.
    assert call.first - call.sent == 5_650_000
    assert call.last - call.first == 4 * 8_300_000
    assert call.sent == call.intended


def test_remote_prefill_costs_the_transfer_and_one_more_step() -> None:
    lengths = Lengths(input=(33, 33), output=(5, 5))
    lone = renewal(lengths, 1.0, 0.0, 1, 0.0, 0)
    fleet = FleetConfig(
        workers=(Members(role=Role.PREFILL), Members(role=Role.DECODE)),
        link=LinkConfig(gbps=8.0, latency_us=100.0),
    )
    made = simulation(lone, fleet, setup={"model": "llama-3.1-8b"})
    result = made.run()
    (call,) = result.calls
    moved = 2 * 16 * 131_072  # two whole blocks, at a byte a nanosecond
    assert (call.prefill, call.decode) == ("prefill-0", "decode-1")
    assert result.transfers == (1, moved)
    # The decode worker computes the one token that was in no whole block.
    assert call.first - call.sent == 5_650_000 + moved + 100_000 + 8_300_000
    made.fleet.check()
    assert all(member.sim is not None and not member.sim.core.held for member in made.fleet.members)


def test_equal_prompts_hit_the_cache() -> None:
    lengths = Lengths(input=(320, 320), output=(4, 4), templates=2)
    workload = renewal(lengths, 5.0, 0.0, 40, 0.0, 0)
    document = run(workload, "1xboth").document()
    # All but the first of each template are found, but for their last token.
    assert document["prefix_hit_ratio"] == pytest.approx(38 / 40 * 319 / 320, abs=1e-9)
    alone = renewal(Lengths(input=(320, 320), output=(4, 4)), 5.0, 0.0, 40, 0.0, 0)
    assert run(alone, "1xboth").document()["prefix_hit_ratio"] == 0.0


def test_requests_of_a_dead_worker_go_elsewhere_with_what_they_have() -> None:
    lengths = Lengths(input=(64, 64), output=(100, 100))
    workload = OpenLoop(renewal(lengths, 50.0, 0.0, 20, 0.0, 0).sessions)
    fleet = FleetConfig(
        workers=(Members(fails=(Outage(start=0.6),)), Members()),
    )
    result = run(workload, fleet)
    assert all(call.outcome is Outcome.DONE for call in result.calls)
    moved = [call for call in result.calls if call.moves]
    assert moved
    assert all(call.decode == "both-1" and call.tokens == 100 for call in moved)


def test_nobody_is_sent_to_a_worker_that_has_not_started() -> None:
    fleet = FleetConfig(workers=(Members(), Members(starts=1.0)))
    result = run(open_loop(20.0, 60), fleet)
    early = {call.decode for call in result.calls if call.routed < 2_000_000_000}
    late = {call.decode for call in result.calls if call.routed >= 2_000_000_000}
    assert early == {"both-0"}
    assert "both-1" in late


def test_a_slow_worker_takes_its_factor() -> None:
    lengths = Lengths(input=(33, 33), output=(5, 5))
    lone = renewal(lengths, 1.0, 0.0, 1, 0.0, 0)
    fleet = FleetConfig(workers=(Members(slow=(Slow(factor=2.0),)),))
    (call,) = run(lone, fleet).calls
    assert call.first - call.sent == 11_300_000


def test_what_the_fleet_cannot_hold_fails_and_is_counted() -> None:
    lengths = Lengths(input=(600, 600), output=(10, 10))
    document = run(renewal(lengths, 5.0, 0.0, 3, 0.0, 0), setup={"blocks": 20}).document()
    assert (document["offered"], document["completed"], document["failed"]) == (3, 0, 3)
    assert document["ttft_s"]["mean"] is None


def test_chunks_of_a_long_prompt_are_one_plan() -> None:
    lengths = Lengths(input=(4000, 4000), output=(2, 2))
    made = simulation(renewal(lengths, 1.0, 1.0, 1, 0.0, 1), "1xboth", setup={"blocks": 400})
    made.run()
    (member,) = made.fleet.members
    assert member.figures[0] == 33  # 32 chunks of 128 tokens at most, and one more token
    assert made.clock.events < 25
