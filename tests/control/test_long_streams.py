"""Long streams: who fills a fleet with them gets its share of the places, and no more."""

from __future__ import annotations

import numpy as np
import pytest

from pigou.config import ConfigError, ControlConfig
from pigou.control.admission.admission_queue import LINGERS, LongStreams, TenantActivity
from pigou.control.admission.queue_order import load
from pigou.control.messages import Ended, PeerReport, PrefillDone, Queue, Route, WorkerUp
from pigou.control.peers.bookings import TenantService
from pigou.control.plane import ControlPlane
from pigou.request import SECOND, FinishReason, Request, Worker

ORDERS = ("fair", "priority-fair", "drf", "karma", "dlpm", "d2lpm", "market")
PLACES, EXPECTED = 8, 200


class Fleet:
    """One worker of 8 places, whose requests had 200 tokens of output so far."""

    def __init__(self, order: str, **params: float) -> None:
        admission = {"order": order, **params}
        self.plane = ControlPlane(ControlConfig(admission=admission, max_inflight=PLACES))
        self.plane.observe(WorkerUp(Worker("w", "u", blocks=10**5, max_seqs=PLACES)), 0)
        self.now = self.count = 0
        for _ in range(64):  # it learns what to expect
            request = self.send("v")
            self.tokens(request, EXPECTED)
            self.end(request)

    def send(self, tenant: str) -> str:
        """Send a request; return its id, or "" if it waits."""
        self.count += 1
        self.now += SECOND // 100
        request = Request(f"{tenant}{self.count}", 10, 100_000, tenant=tenant)
        decision = self.plane.submit(request, self.now)
        if isinstance(decision, Queue):
            return ""
        assert isinstance(decision, Route)
        self.plane.observe(PrefillDone(request.id), self.now)
        return request.id

    def tokens(self, request: str, count: int) -> None:
        slots = np.array([self.plane.slot(request)])
        self.plane.on_tokens(slots, np.array([count]), self.now)

    def end(self, request: str) -> list[str]:
        """End a request; return those that take its place."""
        ended = self.plane.observe(Ended(request, FinishReason.STOP), self.now)
        routed = [route.request for route in ended if isinstance(route, Route)]
        for one in routed:
            self.plane.observe(PrefillDone(one), self.now)
        return routed


@pytest.mark.parametrize("order", ORDERS)
def test_a_tenant_with_its_share_of_long_streams_gets_no_more_and_is_passed_over(
    order: str,
) -> None:
    fleet = Fleet(order, overrun=2.0)
    long = [fleet.send("x") for _ in range(PLACES // 2)]
    assert all(long)
    for request in long:
        fleet.tokens(request, 3 * EXPECTED)
    assert fleet.send("x") == ""  # places are free, and others are active
    assert all(fleet.send("v") for _ in range(PLACES // 2))  # they overtake it
    assert fleet.send("v") == ""
    routed = fleet.end(long[0])  # the place of a long one is free
    assert len(routed) == 1


@pytest.mark.parametrize("order", ORDERS)
def test_streams_of_twice_the_typical_output_are_not_long(order: str) -> None:
    fleet = Fleet(order, overrun=2.0)
    for _ in range(PLACES // 2):
        fleet.tokens(fleet.send("x"), 2 * EXPECTED - 20)
    assert fleet.send("x")


@pytest.mark.parametrize(("order", "params"), [("fcfs", {}), ("fair", {})])
def test_counterexample_long_streams_take_the_fleet(order: str, params: dict[str, float]) -> None:
    fleet = Fleet(order, **params)
    for _ in range(PLACES):
        fleet.tokens(fleet.send("x"), 3 * EXPECTED)
    assert fleet.send("v") == ""


def test_a_tenant_alone_may_have_all_places_for_as_long_as_it_likes() -> None:
    fleet = Fleet("fair", overrun=2.0)
    fleet.now += 60 * SECOND  # nobody else is active
    for _ in range(PLACES):
        fleet.tokens(fleet.send("x"), 3 * EXPECTED)


def test_a_held_tenant_keeps_its_share_and_is_free_ten_seconds_after_its_long_streams() -> None:
    fleet = Fleet("fair", overrun=2.0)
    long = [fleet.send("x") for _ in range(PLACES // 2)]
    for request in long:
        fleet.tokens(request, 3 * EXPECTED)
    assert fleet.send("x") == ""
    for request in long:  # its next have their places at once
        fleet.send("x")
        assert [one[0] for one in fleet.end(request)] == ["x"]
    activity = fleet.plane.admission.activity
    fleet.plane.tick(fleet.now)
    assert activity.streams("x")[0] == PLACES // 2
    fleet.now += LINGERS
    assert fleet.send("v")  # others are active still
    fleet.plane.tick(fleet.now)
    assert activity.streams("x")[0] > PLACES // 2


def test_streams_at_other_gateways_count_as_long_as_those_here() -> None:
    activity, long = TenantActivity(), LongStreams(2.0)
    for tenant in "xv":
        activity.seen(tenant, 1.0, 0)
    activity.began("x")
    activity.peer_streams("x", 3)
    for number in range(40):
        long.grew(past := Request(f"p{number}", 1, 10**6, tenant="v"), 100)
        long.ended(past)
    long.grew(Request("r", 1, 10**6, tenant="x"), 300)
    assert long.held(activity, 8.0, {"x": 9.0}, 0) == []  # its share is 7.2 places
    assert long.held(activity, 8.0, {}, 0) == ["x"]
    activity.peer_streams("x", -3)
    assert long.held(activity, 8.0, {}, 0) == []


def test_a_request_of_several_sequences_is_long_by_what_one_of_them_has() -> None:
    activity, long = TenantActivity(), LongStreams(2.0)
    for number in range(40):
        long.grew(past := Request(f"p{number}", 1, 10**6, tenant="v", sequences=2), 200)
        long.ended(past)
    for tenant in "xv":
        activity.seen(tenant, 1.0, 0)
    activity.began("x", 4)
    many = Request("r", 1, 10**6, tenant="x", sequences=4)
    long.grew(many, 800)
    assert long.held(activity, 4.0, {}, 0) == []
    long.grew(many, 40)
    assert long.held(activity, 4.0, {}, 0) == ["x"]


@pytest.mark.parametrize("output", [1, 10_000])
def test_no_flood_of_one_tenant_makes_the_streams_of_others_long_or_its_own_typical(
    output: int,
) -> None:
    """The mean of all would fall to 1, or rise to what the flood has."""
    activity, long = TenantActivity(), LongStreams(2.0)
    for number in range(400):
        tenant, tokens = (("v", "w")[number % 2], 100) if number % 8 < 2 else ("x", output)
        long.grew(past := Request(f"p{number}", 1, 10**6, tenant=tenant), tokens)
        long.ended(past)
    for tenant in "xvw":
        activity.seen(tenant, 1.0, 0)
        activity.began(tenant, 2)
    long.grew(Request("mine", 1, 10**6, tenant="v"), 190)
    assert not long
    long.grew(Request("its", 1, 10**6, tenant="x"), 500)
    assert long.held(activity, 6.0, {}, 0) == ["x"]


def test_no_stream_is_long_before_some_ended() -> None:
    long = LongStreams(2.0)
    for number in range(31):
        long.grew(past := Request(f"p{number}", 1, 10**6, tenant="v"), 100)
        long.ended(past)
    long.grew(Request("r", 1, 10**6, tenant="x"), 10**5)
    assert not long


def test_service_elsewhere_makes_nobody_held_alone() -> None:
    fleet = Fleet("fair", overrun=2.0)
    services = (TenantService("x", 10, streams=PLACES),)
    fleet.plane.observe(PeerReport("b", (), services), fleet.now)
    assert fleet.plane.admission.queue.order.held == ()


def test_an_overrun_below_0_is_refused() -> None:
    with pytest.raises(ConfigError, match="overrun"):
        load({"order": "fair", "overrun": -1.0})
