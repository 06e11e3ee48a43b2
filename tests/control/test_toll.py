"""Laws of Pigou's own policy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from model_fleet import Ideal, ModelFleet, poisson

from pigou.config import ConfigError, ControlConfig
from pigou.control.latency_model.estimates import Estimates
from pigou.control.lengths import Prediction
from pigou.control.messages import Route, WorkerUp
from pigou.control.plane import ControlPlane, stream_tolls
from pigou.control.routing.policy import override
from pigou.control.routing.toll.policy import Toll, TollParams
from pigou.control.routing.toll.terms import PARTS
from pigou.control.routing.view import Candidates, FleetView
from pigou.control.state import PrefillBacklog
from pigou.games.latency import LatencyLaw
from pigou.request import SECOND, Request, Role, Worker

LAW = LatencyLaw(0.0008, 0.02)
#: Whose streams' seconds count alike, however slow they are.
LEAST = Toll(TollParams(urgency=0.0))
#: Parameters of the documentation's example.
URGENCY_1 = TollParams(urgency=1.0)
#: Of two workers, the first one computes prompts alone, and the other streams.
PREFILLS = np.array([True, False])


def pairs(*found: tuple[int, int]) -> Candidates:
    array = np.array(found, dtype=np.int32)
    return Candidates(*np.ascontiguousarray(array.T))


def known(workers: int, law: LatencyLaw = LAW) -> Estimates:
    found = Estimates.prior(workers, law)
    found.arrivals[:] = 2.0
    found.mean_prefill[:] = 0.25
    return found


def test_parts_are_the_formula() -> None:
    fleet = FleetView.of(
        2,
        estimates=known(2),
        output=100.0,
        prefill_requests=[2, 0],
        prefill_tokens=[3000, 0],
        decode_requests=[0, 8],
        overlap=[10, 20],
    )
    request = Request("r", 1000, 100)
    parts = Toll().parts(request, fleet, pairs((0, 1), (-1, 1)))
    wait = 2 * 0.005 + 3000e-4
    service = 0.005 + (1000 - 160) * 1e-4
    alone = 0.005 + (1000 - 320) * 1e-4
    local = 1.5 * LAW(8.0) + alone  # the rest of a step, and one that is longer by the prompt
    assert parts["wait"] == pytest.approx([wait, 0.0])
    assert parts["prefill"] == pytest.approx([service, local])
    assert parts["transfer"] == pytest.approx([0.005 + 680e-6, 0.0])
    assert parts["decode"] == pytest.approx([100 * LAW(9.0)] * 2)
    stalls = np.array([0.0, alone * 8])
    assert parts["toll_stream"] == pytest.approx(100 * LAW.toll(8.0) + stalls)
    queue = 2.0 * np.array([service * (wait + service / 2), alone * alone / 2])
    assert parts["toll_queue"] == pytest.approx(queue)
    assert parts["toll_memory"].tolist() == [0.0, 0.0]
    assert parts["urgency"].tolist() == [0.0, 0.0]  # nothing is known of other requests
    costs = Toll().costs(request, fleet, pairs((0, 1), (-1, 1)))
    assert costs == pytest.approx(sum(parts.values()))


def test_a_stream_costs_what_reading_its_tokens_takes_of_all_steps_beside_it() -> None:
    known_ = known(2)
    known_.context_token[:], known_.mean_context[:] = 1e-8, 2000.0
    columns = {"estimates": known_, "output": 100.0, "decode_requests": [8, 8]}
    offered = pairs((-1, 0), (-1, 1))
    for prompt in (500, 20_000):
        fleet = FleetView.of(2, decode_tokens=[16_000, 90_000], **columns)
        parts = LEAST.parts(Request("r", prompt, 100), fleet, offered)
        held = 1e-8 * np.array([0.0, 90_000 - 16_000])
        mine = 1e-8 * (prompt + 50 - 2000)
        assert parts["decode"] == pytest.approx(100 * (LAW(9.0) + held + mine))
        toll = 100 * 8 * (LAW(9.0) - LAW(8.0) + mine)
        local = parts["toll_stream"] - toll
        assert local == pytest.approx([8 * (0.005 + prompt * 1e-4)] * 2)


def test_the_prompt_under_way_is_as_far_as_the_time_since_it_began() -> None:
    lines, request, offered = PrefillBacklog(), Request("r", 1000, 100), pairs((-1, 0), (-1, 1))
    for row, since in enumerate((10, 2)):
        lines.up()
        lines.add(row, "under way", 1950, 0, since * SECOND)
    waiting = {"estimates": known(2), "prefill_requests": [2, 2], "prefill_tokens": [4900, 4900]}
    for late, left in ((0.0, 0.5), (0.15, 0.35), (0.2, 0.3), (60.0, 0.3)):
        now = 10 * SECOND + round(late * SECOND)
        fleet = FleetView.of(2, backlog=lines, now=now, **waiting)
        parts = Toll().parts(request, fleet, offered)
        assert parts["wait"] == pytest.approx([left, 0.3])  # never done before it is told to be


def test_a_stream_waits_for_the_prompts_that_its_worker_will_not_have_computed() -> None:
    """Of those 3 s of prompts, 2 s are left when the stream begins; streams feel half of that."""
    known_ = known(2)
    known_.interference_base[:], known_.interference_token[:] = 0.0025, 0.5e-4
    fleet = FleetView.of(
        2, estimates=known_, prefill_requests=[0, 10], prefill_tokens=[0, 29_500], output=100.0
    )
    request = Request("r", 9_800, 100)
    offered = pairs((0, 1), (-1, 1))
    parts = Toll().parts(request, fleet, offered)
    begins = parts["prefill"][0] + parts["transfer"][0]
    assert parts["decode"][0] == pytest.approx(100 * LAW(1.0) + (3.0 - begins) / 2)
    assert parts["decode"][1] == pytest.approx(100 * LAW(1.0))  # it is behind all of them
    fleet.prefill_tokens[1] = 5_000
    parts = Toll().parts(request, fleet, offered)
    assert parts["decode"][0] == pytest.approx(100 * LAW(1.0))


def test_long_prompts_are_priced_by_their_attention_too() -> None:
    known_ = known(2)
    known_.prefill_pair[:] = 1e-9
    known_.interference_token[:] = 0.5e-4
    fleet = FleetView.of(
        2, estimates=known_, overlap=[1000, 0], decode_requests=[1, 1],
        prefill_requests=[0, 1], prefill_tokens=[0, 10_000], prefill_pairs=[0, 10**9],
    )  # fmt: skip
    parts = LEAST.parts(Request("r", 40_000, 9), fleet, pairs((-1, 0), (-1, 1)))
    attention = np.array([24_000 * 28_000, 40_000 * 20_000]) * 1e-9
    tokens = np.array([24_000, 40_000]) * 1e-4
    assert parts["prefill"] == pytest.approx(0.005 + tokens + attention)
    assert parts["wait"] == pytest.approx([0.0, 0.005 + 1.0 + 1.0])
    itl = LAW(2.0) - LAW(1.0)  # of one token
    assert parts["toll_stream"] == pytest.approx(itl + 0.005 + 0.5 * (tokens + attention))


def test_what_a_prompt_takes_from_streams_is_the_stall_and_not_its_own_time() -> None:
    known_ = known(1)
    known_.interference_base[:], known_.interference_token[:] = 0.001, 1e-6
    fleet = FleetView.of(1, estimates=known_, decode_requests=[10], prefill_requests=[1])
    parts = Toll().parts(Request("r", 500, 9), fleet, pairs((-1, 0)))
    stall = 0.001 + 500e-6
    assert parts["toll_stream"] == pytest.approx([10 * stall + LAW.toll(10.0)])
    wait = parts["wait"][0]
    assert parts["toll_queue"] == pytest.approx([2.0 * stall * (wait + stall / 2)])


def test_a_prompt_among_streams_takes_a_step_and_half_of_one_at_least() -> None:
    known_ = known(1)
    known_.interference_base[:], known_.interference_token[:] = 0.001, 1e-6

    def prefill(prompt: int, streams: int) -> float:
        fleet = FleetView.of(1, estimates=known_, decode_requests=[streams])
        return float(Toll().parts(Request("r", prompt, 9), fleet, pairs((-1, 0)))["prefill"][0])

    assert prefill(50, 0) == pytest.approx(0.005 + 50e-4)
    assert prefill(50, 4) == pytest.approx(1.5 * LAW(4.0) + 0.001 + 50e-6)
    assert prefill(5000, 4) == pytest.approx(0.005 + 5000e-4)


def test_memory_costs_what_has_to_be_computed_again_for_the_blocks_that_are_stored() -> None:
    columns = {
        "estimates": known(2), "output": 100.0, "overlap": [10, 20], "decode_requests": [0, 8],
        "prefills": PREFILLS, "decodes": ~PREFILLS,
    }  # fmt: skip
    request, offered = Request("r", 1000, 100), pairs((0, 1), (-1, 1))
    free = Toll().parts(request, FleetView.of(2, **columns), offered)
    assert free["toll_memory"].tolist() == [0.0, 0.0]
    fleet = FleetView.of(2, recomputed_share=[0.5, 0.25], **columns)
    parts = Toll().parts(request, fleet, offered)
    # Prefill: 840 tokens at r / (1 - r) = 1. Decode: 680 tokens and the output at 1 / 3. A second
    # of prefill delays the eight streams of a decode worker by one each.
    stored, copied = 0.005 + 840e-4, 0.005 + 780e-4
    assert parts["toll_memory"][0] == pytest.approx(9 * (stored + copied / 3))


def test_prices_are_means_over_the_lengths_that_an_output_may_have() -> None:
    """Two lengths, even chances: the price is the mean of their prices, in every part."""
    estimates, offered = known(2), pairs((0, 1), (-1, 1))
    estimates.prefill_pair[:], estimates.context_token[:] = 1e-8, 1e-6
    toll = Toll(URGENCY_1)
    toll.recent_ttft.add(0.5)

    def parts(mean: float, deviation: float) -> np.ndarray:
        fleet = FleetView.of(
            2, estimates=estimates, output=mean, decode_requests=[0, 8], prefills=PREFILLS,
            decodes=~PREFILLS, recomputed_share=[0.5, 0.25],
            lengths=Prediction(mean, mean, deviation**2),
        )  # fmt: skip
        return toll.parts(Request("r", 1000, 2000), fleet, offered).rows

    uncertain, certain = parts(500.0, 300.0), parts(500.0, 0.0)
    assert uncertain == pytest.approx((parts(200.0, 0.0) + parts(800.0, 0.0)) / 2, rel=1e-3)
    for part in ("decode", "toll_stream", "toll_memory"):
        assert (uncertain > certain)[PARTS.index(part)].all()


def test_the_example_of_the_documentation_is_right() -> None:
    known_, toll, offered = known(2), Toll(URGENCY_1), pairs((0, 1), (-1, 1))
    known_.fleet_arrivals[:] = 2.0
    toll.recent_ttft.add(0.5)
    fleet = FleetView.of(
        2, estimates=known_, output=100.0, overlap=[10, 20], decode_requests=[0, 8],
        prefills=PREFILLS, decodes=~PREFILLS, prefill_requests=[2, 0],
        prefill_tokens=[3000, 0], recomputed_share=[0.5, 0.25],
    )  # fmt: skip
    parts = toll.parts(Request("r", 1000, 100), fleet, offered)
    remote = [0.310, 0.089, 0.00568, 2.72, 0.1638, 0.640, 0.0883, 1.0602]
    local = [0.000, 0.1126, 0.0, 2.72, 0.0127, 1.224, 0.0057, 0.2513]
    for name, one, other in zip(PARTS, remote, local, strict=True):
        assert parts[name] == pytest.approx([one, other], abs=6e-5), name
    assert parts.total == pytest.approx([5.0769, 4.3263], abs=1e-4)
    text = (Path(__file__).parents[2] / "docs/notes/further-results.md").read_text()
    for number in ("5.077", "4.326", "0.1638", "1.0602", "0.2513"):
        assert number in text


def test_urgency_grows_with_the_square_of_the_time_to_the_first_token() -> None:
    toll, offered = Toll(URGENCY_1), pairs((-1, 0), (-1, 1))
    fleet = FleetView.of(2, estimates=known(2), prefill_requests=[0, 1], prefill_tokens=[0, 9950])
    request = Request("r", 950, 9)
    parts = toll.parts(request, fleet, offered)
    toll.note(request, fleet, offered, 0, parts)  # so the mean is 0.1 s
    parts = toll.parts(request, fleet, offered)
    assert parts["urgency"] == pytest.approx([0.1**2 / 0.2, 1.1**2 / 0.2])
    for _ in range(1000):
        toll.note(request, fleet, offered, 1, parts)
    assert toll.recent_ttft.seconds == pytest.approx(1.1, rel=1e-3)


def test_later_prompts_lose_no_more_than_the_next_does_by_going_elsewhere() -> None:
    known_ = known(2)
    known_.fleet_arrivals[:] = 100.0
    known_.prefill_per_token[:] = 1e-4
    columns = {"prefills": PREFILLS, "decodes": ~PREFILLS, "estimates": known_}
    request, offered = Request("r", 4000, 9), pairs((0, 1))

    def toll(streams: int, waiting: int) -> float:
        fleet = FleetView.of(
            2, decode_requests=[0, streams], prefill_requests=[1, 0],
            prefill_tokens=[waiting, 0], **columns,
        )  # fmt: skip
        return float(Toll().parts(request, fleet, offered)["toll_queue"][0])

    # A mean prompt takes 0.25 s, from each stream as much, and 2,450 tokens are not transferred.
    assert toll(1, 50) == pytest.approx(0.25 - 0.005 - 0.00245)
    assert toll(4, 50) == pytest.approx(4 * 0.25 - 0.005 - 0.00245)
    assert toll(1, 10_000) == 0.0  # it goes elsewhere whether or not this one comes


def test_later_prompts_are_as_urgent_as_this_one() -> None:
    toll, offered = Toll(URGENCY_1), pairs((-1, 0))
    fleet = FleetView.of(1, estimates=known(1), prefill_requests=[1], prefill_tokens=[9950])
    request = Request("r", 950, 9)
    calm = toll.parts(request, fleet, offered)["toll_queue"][0]
    toll.recent_ttft.add(0.5)
    assert toll.parts(request, fleet, offered)["toll_queue"][0] == pytest.approx(
        calm * (1 + 1 / 0.5 * (1.0 + 0.1) / 2)
    )


def test_local_prefill_is_dearer_the_more_streams_it_stalls() -> None:
    def cost(streams: int) -> float:
        fleet = FleetView.of(1, estimates=known(1), decode_requests=[streams])
        parts = Toll().parts(Request("r", 500, 9), fleet, pairs((-1, 0)))
        return float(parts["toll_stream"][0] - LAW.toll(streams))

    assert cost(0) == 0
    assert cost(20) == pytest.approx(4 * cost(5))


def test_a_queue_at_the_prefill_worker_makes_prompts_go_local() -> None:
    def best(waiting: int) -> int:
        fleet = FleetView.of(
            2, estimates=known(2), prefill_requests=[waiting, 0],
            prefill_tokens=[waiting * 4000, 0], decode_requests=[0, 4],
        )  # fmt: skip
        return int(Toll().costs(Request("r", 4000, 9), fleet, pairs((0, 1), (-1, 1))).argmin())

    assert [best(n) for n in (0, 1, 2, 8)] == sorted(best(n) for n in (0, 1, 2, 8))
    assert (best(0), best(8)) == (0, 1)


def test_without_tolls_it_is_the_selfish_choice() -> None:
    fleet = FleetView.of(1, estimates=known(1), decode_requests=[9])
    selfish = override(Toll(), {"toll": 0.0})
    parts = selfish.parts(Request("r", 50, 9), fleet, pairs((-1, 0)))  # type: ignore[attr-defined]
    assert all(parts[name] == 0 for name in parts if name.startswith("toll_"))
    with pytest.raises(ConfigError, match=r"tol is no parameter .* toll, urgency"):
        override(Toll(), {"tol": 1.0})
    with pytest.raises(ConfigError, match="toll"):
        override(Toll(), {"toll": "much"})


def test_the_toll_of_a_stream_is_that_of_the_law() -> None:
    law = LatencyLaw(0.001, 0.02, 0.05, 32.0, 2.0)
    found = stream_tolls(known(3, law), np.array([0, 5, 30]), 10.0)
    assert found == pytest.approx([0.0, 10 * law.toll(5.0), 10 * law.toll(30.0)])


def test_an_override_holds_for_its_request_alone() -> None:
    plane = ControlPlane(ControlConfig(policy="toll"))
    plane.observe(WorkerUp(Worker("a", "u")), 0)
    for name, overrides in (("one", {"toll": 0.0, "temperature": 2.0}), ("two", {})):
        assert isinstance(plane.submit(Request(name, 8, 4, overrides=overrides), 0), Route)
    one, two = plane.decision("one"), plane.decision("two")
    assert one is not None
    assert two is not None
    assert (one.temperature, two.temperature) == (2.0, 0.0)
    assert one.parts["toll_stream"][0] == 0
    with pytest.raises(ConfigError, match="nope"):
        plane.submit(Request("x", 8, 4, overrides={"nope": 1.0}), 0)
    with pytest.raises(ConfigError, match="temperature"):
        plane.submit(Request("x", 8, 4, overrides={"temperature": -1.0}), 0)


def test_a_decision_is_explained_by_its_parts_and_its_regret() -> None:
    plane = ControlPlane(ControlConfig(policy="toll"))
    for role in (Role.PREFILL, Role.DECODE):
        plane.observe(WorkerUp(Worker(role.value, "u", role)), 0)
    plane.submit(Request("r", 640, 4), 5)
    why = plane.decision("r")
    assert why is not None
    assert (why.at, why.policy, why.prompt) == (5, "toll", 640)
    assert list(zip(why.prefill, why.decode, strict=True)) == [
        ("", "decode"),
        ("prefill", "decode"),
    ]
    assert why.costs == pytest.approx(sum(why.parts.values()))
    assert why.costs[why.chosen] == why.costs.min()
    assert why.regret == 0
    assert plane.decision("nobody") is None


def test_the_ledger_keeps_the_latest_decisions() -> None:
    plane = ControlPlane(ControlConfig(policy="toll", max_decisions=3))
    plane.observe(WorkerUp(Worker("a", "u")), 0)
    for i in range(5):
        plane.submit(Request(f"r{i}", 8, 4), i)
    assert [each.request for each in plane.router.ledger.latest()] == ["r4", "r3", "r2"]


def mean_ttft(policy: str) -> tuple[float, float]:
    """A burst of long prompts before a slow prefill worker; also the worst pace of a stream."""
    workers = {Role.PREFILL: [Ideal(LAW, 6e-4)], Role.DECODE: [Ideal(LAW, 6e-4), Ideal(LAW, 6e-4)]}
    model = ModelFleet(ControlPlane(ControlConfig(policy=policy)), workers)
    model.run(poisson(2.5, 60, 3, (400, 1200), (20, 60)))
    return float(np.mean(list(model.ttft.values()))), float(np.mean(list(model.seconds.values())))


def test_prices_beat_unconditional_disaggregation_when_prefill_is_scarce() -> None:
    tolled, plain = mean_ttft("toll"), mean_ttft("least-loaded")
    assert tolled[0] < 0.5 * plain[0]
    assert tolled[1] < 0.8 * plain[1]


def test_parameters_out_of_the_struct_are_refused() -> None:
    with pytest.raises(TypeError):
        TollParams(tol=1)  # type: ignore[call-arg]


def test_a_prefix_below_the_device_is_worth_less_and_never_nothing() -> None:
    fleet = FleetView.of(
        4,
        estimates=known(4),
        overlap=[10, 10, 10, 0],
        device=[10, 2, 2, 0],
        host=[0, 8, 0, 0],
        storage=[0, 0, 8, 0],
    )
    request = Request("r", 1000, 100)
    here = pairs((-1, 0), (-1, 1), (-1, 2), (-1, 3))
    found = Toll().parts(request, fleet, here)["prefill"]
    assert np.all(np.diff(found) > 0.0)
    assert found[1] - found[0] == pytest.approx(0.1 * 128e-4)
    assert found[2] - found[0] == pytest.approx(0.5 * 128e-4)
    table = Toll().parts(request, fleet, here)
    assert table.total == pytest.approx(sum(table.values()))
    with pytest.raises(ValueError, match=r"host_restore is 1\.5; it must be 0 to 1"):
        TollParams(host_restore=1.5)


def test_prices_alone_change_no_price() -> None:
    toll, offered = Toll(), pairs((0, 1), (-1, 1))
    fleet = FleetView.of(
        2, estimates=known(2), prefill_requests=[1, 0], prefill_tokens=[1000, 0],
        decode_requests=[0, 9],
    )  # fmt: skip
    first = toll.costs(Request("r", 500, 100), fleet, offered).tolist()
    for size in range(100, 2000, 100):
        toll.costs(Request(str(size), size, 100), fleet, offered)
    assert toll.costs(Request("s", 500, 100), fleet, offered).tolist() == first


def test_explaining_decisions_changes_none() -> None:
    served = []
    for most in (0, 100):
        plane = ControlPlane(ControlConfig(policy="toll", max_decisions=most))
        fleet = {Role.PREFILL: [Ideal(LAW)], Role.DECODE: [Ideal(LAW)] * 2}
        model = ModelFleet(plane, fleet)
        model.run(poisson(8, 20, 1, (200, 4000), (50, 150)))
        served.append(plane.tracker.state.columns.served.tolist())
    assert served[0] == served[1]
