"""Laws of a gateway's part of the places, while requests wait at any gateway."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.config import ControlConfig
from pigou.control.messages import PeerGone, PeerReport, Route, WorkerUp
from pigou.control.peers.allowance import (
    StreamAllowance,
    TenantDemand,
    TokenCharges,
    stream_allowance,
)
from pigou.control.peers.bookings import TenantService
from pigou.control.plane import ControlPlane
from pigou.request import SECOND, Request, Worker

#: What each of three gateways asks for, of each of some tenants.
ASKED = st.lists(st.tuples(*[st.integers(0, 30)] * 3), min_size=1, max_size=6)


@given(ASKED, st.integers(1, 100))
@settings(max_examples=examples(50))
def test_parts_of_all_gateways_add_up_to_the_places(
    asked: list[tuple[int, ...]], places: int
) -> None:
    parts = [
        stream_allowance(places, [TenantDemand(own[number], sum(own)) for own in asked])
        for number in range(3)
    ]
    if sum(map(sum, asked)) <= places:
        assert parts == [math.inf] * 3
    else:
        assert sum(parts) == pytest.approx(places)


def test_who_asks_for_less_than_its_part_leaves_the_rest_to_the_others() -> None:
    tenants = [TenantDemand(2, 2), TenantDemand(0, 50), TenantDemand(50, 50, weight=2.0)]
    assert stream_allowance(32, tenants) == pytest.approx(2 + 20)


def test_a_tenant_whose_streams_take_more_service_has_fewer_of_them() -> None:
    tenants = [TenantDemand(50, 50, rate=1.5), TenantDemand(0, 50, rate=0.5)]
    assert stream_allowance(32, tenants) == pytest.approx(8)


def test_service_is_equal_in_the_end_whatever_a_stream_takes() -> None:
    """Tenant x takes three times as much service for each second of a stream."""
    allowance, services, now = StreamAllowance(), {"x": 0.0, "y": 0.0}, 0
    parts = {"x": 16.0, "y": 16.0}
    for _ in range(4000):
        now += SECOND // 100
        for name, rate in (("x", 3.0), ("y", 1.0)):
            services[name] += parts[name] * rate * 10
        own, other = (
            TenantService(name, int(services[name]), 0, round(parts[name]), 100)
            for name in ("x", "y")
        )
        allowance.update(now, 32.0, [own], [other], charges=TokenCharges(1.0, 2.0))
        parts = {"x": allowance.limit, "y": 32.0 - allowance.limit}
    assert parts["x"] == pytest.approx(8.0, abs=0.6)


def test_fractions_hold_in_the_mean() -> None:
    allowance = StreamAllowance()
    allowance.limit = 3.3
    reached = []
    for _ in range(1000):
        streams = next(n for n in range(1, 9) if allowance.spent(n))
        reached.append(streams)
        allowance.began()
    assert set(reached) == {3, 4}
    assert sum(reached) / 1000 == pytest.approx(3.3, abs=0.01)
    allowance.limit = 0.0
    assert not allowance.spent(0), "each gateway has one stream at least"


def test_where_tokens_lack_little_more_than_the_present_streams_are_shared() -> None:
    own = [TenantService("x", streams=18, waiting=50)]
    others = [TenantService("y", streams=2, waiting=50)]
    allowance = StreamAllowance()
    allowance.update(SECOND, 1000.0, own, others, charges=TokenCharges(1.0, 2.0))
    assert allowance.limit == math.inf
    allowance.tokens_lacked(SECOND)
    allowance.update(SECOND + 1, 1000.0, own, others, charges=TokenCharges(1.0, 2.0))
    assert allowance.limit == pytest.approx(11.5, abs=0.5)


def node(order: str = "fair") -> ControlPlane:
    """A gateway of one worker that runs four streams."""
    plane = ControlPlane(ControlConfig(admission={"order": order}, prefill_ahead_ms=60_000))
    plane.observe(WorkerUp(Worker("w0", "", max_seqs=4)), 0)
    return plane


@pytest.mark.parametrize("order", ["fair", "fcfs"])
def test_no_gateway_takes_all_places_that_it_sees_free(order: str) -> None:
    """Others wait, too: their streams are not known yet."""
    plane = node(order)
    waits = (TenantService("x", waiting=30),)
    plane.observe(PeerReport("a", tenants=waits), SECOND)
    for number in range(30):
        plane.submit(Request(f"r{number}", 100, 8, tenant="y"), SECOND)
    plane.observe(PeerReport("a", tenants=(TenantService("x", waiting=31),)), 2 * SECOND)
    assert plane.admission.allowance.limit == pytest.approx(2, abs=0.1)
    plane.observe(PeerGone("a"), 3 * SECOND)
    assert plane.admission.allowance.limit == math.inf


def test_a_gateway_below_its_part_serves_although_others_wait_who_had_less() -> None:
    """Gateways that gave way to one another served nobody at last: counters differ."""
    plane = node()
    for tokens in (0, 50_000):
        services = (TenantService("z", tokens, waiting=9), TenantService("x", waiting=9))
        plane.observe(PeerReport("a", tenants=services), SECOND)
    assert isinstance(plane.submit(Request("r", 100, 8, tenant="z"), 2 * SECOND), Route)
