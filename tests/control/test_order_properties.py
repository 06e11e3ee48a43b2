"""What each queue order promises tenants: Pareto, sharing incentive, envy, and lies.

The table of docs/guide/tenants.md, on the orders themselves: one server, one request at a time,
tenants that always wait unless a test says otherwise. `False` is shown by its counterexample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from pigou.control.admission.queue_order import QueuedRequest, load
from pigou.control.admission.usage_prices import FleetRates
from pigou.request import SECOND, Request

ORDERS: dict[str, dict[str, Any]] = {
    "fcfs": {},
    "fair": {"credit": 0.0},
    "priority-fair": {"credit": 0.0},
    "drf": {"credit": 0.0, "claim": "max_tokens", "prefill_tokens_s": 9.0, "output_tokens_s": 18.0},
    "karma": {},
    "dlpm": {"quantum": 20.0},
    "d2lpm": {"quantum": 20.0, "worker_quantum": 20.0},
    "market": {"credit": 0.0, "claim": "max_tokens"},
}
NAMES = list(ORDERS)
PRICES = FleetRates(3.0, 1.0, prefill_s=1.0, output_s=3.0)


@dataclass
class Load:
    """A tenant's tasks, all alike, and how many of them wait."""

    prompt: int = 2
    output: int = 2
    depth: int = 2
    claim: int = 0  # max_tokens; 0: `output`
    priority: int = 0


class Server:
    """One server under an order."""

    def __init__(self, name: str, **params: Any) -> None:
        self.order: Any = load({"order": name, **ORDERS[name], **params})
        self.follows = bool(getattr(self.order, "follows", False))
        if self.follows:
            self.order.reprice(PRICES)
        self.serial = self.now = 0

    def put(self, tenant: str, task: Load) -> QueuedRequest:
        self.serial += 1
        request = Request(
            f"r{self.serial}", task.prompt, task.claim or max(task.output, 1), tenant=tenant,
            priority=task.priority,
        )  # fmt: skip
        one = QueuedRequest(request, self.now, task.prompt, serial=self.serial)
        self.order.add(one)
        return one

    def serve(self, output: dict[str, int], passed: int = SECOND // 100) -> str | None:
        """Serve the first; return its tenant."""
        self.now += passed
        one = self.order.first(self.now)
        if one is None:
            return None
        request = one.request
        if self.follows:
            self.order.began(request, "w", self.now)
        self.order.taken(one, request.prompt)
        if output[request.tenant]:
            self.order.served(request, output[request.tenant])
        if self.follows:
            self.order.ended(request, self.now)
        return str(request.tenant)


def shares(name: str, loads: dict[str, Load], steps: int = 600) -> dict[str, float]:
    """Return the tasks served of tenants that always have `depth` tasks waiting."""
    server, served = Server(name), Counter[str]()
    for tenant, task in loads.items():
        for _ in range(task.depth):
            server.put(tenant, task)
    output = {tenant: task.output for tenant, task in loads.items()}
    for _ in range(steps):
        tenant = server.serve(output)
        assert tenant is not None
        server.put(tenant, loads[tenant])
        served[tenant] += 1
    return {tenant: served[tenant] / steps for tenant in loads}


@pytest.mark.parametrize("name", NAMES)
def test_pareto_no_server_is_idle_while_a_request_waits(name: str) -> None:
    server, rng, waiting = Server(name), Random(1), 0
    for _ in range(300):
        for _ in range(rng.choice((0, 0, 1, 3))):
            server.put(rng.choice("abc"), Load(rng.randrange(1, 9), priority=rng.randrange(3)))
            waiting += 1
        got = server.serve(dict.fromkeys("abc", rng.randrange(4)))
        assert (got is not None) == (waiting > 0)
        waiting -= got is not None


@pytest.mark.parametrize("name", NAMES)
def test_sharing_incentive_a_flood_leaves_a_tenant_its_part(name: str) -> None:
    flood = Load(depth=40, priority=-1)
    part = shares(name, {"victim": Load(), "x": flood, "y": flood})["victim"]
    assert (part >= 1 / 3 - 0.02) == (name not in ("fcfs", "priority-fair"))


#: Service of the tasks of A (1 prompt token, 4 of output) and B (3, 1), as each order counts it.
COUNTED = {
    "drf": (4 / 18, 3 / 9 + 1e-9), "market": (13.0, 6.0), "fcfs": (9.0, 5.0),
    "priority-fair": (9.0, 5.0), "fair": (9.0, 5.0), "karma": (9.0, 5.0), "dlpm": (9.0, 5.0),
    "d2lpm": (9.0, 5.0),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_envy_tenants_that_wait_have_equal_service_as_it_is_counted(name: str) -> None:
    counted = dict(zip("AB", COUNTED[name], strict=True))
    if name == "drf":  # this server prefills and decodes by turns: two resources
        counted = {"A": 1 / 9 + 4 / 18, "B": 3 / 9 + 1 / 18}
    found = shares(name, {"A": Load(1, 4, depth=30, priority=-1), "B": Load(3, 1)})
    service = {tenant: found[tenant] * counted[tenant] for tenant in "AB"}
    equal = abs(service["A"] / max(service["B"], 1e-9) - 1.0) < 0.05
    if name == "drf":
        equal = abs(found["A"] / found["B"] - 1.5) < 0.05
    assert equal == (name not in ("fcfs", "priority-fair"))


@pytest.mark.parametrize("name", NAMES)
def test_strategy_a_claim_of_100_times_the_output_gains_nothing(name: str) -> None:
    honest = shares(name, {"liar": Load(), "other": Load()})["liar"]
    lie = shares(name, {"liar": Load(claim=200), "other": Load()})["liar"]
    assert lie <= honest + 0.01


@pytest.mark.parametrize("name", NAMES)
def test_strategy_a_claim_of_urgency_gains_only_under_priority_fair(name: str) -> None:
    honest = shares(name, {"liar": Load(), "other": Load()})["liar"]
    lie = shares(name, {"liar": Load(priority=-9), "other": Load()})["liar"]
    assert (lie > honest + 0.01) == (name == "priority-fair")


@pytest.mark.parametrize("name", NAMES)
def test_strategy_two_keys_gain_wherever_tenants_have_shares(name: str) -> None:
    """Counterexample to Sybil-proofness: 1/2 becomes 2/3, so weights must be the payer's."""
    loads = {"a": Load(depth=2), "a2": Load(depth=2), "other": Load(depth=4)}
    part = 1.0 - shares(name, loads)["other"]
    assert (part > 0.6) == (name != "fcfs")


#: Demands of three tenants in three periods of a capacity of 96.
TRUE = ((72, 96, 0), (72, 24, 72), (72, 48, 24))


def periods(
    name: str, reported: Sequence[int], demands: Sequence[Sequence[int]] = TRUE, capacity: int = 96,
    **params: Any,
) -> int:  # fmt: skip
    """Return what tenant 0 gets of what it needs, by its reports; a period is a second."""
    server, total = Server(name, output_weight=0.0, **params), 0
    task, output = Load(prompt=1, output=0), dict.fromkeys("012", 0)
    for tenant in "012":
        server.order.remove(server.put(tenant, task))
    for second, (row, own) in enumerate(zip(demands, reported, strict=True)):
        server.now = second * SECOND
        demand = (own, *row[1:])
        waiting = [
            server.put(tenant, task)
            for place in range(capacity)
            for tenant, count in zip("012", demand, strict=True)
            if place < count
        ]
        got = Counter(server.serve(output, SECOND // 1000) for _ in range(capacity))
        server.order.first((second + 1) * SECOND)  # a quantum ends
        for one in waiting:
            server.order.remove(one)
        total += min(got["0"], row[0])
    return total


@pytest.mark.parametrize("name", ["fair", "karma"])
def test_strategy_under_claiming_early_gains_where_unused_service_is_kept(name: str) -> None:
    """Dynamic max-min: reports of 0, 1/2, 3/4 for 3/4 each gain 8%; without credit nothing."""
    kept = {"fair": {"credit": 1e9}, "karma": {"service_s": 96.0, "guaranteed": 0.0}}[name]
    honest, lie = (periods(name, reports, **kept) for reports in ((72,) * 3, (0, 48, 72)))
    assert (honest, lie) == (pytest.approx(100, abs=1), pytest.approx(108, abs=1))


def test_strategy_without_credit_under_claiming_early_gains_nothing() -> None:
    honest, lie = (periods("fair", reports) for reports in ((72,) * 3, (0, 48, 72)))
    assert lie <= honest


def test_strategy_over_claiming_gains_nothing_under_karma() -> None:
    rng, karma = Random(4), {"service_s": 6.0}
    for _ in range(15):
        demands = [tuple(rng.randrange(5) for _ in range(3)) for _ in range(3)]
        true = [row[0] for row in demands]
        honest = periods("karma", true, demands, 6, **karma)
        for second in range(3):
            over = list(true)
            over[second] += 1 + rng.randrange(4)
            assert periods("karma", over, demands, 6, **karma) <= honest + 1  # ties
