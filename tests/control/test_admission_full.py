"""Laws of a full queue: who is shed, and how the sequences of one request count."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.config import ControlConfig
from pigou.control.messages import Ended, GroupEnded, Queue, Route, Shed, WorkerDown, WorkerUp
from pigou.control.plane import ControlPlane
from pigou.request import SECOND, FinishReason, Request, Worker


def full(order: str, waiting: list[dict[str, Any]], **options: Any) -> ControlPlane:
    """Return a plane whose one slot is taken, with a queue that these fill."""
    plane = ControlPlane(ControlConfig(admission={"order": order}, **options))
    plane.observe(WorkerUp(Worker("w", "u", max_seqs=1)), 0)
    assert isinstance(plane.submit(Request("runs", 1, 8), 0), Route)
    for number, fields in enumerate(waiting):
        values = {"prompt": 10, "max_tokens": 8, "arrival": number} | fields
        assert isinstance(plane.submit(Request(f"r{number}", **values), number), Queue)
    return plane


def shed(plane: ControlPlane, now: int) -> list[str]:
    return [each.request for each in plane.tick(now) if isinstance(each, Shed)]


URGENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "priority": ({"priority": 5}, {"priority": 1}),
    "priority-fair": ({"priority": 5}, {"priority": 1}),
    "edf": ({"deadline": 9 * SECOND}, {"deadline": 2 * SECOND}),
    "shortest": ({"prompt": 5000}, {"prompt": 10}),
}


@pytest.mark.parametrize("order", URGENT)
def test_a_full_queue_sheds_the_newest_of_the_least_urgent(order: str) -> None:
    late, urgent = URGENT[order]
    plane = full(order, [late, late, urgent], max_queued=3)
    values = {"prompt": 10, "max_tokens": 8} | urgent
    assert isinstance(plane.submit(Request("new", **values), 10), Queue)
    assert shed(plane, 11) == ["r1"]
    assert len(plane.queue) == 3


@pytest.mark.parametrize("order", [*URGENT, "fcfs"])
def test_a_newcomer_that_is_not_more_urgent_is_shed_itself(order: str) -> None:
    late = URGENT.get(order, ({}, {}))[0]
    plane = full(order, [late, late], max_queued=2)
    values = {"prompt": 10, "max_tokens": 8} | late
    assert isinstance(plane.submit(Request("new", **values), 10), Shed)
    assert shed(plane, 11) == []


def test_the_shed_request_is_told_when_to_come_back() -> None:
    plane = full("priority", [{"priority": 3}], max_queued=1)
    plane.submit(Request("new", 1, 8, priority=0), 10)
    (told,) = [each for each in plane.tick(11) if isinstance(each, Shed)]
    assert told.retry_after >= SECOND
    assert not told.tenant


def test_no_more_are_shed_than_make_place() -> None:
    small, large = {"priority": 9, "prompt": 1}, {"priority": 8, "prompt": 500}
    plane = full("priority", [large, small, small], max_queued=9, max_queued_tokens=1500)
    held = plane.queue.quota.tokens
    each = held - 500
    ask = Request("new", 1500 - held + each // 4, 8)
    assert isinstance(plane.submit(ask, 10), Queue)
    assert set(shed(plane, 11)) <= {"r1", "r2"}
    assert isinstance(plane.submit(Request("huge", 9000, 8), 12), Shed)
    assert shed(plane, 13) == [], "what would not be enough is not done"


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(1, 6))
def test_those_that_wait_are_the_most_urgent_that_came(urgency: list[int], most: int) -> None:
    plane = full("priority", [], max_queued=most)
    refused: list[str] = []
    for number, priority in enumerate(urgency):
        decision = plane.submit(Request(f"r{number}", 1, 8, priority=priority), number)
        refused += [decision.request] if isinstance(decision, Shed) else []
        refused += shed(plane, number)
    came = {f"r{number}" for number in range(len(urgency))}
    waits = {each.request.id for each in plane.queue}
    assert waits | set(refused) == came
    assert len(waits) + len(refused) == len(came)
    ranked = sorted(range(len(urgency)), key=lambda number: (urgency[number], number))
    assert waits == {f"r{number}" for number in ranked[:most]}


def group(number: int, held: int, **fields: Any) -> Request:
    id_ = "g" if number == 0 else f"g{number}"
    return Request(id_, 10, 8, group="g", held=held, held_tokens=10 * held, **fields)


def test_each_sequence_of_a_request_counts_in_the_queue() -> None:
    plane = full("fcfs", [{}], max_queued=5)
    refused = plane.submit(group(0, 4), 5)
    assert isinstance(refused, Shed)
    assert "5 more" in refused.reason
    assert isinstance(plane.submit(group(0, 3), 5), Queue)
    assert plane.queue.quota.requests == 5
    assert isinstance(plane.submit(Request("other", 1, 8), 6), Shed)
    assert isinstance(plane.submit(group(1, 2), 7), Queue), "it was accepted with the first"
    assert plane.queue.quota.requests == 5
    plane.observe(GroupEnded("g"), 8)
    assert plane.queue.quota.requests == 3


def test_an_accepted_sequence_does_not_time_out_while_it_waits() -> None:
    plane = full("fcfs", [], queue_timeout=SECOND)
    plane.submit(group(0, 1), 5)
    plane.submit(group(1, 0), 6)
    assert shed(plane, 3 * SECOND) == ["g"], "the first one may still be refused"
    plane.observe(Ended("runs", FinishReason.STOP), 4 * SECOND)
    assert plane.state.requests.keys() == {"g1"}


def test_accepted_sequences_time_out_where_there_is_no_worker() -> None:
    plane = full("fcfs", [], queue_timeout=SECOND)
    plane.submit(group(0, 1), 5)
    plane.submit(group(1, 0), 6)
    plane.observe(WorkerDown("w"), 7)
    assert set(shed(plane, 3 * SECOND)) >= {"g", "g1"}


def test_sequences_that_a_worker_computes_together_count_each() -> None:
    plane = ControlPlane(ControlConfig(policy="least-loaded"))
    plane.observe(WorkerUp(Worker("a", "u", max_seqs=8)), 0)
    plane.observe(WorkerUp(Worker("b", "u", max_seqs=8)), 0)
    first = plane.submit(Request("beams", 10, 8, sequences=6), 1)
    assert isinstance(first, Route)
    assert plane.state.figures(first.choice.decode)["decode_requests"] == 6
    other = [plane.submit(Request(f"r{n}", 10, 8), 2) for n in range(6)]
    assert {each.choice.decode for each in other if isinstance(each, Route)} == (
        {"a", "b"} - {first.choice.decode}
    )
    assert isinstance(plane.submit(Request("more", 10, 8, sequences=6), 3), Queue)
    assert plane.queue.quota.requests == 6
    plane.observe(Ended("beams", FinishReason.STOP), 4)
    assert plane.queue.quota.requests == 0
    for name in ("more", *(f"r{n}" for n in range(6))):
        plane.observe(Ended(name, FinishReason.STOP), 5)
    assert not plane.state.columns.decode_requests.any()
    assert not plane.state.columns.decoding.any()
