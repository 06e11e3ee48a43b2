"""Fair sharing: the published bound on service, weights, and what idle tenants earn."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.control.admission import fair_order
from pigou.control.admission.fair_order import Fair, FairParams
from pigou.control.admission.queue_order import QueuedRequest
from pigou.request import Request

W_P, W_Q = 1.0, 2.0


class Server:
    """A server of so many slots under `Fair`, with all that the bound speaks of."""

    def __init__(self, slots: int, weights: dict[str, float], credit: float) -> None:
        self.order = Fair(FairParams(input_weight=W_P, output_weight=W_Q, credit=credit))
        self.slots, self.weights = slots, weights
        self.waiting = dict.fromkeys(weights, 0)
        self.running: list[tuple[Request, int]] = []
        self.service = dict.fromkeys(weights, 0.0)
        self.serial = 0
        self.most = 0
        self.longest = 0

    def come(self, tenant: str, prompt: int, output: int) -> None:
        request = Request(f"r{self.serial}", prompt, output, tenant=tenant)
        one = QueuedRequest(request, 0, prompt, weight=self.weights[tenant], serial=self.serial)
        self.serial += 1
        self.waiting[tenant] += 1
        self.longest = max(self.longest, prompt)
        self.order.add(one)
        self.fill()

    def fill(self) -> None:
        while len(self.running) < self.slots and (one := self.order.first(0)) is not None:
            self.order.taken(one, one.uncached)
            self.waiting[one.request.tenant] -= 1
            self.service[one.request.tenant] += W_P * one.uncached
            self.running.append((one.request, one.request.max_tokens))
            held = sum(request.prompt + request.max_tokens for request, _ in self.running)
            self.most = max(self.most, held)

    def step(self, place: int, tokens: int) -> None:
        if not self.running:
            return
        request, left = self.running.pop(place % len(self.running))
        tokens = min(tokens, left)
        self.order.served(request, tokens)
        self.service[request.tenant] += W_Q * tokens
        if left > tokens:
            self.running.append((request, left - tokens))
        self.fill()

    def shares(self) -> dict[str, float]:
        return {name: self.service[name] / self.weights[name] for name in self.weights}

    def bound(self, credit: float) -> float:
        least = min(self.weights.values())
        return 2 * max(W_P * self.longest, W_Q * self.most) / least + credit


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.sampled_from("abc"), st.integers(1, 60), st.integers(1, 40)),
        st.tuples(st.just("step"), st.integers(0, 9), st.integers(1, 20), st.just(0)),
    ),
    max_size=150,
)


@settings(max_examples=examples(300))
@given(
    STEPS,
    st.integers(1, 4),
    st.fixed_dictionaries(dict.fromkeys("abc", st.sampled_from([1.0, 1.0, 2.0, 5.0]))),
    st.sampled_from([0.0, 0.0, 50.0, 500.0]),
)
def test_tenants_that_both_wait_differ_by_no_more_than_the_published_bound(
    steps: list[tuple[Any, ...]], slots: int, weights: dict[str, float], credit: float
) -> None:
    server = Server(slots, weights, credit)
    since: dict[tuple[str, str], list[float]] = {}
    for kind, *values in steps:
        if kind == "come":
            server.come(*values)
        else:
            server.step(*values[:2])
        have = server.shares()
        for pair in (("a", "b"), ("a", "c"), ("b", "c")):
            if not all(server.waiting[name] for name in pair):
                since.pop(pair, None)
                continue
            gaps = since.setdefault(pair, [])
            gaps.append(have[pair[0]] - have[pair[1]])
            assert max(gaps) - min(gaps) <= server.bound(credit) + 1e-6


def backlog(server: Server, tenant: str, count: int, prompt: int, output: int) -> None:
    for _ in range(count):
        server.come(tenant, prompt, output)


def test_service_is_shared_by_weight_whatever_the_requests_look_like() -> None:
    server = Server(4, {"a": 1.0, "b": 3.0}, 0.0)
    backlog(server, "a", 3000, 10, 40)
    backlog(server, "b", 3000, 100, 5)
    for place in range(10_000):
        server.step(place, 7)
    assert all(server.waiting.values())
    assert 2.9 < server.service["b"] / server.service["a"] < 3.1


def test_a_tenant_that_sent_nothing_earns_no_more_than_the_credit() -> None:
    for credit in (0.0, 300.0):
        server = Server(1, {"a": 1.0, "b": 1.0}, credit)
        backlog(server, "a", 500, 10, 1)
        for _ in range(200):
            server.step(0, 1)
        before = dict(server.service)
        backlog(server, "b", 500, 10, 1)
        for _ in range(100):
            server.step(0, 1)
        ahead = (server.service["b"] - before["b"]) - (server.service["a"] - before["a"])
        assert abs(ahead - credit) <= server.bound(0.0)


def test_credit_does_not_add_up_over_tenants_that_come_one_after_another() -> None:
    order = Fair(FairParams(credit=100.0))
    for number in range(50):
        tenant = f"t{number}"
        request = Request(f"r{number}", 1, 1, tenant=tenant)
        order.add(QueuedRequest(request, 0, 1, serial=number))
        assert order.counter(tenant) >= -100.0


def test_output_tokens_weigh_twice_those_of_prompts() -> None:
    order = Fair(FairParams(credit=0.0))
    request = Request("r", 10, 8, tenant="a")
    one = QueuedRequest(request, 0, 10, weight=2.0)
    order.add(one)
    order.add(QueuedRequest(Request("s", 1, 1, tenant="b"), 0, 1, serial=1))
    order.taken(one, 6)
    assert order.counter("a") == 6 / 2.0
    order.served(request, 3)
    assert order.counter("a") == (6 + 2 * 3) / 2.0


def test_tenants_that_owe_nothing_are_forgotten_and_lose_nothing() -> None:
    order = Fair(FairParams(credit=0.0))
    for number in range(3 * fair_order._MAX_TENANTS):
        request = Request(f"r{number}", 10, 8, tenant=f"t{number}")
        one = QueuedRequest(request, 0, 10, serial=number)
        order.add(one)
        order.taken(one, 10)
    assert len(order._tenants) <= 2 * fair_order._MAX_TENANTS
    last = order.counter(f"t{number}")
    order.add(QueuedRequest(Request("old", 1, 1, tenant="t0"), 0, 1, serial=number + 1))
    assert order.counter("t0") >= last


def test_what_a_tenant_had_while_nobody_waited_is_not_held_against_it() -> None:
    order = Fair(FairParams(credit=0.0))
    request = Request("r", 10, 8, tenant="a")
    one = QueuedRequest(request, 0, 10)
    order.add(one)
    order.taken(one, 1000)
    order.served(request, 1000)
    assert order.counter("a") == 0.0


def test_only_who_had_less_than_another_by_half_the_credit_is_behind() -> None:
    order = Fair(FairParams(credit=100.0))
    calls = {name: QueuedRequest(Request(name, 1, 1, tenant=name), 0, 1) for name in "ab"}
    order.add(calls["b"])
    for tokens, behind in ((25, False), (1, True)):  # each counts twice
        order.served(Request("r", 1, 1, tenant="a"), tokens)
        assert order.underserved(calls["b"]) is behind
        assert not order.underserved(calls["a"])
    published = Fair(FairParams(credit=0.0))
    published.add(calls["b"])
    published.served(Request("r", 1, 1, tenant="a"), 10_000)
    assert not published.underserved(calls["b"])
