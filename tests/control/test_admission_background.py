"""Tenants that ask for more than their part yield to the others inside the workers as well."""

from __future__ import annotations

from typing import Any

from pigou.config import ControlConfig
from pigou.control.journal import report_tokens
from pigou.control.messages import Ended, FirstToken, Queue, Route, WorkerDown, WorkerUp
from pigou.control.plane import ControlPlane
from pigou.gateway.proxy.upstream import Engine
from pigou.request import SECOND, FinishReason, Request, Worker

#: When the flood has gone on for a while.
NOW = 8 * SECOND


def flooded(order: str, workers: int = 2, overtakes: bool = True) -> ControlPlane:
    """Return a plane on whose workers `loud` has more than its part, and a prompt on each."""
    plane = ControlPlane(ControlConfig(admission={"order": order}))
    for number in range(workers):
        worker = Worker(f"w{number}", "u", max_seqs=64, overtakes=overtakes)
        plane.observe(WorkerUp(worker), 0)
    send(plane, "first", "quiet", now=0)
    routed = [send(plane, f"l{number}", "loud", now=0) for number in range(40)]
    going = ["first", *(each.request for each in routed if isinstance(each, Route))]
    for step in range(1, 9):
        found: list[Any] = []
        for name in going:
            found += plane.observe(FirstToken(name), step * SECOND)
            report_tokens(plane, [(name, 2000)], step * SECOND)
        going = [each.request for each in found]
    plane.observe(Ended("first", FinishReason.STOP), NOW)
    return plane


def send(plane: ControlPlane, name: str, tenant: str, priority: int = 0, now: int = NOW) -> Any:
    request = Request(name, 500, 10, arrival=now, tenant=tenant, priority=priority)
    return plane.submit(request, now)


def test_the_gateways_number_goes_to_the_workers_whatever_a_client_asked() -> None:
    plane = flooded("fair")
    assert isinstance(send(plane, "urgent", "loud", priority=-100), Queue)
    found = send(plane, "modest", "quiet", priority=100)
    assert isinstance(found, Route)
    assert found.priority == 0
    loud = [each for each in plane.tick(NOW + 3 * SECOND) if isinstance(each, Route)]
    assert loud
    assert {each.priority for each in loud} == {1}


def test_among_priorities_a_tenant_yields_to_others_of_the_same() -> None:
    plane = flooded("priority-fair")
    found = send(plane, "q", "quiet", priority=-3)
    assert isinstance(found, Route)
    assert found.priority == -6
    assert {each.priority for each in plane.tick(NOW + 3 * SECOND) if isinstance(each, Route)} == {
        1
    }


def test_other_orders_leave_the_clients_number_alone() -> None:
    plane = flooded("fcfs")
    found = send(plane, "q", "quiet", priority=3)
    assert isinstance(found, Route)
    assert found.priority is None


def test_a_prompt_does_not_wait_for_those_that_it_overtakes() -> None:
    plane = flooded("fair")
    assert plane.state.background == int(plane.state.columns.background_requests.sum()) > 0
    assert isinstance(send(plane, "q", "quiet"), Route)
    assert isinstance(send(flooded("fair", overtakes=False), "q", "quiet"), Queue)


def test_what_is_overtaken_is_counted_until_it_is_computed_or_gone() -> None:
    plane = flooded("fair", workers=2)
    state = plane.state
    plane.observe(WorkerDown("w0"), NOW)
    assert state.background == int(state.columns.background_requests.sum())
    for name in list(state.requests):
        plane.observe(FirstToken(name), NOW + SECOND)
        plane.observe(Ended(name, FinishReason.STOP), NOW + SECOND)
    for _ in range(40):
        for name in list(state.requests):
            plane.observe(Ended(name, FinishReason.STOP), NOW + SECOND)
    assert not state.requests
    assert state.background == 0
    assert not state.columns.background_tokens.any()


def test_only_a_worker_that_overtakes_is_sent_a_number() -> None:
    body = {"prompt": "x", "priority": -7}
    own, stock = Engine(ranks=True), Engine(stock=True)
    assert own.ranked(body, None) is body
    assert own.ranked(body, 1) == {"prompt": "x", "priority": 1}
    assert own.ranked(body, 0) == stock.ranked(body, 1) == {"prompt": "x"}
    assert body["priority"] == -7
