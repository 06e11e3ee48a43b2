"""Lanes of the queue: caps of classes, and long prompts beside short ones."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pigou.config import ControlConfig, QueueClass
from pigou.control.admission.lanes import STARVES_AFTER
from pigou.control.messages import Ended, PeerGone, PeerReport, Queue, Route, WorkerUp
from pigou.control.peers.sync import PeerPublisher, PeerReceiver
from pigou.control.plane import ControlPlane
from pigou.request import SECOND, FinishReason, Request, Worker

LANE = "min_prompt=1000,tokens=64,seqs=1,kv_share=0.5"
ORDERS = ("fcfs", "priority", "edf", "shortest", "fair", "priority-fair", "drf", "karma", "dlpm",
          "d2lpm", "market")  # fmt: skip


def fleet(
    workers: int = 1, max_seqs: int = 4, blocks: int = 0, lane: str = "", **options: Any
) -> ControlPlane:
    plane = ControlPlane(ControlConfig(**{"admission": {"order": "fcfs"}} | options))
    for number in range(workers):
        plane.observe(
            WorkerUp(
                Worker(f"w{number}", "u", max_seqs=max_seqs, blocks=blocks, long_lane=lane)
            ), 0,
        )  # fmt: skip
    return plane


def send(plane: ControlPlane, id: str, prompt: int = 10, at: int = 1, **fields: Any) -> str:
    """Submit a request; return the worker, or "" if it waits."""
    decision = plane.submit(Request(id, prompt, 8, arrival=at, **fields), at)
    assert isinstance(decision, Route | Queue)
    return decision.choice.decode if isinstance(decision, Route) else ""


def end(plane: ControlPlane, id: str, at: int = 2) -> list[str]:
    routes = plane.observe(Ended(id, FinishReason.STOP), at)
    return [one.request for one in routes if isinstance(one, Route)]


@pytest.mark.parametrize("order", ORDERS)
def test_a_class_at_its_cap_waits_alone(order: str) -> None:
    classes = {"batch": QueueClass(concurrency=1)}
    plane = fleet(workers=2, classes=classes, admission={"order": order}, prefill_ahead_ms=10**6)
    for number in range(5):
        where = send(plane, f"b{number}", workload="batch", tenant=f"t{number % 2}")
        assert bool(where) == (number < 2)  # one for each of two workers
    assert send(plane, "chat", workload="chat", tenant="t0"), "others pass"
    assert end(plane, "b0") in (["b2"], ["b3"], ["b4"])
    assert len(plane.queue) == 2


def test_a_class_waits_for_the_fleet_in_the_order_of_all() -> None:
    plane = fleet(max_seqs=1, classes={"a": QueueClass(concurrency=9)})
    assert send(plane, "r0")
    assert not send(plane, "a0", workload="a")
    assert not send(plane, "r1")
    assert end(plane, "r0") == ["a0"]
    assert end(plane, "a0") == ["r1"]


def test_a_request_of_more_sequences_than_the_cap_runs_alone() -> None:
    plane = fleet(max_seqs=16, classes={"a": QueueClass(concurrency=4)})
    assert send(plane, "a0", workload="a", sequences=8)
    assert not send(plane, "a1", workload="a")
    assert end(plane, "a0") == ["a1"]


@pytest.mark.parametrize("reported", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_a_worker_gets_the_long_prompts_of_its_lane_and_short_ones_pass(
    order: str, reported: bool
) -> None:
    lanes = {"lane": LANE} if reported else {"long_lane": LANE}
    plane = fleet(admission={"order": order}, prefill_ahead_ms=10**6, **lanes)
    assert send(plane, "s0")
    assert send(plane, "l0", 2000)
    assert not send(plane, "l1", 2000)  # its row is taken
    assert send(plane, "s1")
    assert send(plane, "s2")
    assert not send(plane, "s3")  # four rows
    assert end(plane, "s0") == ["s3"]
    assert end(plane, "l0") == ["l1"]


def test_a_waiting_long_prompt_is_owed_a_row_and_its_kv() -> None:
    plane = fleet(max_seqs=2, blocks=250, long_lane=LANE)  # 4,000 tokens, half of them reserved
    for name in ("s0", "s1"):
        assert send(plane, name, 900)
    assert not send(plane, "l0", 1500)
    assert not send(plane, "s2", 900)
    assert end(plane, "s0") == ["l0"]
    # With rows to spare short requests leave the KV that a long one waits for.
    plane = fleet(max_seqs=9, blocks=250, long_lane=LANE)
    assert send(plane, "s0", 990)
    assert send(plane, "s1", 990)
    assert send(plane, "s2", 900)
    assert not send(plane, "l0", 1800)
    assert not send(plane, "s3", 900)
    assert end(plane, "s0") == ["l0"]
    assert end(plane, "s1") == ["s3"]


def test_a_long_prompt_that_waits_for_its_class_is_owed_nothing() -> None:
    plane = fleet(max_seqs=2, long_lane=LANE, classes={"doc": QueueClass(concurrency=1)})
    assert send(plane, "d0", 2000, workload="doc")
    assert not send(plane, "d1", 2000, workload="doc")
    assert send(plane, "s0")
    plane = fleet(2, max_seqs=1, long_lane=LANE, classes={"doc": QueueClass(concurrency=1)})
    for name in ("d0", "d1"):
        assert send(plane, name, 2000, workload="doc")
    assert not send(plane, "d2", 2000, workload="doc")
    assert not send(plane, "s0")
    assert end(plane, "d0") == ["d2"]
    assert end(plane, "d1") == ["s0"]


def test_long_prompts_take_all_of_an_idle_worker() -> None:
    plane = fleet(long_lane=LANE)
    assert [bool(send(plane, f"l{i}", 2000)) for i in range(5)] == [True] * 4 + [False]


def test_a_class_may_wait_with_the_long_prompts_and_background_classes_yield() -> None:
    classes = {"doc": QueueClass(lane="long"), "batch": QueueClass(lane="background")}
    plane = fleet(long_lane=LANE, classes=classes)
    assert send(plane, "s0")
    assert send(plane, "d0", workload="doc")
    assert not send(plane, "d1", workload="doc")
    route = plane.submit(Request("b", 10, 8, workload="batch"), 1)
    assert isinstance(route, Route)
    assert route.priority == 1


def test_a_lane_starves_if_others_are_served_while_it_waits() -> None:
    plane = fleet(long_lane=LANE)
    assert send(plane, "l0", 2000)
    assert send(plane, "s0")
    assert not send(plane, "l1", 2000)
    (state,) = plane.admission.lanes.states(plane.queue, STARVES_AFTER + 2)
    assert not state.starves  # nobody was served since
    assert send(plane, "s1", at=SECOND)
    (state,) = plane.admission.lanes.states(plane.queue, STARVES_AFTER + 2)
    assert (state.starves, state.waiting, state.lane.is_long) == (True, 1, True)
    (state,) = plane.admission.lanes.states(plane.queue, STARVES_AFTER // 2)
    assert not state.starves


def test_the_class_sets_the_due_time_of_earliest_deadline_first() -> None:
    classes = {"voice": QueueClass(ttft_ms=150), "batch": QueueClass(ttft_ms=10_000)}
    plane = fleet(max_seqs=1, classes=classes, admission={"order": "edf"})
    assert send(plane, "r0")
    assert not send(plane, "b", at=1, workload="batch")
    assert not send(plane, "v", at=2, workload="voice")
    assert end(plane, "r0", 3) == ["v"]


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["new", "end"]), st.sampled_from([10, 500, 1500]),
            st.sampled_from(["", "a", "b"]), st.integers(1, 3),
        ),
        min_size=1, max_size=40,
    ),
    st.sampled_from(["fcfs", "fair", "shortest"]),
)  # fmt: skip
def test_no_worker_and_no_class_gets_more_than_its_own_and_all_are_served(
    steps: list[tuple[str, int, str, int]], order: str
) -> None:
    classes = {"a": QueueClass(concurrency=2), "b": QueueClass(concurrency=1, lane="long")}
    plane = fleet(2, 3, 200, classes=classes, long_lane=LANE, admission={"order": order},
                  prefill_ahead_ms=10**6)  # fmt: skip
    served: list[str] = []
    now, caps = 0, {"a": 4, "b": 2}

    def check() -> None:
        running = plane.state.requests.values()
        for name, cap in caps.items():
            own = [one.request for one in running if one.request.workload == name]
            assert sum(one.sequences for one in own) <= cap or len(own) == 1
        assert (plane.state.columns.decode_requests <= 3).all()

    for number, (what, prompt, workload, sequences) in enumerate(steps):
        now += SECOND // 100
        if what == "new":
            request = Request(f"r{number}", prompt, 8, arrival=now, workload=workload,
                              sequences=sequences, tenant=f"t{number % 3}")  # fmt: skip
            plane.submit(request, now)
        elif plane.state.requests:
            done = next(iter(plane.state.requests))
            plane.observe(Ended(done, FinishReason.STOP), now)
            served.append(done)
        check()
    while plane.state.requests:
        now += SECOND // 100
        done = next(iter(plane.state.requests))
        plane.observe(Ended(done, FinishReason.STOP), now)
        served.append(done)
        check()
    assert not plane.queue, "a request waits in an empty fleet"
    lanes = plane.admission.lanes
    assert not lanes._streams
    assert not lanes._long
    assert not any(lanes._of_class.values())


@pytest.mark.parametrize("demand", [(40, 40), (60, 20)])
def test_gateways_share_a_class_s_streams_by_demand_and_the_last_has_all(
    demand: tuple[int, int],
) -> None:
    planes = [fleet(max_seqs=64, classes={"a": QueueClass(concurrency=4)}) for _ in demand]
    publishers = [PeerPublisher(name, plane) for name, plane in zip("xy", planes, strict=True)]
    receivers = [PeerReceiver(publisher) for publisher in publishers]
    now, running, served = 1, [list[str](), list[str]()], [0, 0]
    rng = random.Random(5)

    def exchange() -> None:
        for sender, receiver in ((0, 1), (1, 0)):
            state = publishers[sender].changes(now, {})
            if state is not None:
                report, _ = receivers[receiver].receive(state, now)
                assert isinstance(report, PeerReport)
                note(receiver, planes[receiver].observe(report, now))

    def note(gateway: int, routes: list[Any]) -> None:
        began = [one.request for one in routes if isinstance(one, Route)]
        running[gateway] += began
        served[gateway] += len(began)

    for gateway, count in enumerate(demand):
        for number in range(count):
            if send(planes[gateway], f"{gateway}-{number}", workload="a"):
                running[gateway].append(f"{gateway}-{number}")
            exchange()
    for _ in range(40):  # each end lets that gateway's next one go, unless its part is spent
        now += SECOND // 50
        gateway, name = rng.choice([(one, name) for one in (0, 1) for name in running[one]])
        running[gateway].remove(name)
        note(gateway, planes[gateway].observe(Ended(name, FinishReason.STOP), now))
        exchange()
        assert len(running[0]) + len(running[1]) <= 4 + 2
    share = served[0] / sum(served)
    assert share == pytest.approx(demand[0] / sum(demand), abs=0.15)
    note(0, planes[0].observe(PeerGone("y"), now))
    assert len(running[0]) == 4
