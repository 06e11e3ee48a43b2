"""Laws of the queue under a control plane: bounds, shares, room, returns, and its cost."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.config import ConfigError, ControlConfig
from pigou.control.admission.admission_queue import LINGERS, TenantActivity, TenantQuota
from pigou.control.admission.queue_order import QueuedRequest
from pigou.control.journal import report_tokens
from pigou.control.messages import (
    Ended,
    FirstToken,
    Queue,
    Route,
    Shed,
    WorkerDown,
    WorkerUp,
)
from pigou.control.plane import ControlPlane
from pigou.request import NEVER, SECOND, FinishReason, Request, Role, Worker

ORDERS = ["fcfs", "priority", "edf", "shortest", "fair", "priority-fair"]


def fleet(workers: int = 1, max_seqs: int = 1, blocks: int = 0, **options: Any) -> ControlPlane:
    plane = ControlPlane(ControlConfig(**options))
    for number in range(workers):
        worker = Worker(f"w{number}", "u", blocks=blocks, max_seqs=max_seqs)
        plane.observe(WorkerUp(worker), 0)
    return plane


def ids(decisions: Any) -> list[str]:
    return [each.request for each in decisions]


@dataclass
class Driver:
    """Submits, ends and fails requests, and keeps count of what became of each."""

    plane: ControlPlane
    now: int = 0
    queued: dict[str, Request] = field(default_factory=dict)
    running: dict[str, Request] = field(default_factory=dict)
    shed: list[str] = field(default_factory=list)
    returned: set[str] = field(default_factory=set)
    serial: int = 0

    def submit(self, tenant: str, prompt: int, priority: int) -> None:
        request = Request(
            f"r{self.serial}", prompt, 16, arrival=self.now, tenant=tenant, priority=priority
        )
        self.serial += 1
        decision = self.plane.submit(request, self.now)
        if isinstance(decision, Route):
            self.running[request.id] = request
        elif isinstance(decision, Queue):
            self.queued[request.id] = request
        else:
            assert isinstance(decision, Shed)
            assert SECOND <= decision.retry_after <= 60 * SECOND
            self.shed.append(request.id)

    def take(self, decisions: Any) -> None:
        for decision in decisions:
            assert isinstance(decision, Route), "something that waited was dropped"
            before = self.returned & self.queued.keys()
            assert not before or decision.request in before, "a returned request was overtaken"
            self.returned.discard(decision.request)
            self.running[decision.request] = self.queued.pop(decision.request)

    def end(self, place: int) -> None:
        if self.running:
            name = sorted(self.running)[place % len(self.running)]
            del self.running[name]
            self.take(self.plane.observe(Ended(name, FinishReason.STOP), self.now))

    def fail(self, place: int) -> None:
        """Its worker fails: the request comes again, and may exclude nobody that is up."""
        if self.running:
            name = sorted(self.running)[place % len(self.running)]
            request = self.running.pop(name)
            decision = self.plane.submit(request, self.now, frozenset({"gone"}))
            assert not isinstance(decision, Shed)
            if isinstance(decision, Route):
                self.running[name] = request
            else:
                self.queued[name] = request
                self.returned.add(name)
            self.take(self.plane.tick(self.now))


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"), st.sampled_from("abc"), st.integers(1, 300), st.integers(-1, 1)
        ),
        st.tuples(st.just("end"), st.integers(0, 9)),
        st.tuples(st.just("fail"), st.integers(0, 9)),
        st.tuples(st.just("first"), st.integers(0, 9)),
        st.tuples(st.just("wait"), st.integers(0, SECOND)),
    ),
    max_size=60,
)


@settings(max_examples=examples(150))
@given(st.sampled_from(ORDERS), STEPS, st.integers(0, 6), st.integers(1, 3))
def test_nobody_who_waits_is_dropped_or_forgotten_and_returned_requests_go_first(
    order: str, steps: list[tuple[Any, ...]], most: int, max_seqs: int
) -> None:
    driver = Driver(
        fleet(
            2, max_seqs, blocks=20, admission={"order": order}, max_queued=most,
            queue_timeout=NEVER // 2, max_queued_tokens=1000,
        )
    )  # fmt: skip
    for kind, *values in steps:
        if kind == "submit":
            driver.submit(*values)
        elif kind == "end":
            driver.end(*values)
        elif kind == "fail":
            driver.fail(*values)
        elif kind == "first" and driver.running:
            name = sorted(driver.running)[values[0] % len(driver.running)]
            driver.take(driver.plane.observe(FirstToken(name), driver.now))
        elif kind == "wait":
            driver.now += values[0]
            driver.take(driver.plane.tick(driver.now))
        queue = driver.plane.queue
        assert {each.request.id for each in queue} == driver.queued.keys()
        fresh = [each for each in queue if not each.returned]
        assert queue.quota.requests == len(fresh)
        assert queue.quota.tokens == sum(each.tokens for each in fresh)
        assert len(fresh) <= 2 * most + 3
    for _ in range(len(driver.queued) + len(driver.running)):
        driver.now += 60 * SECOND
        driver.take(driver.plane.tick(driver.now))
        driver.end(0)
    assert not driver.queued, "somebody starved"
    assert driver.plane.admission.capacity.tokens(driver.plane.state).tolist() == [0, 0]


def share(name: str, tokens: int = 1, weight: float = 1.0) -> QueuedRequest:
    share.serial += 1  # type: ignore[attr-defined]
    request = Request(f"{name}{share.serial}", 1, 1, tenant=name)  # type: ignore[attr-defined]
    return QueuedRequest(request, 0, tokens, 0, weight)


share.serial = 0  # type: ignore[attr-defined]


def test_a_flood_leaves_the_others_their_shares_of_the_queue() -> None:
    plane = fleet(max_queued=30, max_inflight=1)
    for number in range(50):
        plane.submit(Request(f"a{number}", 1, 1, tenant="a"), 0)
    assert len(plane.queue) == 30
    found = [plane.submit(Request(f"b{number}", 1, 1, tenant="b"), 0) for number in range(20)]
    assert [isinstance(each, Queue) for each in found] == [True] * 15 + [False] * 5
    assert all(each.tenant for each in found[15:] if isinstance(each, Shed))
    late = plane.submit(Request("late", 1, 1, tenant="a"), 0)
    assert isinstance(late, Shed)
    assert late.tenant
    assert "tenant's share" in late.reason


def test_a_queue_that_one_tenant_filled_alone_is_full_for_the_fleet() -> None:
    plane = fleet(max_queued=2, max_inflight=1)
    found = [plane.submit(Request(f"a{number}", 1, 1, tenant="a"), 0) for number in range(4)]
    assert isinstance(found[-1], Shed)
    assert not found[-1].tenant


def test_shares_of_the_queue_follow_the_weights() -> None:
    plane = fleet(max_queued=40, max_inflight=1, tenant_weights={"b": 3.0})
    for number in range(60):
        plane.submit(Request(f"a{number}", 1, 1, tenant="a"), 0)
    found = [plane.submit(Request(f"b{number}", 1, 1, tenant="b"), 0) for number in range(60)]
    assert sum(isinstance(each, Queue) for each in found) == 30


@pytest.mark.parametrize("order", ["fair", "drf", "karma", "dlpm", "d2lpm", "market"])
def test_made_up_names_share_the_weight_of_all_that_have_none(order: str) -> None:
    weights, credit = {"a": 1.0, "*": 1.0}, {"credit": 0.0} if order == "fair" else {}
    plane = fleet(max_inflight=1, tenant_weights=weights, admission={"order": order} | credit)
    plane.submit(Request("first", 1, 1, tenant="a"), 0)
    for number in range(20):
        plane.submit(Request(f"a{number}", 1, 1, tenant="a"), 0)
        plane.submit(Request(f"x{number}", 1, 1, tenant=f"made-up-{number}"), 0)
    running, served = "first", Counter[str]()
    for now in range(1, 21):
        (route,) = plane.observe(Ended(running, FinishReason.STOP), now)
        assert isinstance(route, Route)
        running = route.request
        served[running[0]] += 1
    assert {waiting.request.account for waiting in plane.queue} == {"a", "*"}
    if order in ("fair", "drf", "market"):
        assert abs(served["a"] - served["x"]) <= 4


def test_one_huge_prompt_counts_as_such_in_the_queue() -> None:
    shares = TenantQuota(TenantActivity(), 1000, 500)
    assert shares.refusal(share("a", 9999)) is None, "an empty queue takes anything"
    shares.add(share("a", 400))
    assert shares.refusal(share("a", 100)) is None
    refusal = shares.refusal(share("a", 101))
    assert refusal is not None
    assert refusal.reason == "the queue is full: 400 of 500 tokens"


@settings(max_examples=examples(200))
@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 50)), max_size=200),
    st.integers(1, 20),
)
def test_all_shares_together_stay_below_twice_the_bound(
    comers: list[tuple[str, int]], most: int
) -> None:
    activity = TenantActivity()
    shares = TenantQuota(activity, most)
    for tenant, tokens in comers:
        one = share(tenant, tokens)
        activity.seen(tenant, 1.0, 0)
        below = shares.queued(tenant)[0] + 1 <= most * activity.part(tenant, 1.0)
        refusal = shares.refusal(one)
        if refusal is None:
            shares.add(one)
        elif below:
            assert shares.requests >= 2 * most
        assert shares.requests <= 2 * most + 6


def test_tenants_share_the_fleet_until_they_have_been_away_for_a_while() -> None:
    activity = TenantActivity()
    activity.seen("a", 1.0, 0)
    activity.seen("b", 3.0, 0)
    assert activity.part("a", 1.0) == 0.25
    activity.seen("a", 1.0, LINGERS + 1)
    assert activity.part("a", 1.0) == 1.0
    assert activity.part("b", 3.0) == 0.75


def test_a_large_request_is_not_overtaken_by_small_ones_that_would_fit() -> None:
    plane = fleet(1, max_seqs=8, max_inflight_tokens=1000)
    assert isinstance(plane.submit(Request("first", 600, 10), 0), Route)
    assert isinstance(plane.submit(Request("large", 500, 10), 0), Queue)
    assert isinstance(plane.submit(Request("small", 10, 10), 0), Queue)
    assert ids(plane.observe(Ended("first", FinishReason.STOP), 1)) == ["large", "small"]


def test_room_is_bounded_by_tokens_of_prompt_and_output() -> None:
    plane = fleet(1, max_seqs=8, blocks=10)  # 160 tokens
    for number in range(4):
        decision = plane.submit(Request(f"r{number}", 30, 10), 0)
        assert isinstance(decision, Route)
    assert isinstance(plane.submit(Request("over", 1, 10), 0), Queue)
    assert plane.admission.capacity.tokens(plane.state)[0] == 160
    report_tokens(plane, [("r0", 15)], 1)
    assert plane.admission.capacity.tokens(plane.state)[0] == 165, "more came than was expected"
    assert ids(plane.observe(Ended("r0", FinishReason.STOP), 1)) == ["over"]


def test_an_empty_worker_takes_what_is_larger_than_its_budget() -> None:
    plane = fleet(1, max_seqs=8, max_inflight_tokens=100)
    assert isinstance(plane.submit(Request("huge", 5000, 10), 0), Route)
    assert isinstance(plane.submit(Request("next", 1, 1), 0), Queue)


def test_a_worker_that_went_takes_its_tokens_along() -> None:
    plane = fleet(1, max_seqs=8, blocks=10)
    request = Request("r", 100, 10)
    plane.submit(request, 0)
    plane.observe(WorkerDown("w0"), 1)
    plane.observe(WorkerUp(Worker("w0", "u", blocks=10)), 2)
    assert isinstance(plane.submit(request, 3), Route)
    plane.observe(Ended("r", FinishReason.STOP), 4)
    assert plane.admission.capacity.tokens(plane.state)[0] == 0


def test_fair_sends_no_prompt_where_others_are_pending() -> None:
    plane = fleet(1, max_seqs=64, admission={"order": "fair"})
    first = [plane.submit(Request(f"r{number}", 1000, 10), 0) for number in range(3)]
    assert [type(each) for each in first] == [Route, Queue, Queue]
    assert ids(plane.observe(FirstToken("r0"), 1)) == ["r1"]
    # The estimates say about a tenth of a second: 60 ms on, the next may follow.
    assert ids(plane.tick(SECOND)) == ["r2"]


def test_fair_waits_for_prefill_workers_instead_of_burdening_decode_workers() -> None:
    plane = ControlPlane(ControlConfig(policy="least-loaded", admission={"order": "fair"}))
    plane.observe(WorkerUp(Worker("p", "u", Role.PREFILL)), 0)
    plane.observe(WorkerUp(Worker("d", "u", Role.DECODE, max_seqs=64)), 0)
    assert isinstance(plane.submit(Request("r0", 2000, 10), 0), Route)
    assert isinstance(plane.submit(Request("r1", 2000, 10), 0), Queue)


def test_a_tenant_above_its_part_leaves_the_reserve_to_others() -> None:
    plane = fleet(
        1, max_seqs=8, admission={"order": "fair", "reserve": 0.25}, prefill_ahead_ms=9999
    )
    plane.submit(Request("b", 1, 10, tenant="b"), 0)
    found = [plane.submit(Request(f"a{number}", 1, 10, tenant="a"), 0) for number in range(8)]
    plane.observe(FirstToken("b"), 0)
    for number in range(8):
        plane.observe(FirstToken(f"a{number}"), 0)
    assert plane.state.columns.decode_requests[0] == 6, found
    assert isinstance(plane.submit(Request("b1", 1, 10, tenant="b"), 0), Route)


def test_a_tenant_alone_may_take_everything() -> None:
    plane = fleet(1, max_seqs=8, admission={"order": "fair"}, prefill_ahead_ms=9999)
    found = [plane.submit(Request(f"a{number}", 1, 10, tenant="a"), 0) for number in range(9)]
    assert [type(each) for each in found] == [Route] * 8 + [Queue]


def test_a_deadline_that_cannot_be_met_is_refused_only_by_edf() -> None:
    for order in ORDERS:
        plane = fleet(admission={"order": order})
        plane.submit(Request("r", 1, 1), 0)
        late = plane.submit(Request("late", 1, 1, deadline=SECOND), 2 * SECOND)
        assert isinstance(late, Shed if order == "edf" else Queue)
        assert isinstance(plane.submit(Request("good", 1, 1, deadline=9 * SECOND), 0), Queue)
        if isinstance(late, Shed):
            assert "after its deadline" in late.reason


@pytest.mark.parametrize("order", ORDERS)
def test_each_step_costs_the_same_however_many_wait(order: str) -> None:
    def seconds(waiting: int) -> float:
        plane = fleet(2, 8, admission={"order": order}, max_queued=waiting, prefill_ahead_ms=10_000)
        running = []
        for number in range(waiting):
            request = Request(f"r{number}", 10, 10, tenant=f"t{number % 5}", priority=number % 3)
            decision = plane.submit(request, 0)
            if isinstance(decision, Route):
                running.append(request.id)
        start = time.process_time()
        for _ in range(200):
            name = running.pop(0)
            plane.observe(FirstToken(name), 1)
            running += ids(plane.observe(Ended(name, FinishReason.STOP), 1))
            plane.tick(1)
        return time.process_time() - start

    pairs = [(seconds(300), seconds(6000)) for _ in range(3)]
    few, many = (min(times) for times in zip(*pairs, strict=True))
    assert many < 8 * few, f"{many:.3f} s with 6,000 waiting, {few:.3f} s with 300"


def test_those_that_exclude_a_worker_do_not_slow_the_others_down() -> None:
    def seconds(excluding: int) -> tuple[float, ControlPlane]:
        plane = fleet(1, max_seqs=4, max_inflight=4)
        for number in range(excluding):
            plane.submit(Request(f"x{number}", 1, 1), 0, frozenset({"w0"}))
        start = time.process_time()
        for number in range(500):
            assert isinstance(plane.submit(Request(f"r{number}", 1, 1), 0), Route)
            plane.observe(Ended(f"r{number}", FinishReason.STOP), 1)
        return time.process_time() - start, plane

    few, _ = min((seconds(4) for _ in range(3)), key=lambda each: each[0])
    many, plane = min((seconds(2000) for _ in range(3)), key=lambda each: each[0])
    assert many < 20 * few, f"{many:.3f} s with 2,000 that exclude it, {few:.3f} s with 4"
    assert ids(plane.tick(2 * SECOND)) == ["x0", "x1", "x2", "x3"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"admission": {"order": "lifo"}}, "'lifo'"),
        ({"tenant_weights": {"a": 0.0}}, "tenant_weights of 'a' is 0.0"),
        ({"max_inflight_tokens": -1}, "max_inflight_tokens is -1"),
        ({"max_queued_tokens": -1}, "max_queued_tokens is -1"),
        ({"prefill_ahead_ms": -1}, "prefill_ahead_ms is -1"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ControlPlane(ControlConfig(**options))


def limited(id: str, *workers: str, tenant: str = "") -> Request:
    return Request(id, 100, 16, tenant=tenant, eligible=frozenset(workers))


@pytest.mark.parametrize("order", ORDERS)
def test_a_request_for_few_workers_lets_others_pass_and_goes_first_when_one_is_free(
    order: str,
) -> None:
    plane = fleet(workers=2, admission={"order": order}, max_queued=4)
    assert plane.submit(limited("a", "w1"), 1).choice.decode == "w1"
    assert isinstance(plane.submit(limited("b", "w1"), 2), Queue)
    assert isinstance(plane.submit(limited("c", "w1"), 3), Queue)
    assert plane.submit(Request("d", 100, 16), 4).choice.decode == "w0"
    assert isinstance(plane.submit(Request("e", 100, 16), 5), Queue)
    assert ids(plane.observe(Ended("d", FinishReason.STOP), 6)) == ["e"]
    assert isinstance(plane.submit(Request("f", 100, 16), 7), Queue)
    assert ids(plane.observe(Ended("a", FinishReason.STOP), 8)) == ["b"], "before a newcomer"
    assert ids(plane.observe(Ended("e", FinishReason.STOP), 9)) == ["f"]
    assert ids(plane.observe(WorkerUp(Worker("w2", "u", max_seqs=1)), 10)) == []
    for number in range(3):
        assert isinstance(plane.submit(limited(f"g{number}", "w1"), 11), Queue)
    assert isinstance(plane.submit(limited("h", "w1"), 12), Shed), "it counts like any other"
    assert ids(plane.observe(Ended("b", FinishReason.STOP), 13)) == ["c"]
    assert len(plane.queue) == 3
