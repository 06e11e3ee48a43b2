"""Laws of what gateways tell one another, and of what enters their control planes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.config import ControlConfig
from pigou.control.journal import JournalEntry, JournalRecorder, decode, encode, replay_call
from pigou.control.messages import Ended, FirstToken, PeerReport, Queue, Route, WorkerDown, WorkerUp
from pigou.control.peers.bookings import (
    COLUMNS,
    STREAMS,
    PeerState,
    PredictedPrompt,
    ResendRequest,
    TenantService,
    WorkerBookings,
)
from pigou.control.peers.sync import (
    BUFFERED,
    HEARTBEAT_NS,
    LEASE_NS,
    PeerPublisher,
    PeerReceiver,
    own_bookings,
)
from pigou.control.plane import ControlPlane
from pigou.request import SECOND, FinishReason, Request, Worker

WORKERS = 3


class GatewayNode:
    """A control plane with what it tells others, and hears from them."""

    def __init__(self, name: str, workers: int = WORKERS, **config: Any) -> None:
        self.plane = ControlPlane(ControlConfig(**{"policy": "least-loaded"} | config))
        for number in range(workers):
            self.plane.observe(WorkerUp(Worker(f"w{number}", "", max_seqs=4)), 0)
        self.publisher = PeerPublisher(name, self.plane)
        self.receiver = PeerReceiver(self.publisher)
        self.running: list[str] = []
        self.serial, self.now, self.served = 0, 1, 0

    def submit(self, prompt: int = 100, tenant: str = "") -> Route | None:
        self.serial += 1
        name = f"{self.publisher.gateway}.{self.serial}"
        request = Request(name, prompt, 8, arrival=self.now, tenant=tenant)
        return self.take([self.plane.submit(request, self.now)])

    def take(self, decisions: Any) -> Route | None:
        routes = [decision for decision in decisions if isinstance(decision, Route)]
        self.running += [route.request for route in routes]
        return routes[0] if routes else None

    def end(self, number: int = 0) -> None:
        if self.running:
            name = self.running.pop(number % len(self.running))
            self.served += 1
            self.plane.observe(FirstToken(name), self.now)
            self.take(self.plane.observe(Ended(name, FinishReason.STOP), self.now))

    def publish(self) -> list[PeerState]:
        state = self.publisher.changes(self.now, self.receiver.heard(self.now))
        return [] if state is None else [state]

    def hear(self, states: list[PeerState]) -> list[ResendRequest]:
        asked = []
        for state in states:
            observation, request = self.receiver.receive(state, self.now)
            if observation is not None:
                self.take(self.plane.observe(observation, self.now))
            asked += [] if request is None else [request]
        return asked


def exchange(*nodes: GatewayNode, tenants: bool = True) -> None:
    """Let each hear all that the others have to say, at once; of tenants where that is asked."""
    for node in nodes:
        for state in node.publish():
            heard = state if tenants else PeerState(state.gateway, state.seq, state.workers)
            for other in nodes:
                if other is not node:
                    other.hear([heard])


def booked(node: GatewayNode) -> list[list[int]]:
    """What all other gateways have on the workers, as `node` knows it."""
    return node.plane.state.peers.total[:COLUMNS].tolist()


ACTIONS = st.lists(st.tuples(st.sampled_from("sse"), st.integers(1, 500)), min_size=1, max_size=20)


@given(ACTIONS, st.randoms(use_true_random=False), st.floats(0.0, 0.9))
@settings(max_examples=examples(25))
def test_order_repetition_and_loss_do_not_matter_once_gaps_are_filled(
    actions: list[tuple[str, int]], random: Any, loss: float
) -> None:
    sender, hearer = GatewayNode("a"), GatewayNode("b")
    sent: list[PeerState] = []
    for kind, number in actions:
        if kind == "s":
            sender.submit(number)
        else:
            sender.end(number)
        sent += sender.publish()
    arrives = [state for state in sent[:-1] if random.random() >= loss] + sent[-1:]
    arrives += [state for state in arrives if random.random() < 0.3]
    random.shuffle(arrives)
    asked = hearer.hear(arrives)
    for _ in range(4):
        answers = [state for request in asked for state in sender.publisher.answer(request)]
        hearer.now += SECOND
        asked = hearer.hear(answers)
        asked += hearer.receiver.tick(hearer.now)[1]
    assert booked(hearer) == own_bookings(sender.plane)[:COLUMNS].tolist()
    assert not asked


@given(ACTIONS, ACTIONS)
@settings(max_examples=examples(15))
def test_columns_are_the_sum_over_the_gateways_and_the_own_part_alone_once_one_is_gone(
    first: list[tuple[str, int]], second: list[tuple[str, int]]
) -> None:
    a, b = GatewayNode("a"), GatewayNode("b")
    for node, actions in ((a, first), (b, second)):
        for kind, number in actions:
            if kind == "s":
                node.submit(number)
            else:
                node.end(number)
            exchange(a, b)
    own = own_bookings(a.plane)[:COLUMNS]
    assert booked(a) == own_bookings(b.plane)[:COLUMNS].tolist()
    assert (a.plane.state.columns.decode_requests == (own + booked(a))[STREAMS]).all()
    a.now += LEASE_NS + 1
    for gone in a.receiver.tick(a.now)[0]:
        a.plane.observe(gone, a.now)
    assert not np.array(booked(a)).any()
    assert (a.plane.state.columns.decode_requests == own[STREAMS]).all()
    assert a.plane.state.peers.streams == 0


@given(ACTIONS, st.integers(0, 50), st.floats(0.0, 3.0))
@settings(max_examples=examples(20))
def test_what_is_old_counts_less_and_its_sum_and_parts_stay(
    actions: list[tuple[str, int]], unseen: int, lag_s: float
) -> None:
    a, b = GatewayNode("a"), GatewayNode("b")
    for number, (kind, tokens) in enumerate(actions):
        node = (a, b)[number % 2]
        if kind == "s":
            node.submit(tokens)
        else:
            node.end(tokens)
        for state in a.publish():
            report, _ = b.receiver.receive(state, b.now)
            b.plane.state.peers.set_weights(lag_s, unseen, 0.1, 1.0)
            if isinstance(report, PeerReport):
                b.plane.tracker.book("a", report.workers, b.now)
    columns, own = b.plane.state.columns, own_bookings(b.plane)[:COLUMNS]
    known = np.array(booked(b))
    assert (known >= 0).all()
    assert (own >= 0).all(), "what is booked of others is never taken off the own"
    assert (columns.pending_prefill_tokens <= columns.decode_tokens).all()
    assert (columns.decoding <= columns.decode_requests).all()
    whole = own_bookings(a.plane)[STREAMS].sum()
    assert abs(known[STREAMS].sum() - whole) <= WORKERS / 2, "but for rounding"
    if not (unseen or lag_s):
        assert known.tolist() == own_bookings(a.plane)[:COLUMNS].tolist()


def test_two_gateways_that_hear_one_another_spread_requests_as_one_does() -> None:
    nodes = [GatewayNode("a"), GatewayNode("b")]
    for number in range(9):
        nodes[number % 2].submit()
        exchange(*nodes)
    assert nodes[0].plane.state.columns.decode_requests.tolist() == [3, 3, 3]
    assert nodes[1].plane.state.columns.decode_requests.tolist() == [3, 3, 3]


def test_no_gateway_takes_the_places_that_another_has_taken() -> None:
    a, b = GatewayNode("a", 1), GatewayNode("b", 1)
    for _ in range(3):
        a.submit()
    exchange(a, b)
    assert b.submit() is not None
    exchange(a, b)
    assert a.submit() is None, "the worker runs four"
    b.end()
    exchange(a, b)
    assert len(a.running) == 4, "the queued one goes once the place is known to be free"


def test_what_is_beyond_the_buffer_comes_as_a_snapshot() -> None:
    a, b = GatewayNode("a"), GatewayNode("b")
    b.hear(a.publish())
    for _ in range(BUFFERED + 2):
        a.submit()
        a.end()
        a.publish()
    a.submit(300)
    (request,) = b.hear(a.publish())
    (answer,) = a.publisher.answer(request)
    assert answer.snapshot
    assert b.hear([answer]) == []
    assert booked(b) == own_bookings(a.plane)[:COLUMNS].tolist()
    assert (b.receiver.gaps, b.receiver.snapshots) == (1, 1)


def test_a_new_gateway_serves_before_it_has_heard_of_the_others() -> None:
    a, b = GatewayNode("a"), GatewayNode("b")
    for _ in range(5):
        a.submit()
        exchange(a)
    assert b.submit() is not None
    assert b.hear(a.publisher.answer(b.receiver.hello())) == []
    assert booked(b) == own_bookings(a.plane)[:COLUMNS].tolist()


def test_the_lag_of_a_gateway_that_joins_is_not_the_age_of_the_others() -> None:
    a, b = GatewayNode("a"), GatewayNode("b")
    a.publish()
    a.now = b.now = 3600 * SECOND
    a.hear(b.publish())
    assert a.receiver.lag_ns == 0
    a.now += SECOND
    b.submit()
    a.hear(b.publish())
    assert a.receiver.lag_ns == SECOND // 2, "so old at most, as nothing was answered since"
    b.hear(a.publish())
    b.submit()
    a.hear(b.publish())
    assert a.receiver.lag_ns <= 1


def test_a_gateway_that_leaves_weighs_on_nobody_at_once() -> None:
    a, b = GatewayNode("a"), GatewayNode("b")
    a.submit()
    exchange(a, b)
    b.hear([a.publisher.farewell()])
    assert not np.array(booked(b)).any()


def test_silence_is_broken_by_heartbeats_alone() -> None:
    a = GatewayNode("a")
    assert a.publish()
    assert not a.publish()
    a.now += HEARTBEAT_NS
    assert a.publish()


def test_what_others_have_on_a_worker_counts_from_its_start_on() -> None:
    a, b = GatewayNode("a"), GatewayNode("b", 0)
    a.submit()
    exchange(a, b)
    for number in range(WORKERS):
        b.plane.observe(WorkerUp(Worker(f"w{number}", "")), b.now)
    assert b.plane.state.columns.decode_requests.sum() == 1
    b.plane.observe(WorkerDown("w0"), b.now)
    b.plane.observe(WorkerDown("w1"), b.now)
    b.plane.observe(WorkerDown("w2"), b.now)
    assert b.plane.state.peers.streams == 0


def test_a_drain_waits_for_the_own_requests_alone() -> None:
    a, b = GatewayNode("a", 1), GatewayNode("b", 1)
    a.submit()
    exchange(a, b)
    assert b.plane.state.is_drained("w0")
    assert not a.plane.state.is_drained("w0")


def test_a_prompt_that_another_gateway_sent_is_expected_where_no_events_come() -> None:
    keys = np.arange(1, 9, dtype=np.uint64)
    b = GatewayNode("b", 0)
    b.plane.observe(WorkerUp(Worker("w0", "", events=False)), 0)
    b.plane.observe(WorkerUp(Worker("w1", "")), 0)
    prompts = (PredictedPrompt("w0", keys), PredictedPrompt("w1", keys))
    b.plane.observe(PeerReport("a", prompts=prompts), 1)
    assert b.plane.index.overlap("w0", keys) == 8
    assert b.plane.index.overlap("w1", keys) == 0


FAIR = {"admission": {"order": "fair", "credit": 400.0}, "prefill_ahead_ms": 60_000}


def share_of_the_first(hears_service: bool) -> float:
    """Return the share of the requests that gateway A serves, which has most places at first."""
    a, b = GatewayNode("a", 1, **FAIR), GatewayNode("b", 1, **FAIR)
    for node, tenant, first in ((a, "x", 3), (b, "y", 1)):
        for _ in range(first):
            node.submit(100, tenant)
            exchange(a, b, tenants=hears_service)
    for node, tenant in ((a, "x"), (b, "y")):
        for _ in range(300):
            node.submit(100, tenant)
    for _ in range(60):
        for node in (a, b):
            node.now += SECOND // 10
            for _ in list(node.running):
                node.end()
            node.take(node.plane.tick(node.now))
            exchange(a, b, tenants=hears_service)
    return a.served / (a.served + b.served)


def test_fair_shares_hold_although_one_gateway_has_most_places_at_first() -> None:
    assert share_of_the_first(hears_service=True) == pytest.approx(0.5, abs=0.05)
    assert share_of_the_first(hears_service=False) > 0.6, "else the test says nothing"


def test_a_tenant_is_charged_for_what_it_had_elsewhere() -> None:
    node = GatewayNode("b", 1, **FAIR)
    for _ in range(4):
        node.submit(1, "z")
    for tenant in ("x", "y"):
        assert node.submit(1, tenant) is None
    node.plane.observe(PeerReport("a", tenants=(TenantService("x", 10, 10),)), 1)
    node.plane.observe(PeerReport("a", tenants=(TenantService("x", 2000, 500),)), 2)
    order = node.plane.queue.order
    assert order.counter("x") - order.counter("y") == pytest.approx(1990 + 2 * 490)
    node.end()
    assert node.plane.state.requests[node.running[-1]].request.tenant == "y"


def test_reports_of_other_gateways_replay_from_a_journal() -> None:
    entries: list[bytes] = []
    first = GatewayNode("b")
    recorder = JournalRecorder(first.plane, lambda entry: entries.append(encode(entry)))
    for number in range(6):
        report = PeerReport("a", (WorkerBookings("w0", decode_requests=number, decoding=number),))
        recorder.observe(report, number)
        recorder.submit(Request(f"r{number}", 10, 8), number)
    second = GatewayNode("b").plane
    for line in entries:
        entry = decode(line)
        assert isinstance(entry, JournalEntry)
        assert replay_call(second, entry) == (entry.out, "")
    assert second.state.columns.decode_requests.tolist() == [5, 3, 3]


def test_each_number_is_booked_where_the_policies_see_it() -> None:
    node = GatewayNode("b", 1)
    counts = {name: index + 1 for index, name in enumerate(WorkerBookings.__struct_fields__[1:])}
    node.plane.observe(PeerReport("a", (WorkerBookings("w0", **counts),)), 1)
    columns = node.plane.state.columns
    assert [getattr(columns, name).item(0) for name in list(counts)[:COLUMNS]] == list(
        counts.values()
    )[:COLUMNS]
    assert node.plane.state.background == counts["background_requests"]
    capacity = node.plane.admission.capacity
    expected = counts["expected_tokens"] + counts["over_expected_tokens"]
    assert capacity.tokens(node.plane.state).tolist() == [expected]


def test_a_request_waits_while_tokens_of_other_gateways_fill_a_worker() -> None:
    node = GatewayNode("b", 1, max_inflight_tokens=1000)
    booking = WorkerBookings("w0", decode_requests=1, decode_tokens=950, expected_tokens=950)
    node.plane.observe(PeerReport("a", (booking,)), 1)
    decision = node.plane.submit(Request("r", 100, 8), 2)
    assert isinstance(decision, Queue)


def test_staleness_is_the_age_of_the_last_word_and_how_long_it_took() -> None:
    ours, theirs = GatewayNode("a"), GatewayNode("b")
    assert ours.receiver.staleness_ns(5) == 0
    state = theirs.publisher.changes(10, {})
    assert state is not None
    ours.receiver.receive(state, 30)
    assert ours.receiver.staleness_ns(30 + HEARTBEAT_NS) >= HEARTBEAT_NS


@pytest.mark.parametrize("order", ["fair", "drf", "karma", "dlpm", "d2lpm", "market"])
def test_service_at_another_gateway_counts_in_every_order_of_shares(order: str) -> None:
    """Two tenants wait here; the one that another gateway served goes second."""
    node = GatewayNode("a", workers=1, admission={"order": order}, max_inflight=1)
    node.submit(tenant="first")
    for tenant in ("served", "new"):
        for _ in range(2):
            node.submit(tenant=tenant)
    for prompt_tokens in (0, 500_000):
        services = (TenantService("served", prompt_tokens, streams=1),)
        node.plane.observe(PeerReport("b", (), services), node.now)
    first = node.plane.queue.next(node.now)
    assert first is not None
    assert first.request.tenant == "new"
