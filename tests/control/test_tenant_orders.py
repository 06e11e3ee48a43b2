"""Orders that share between tenants: known answers, charges, and what they refuse."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from pigou.config import ConfigError, ControlConfig
from pigou.control.admission.deficit_orders import Dlpm
from pigou.control.admission.fair_order import TenantOrder
from pigou.control.admission.queue_order import QueuedRequest, load
from pigou.control.admission.tenant_orders import Drf, KarmaOrder, MarketOrder
from pigou.control.admission.usage_prices import FleetRates, KVResidency
from pigou.control.messages import Route, WorkerUp
from pigou.control.plane import ControlPlane
from pigou.request import SECOND, Request, Role, Worker


def order(name: str, **params: Any) -> Any:
    return load({"order": name, **params})


def put(
    where: TenantOrder, tenant: str, prompt: int = 1, *, serial: int, output: int = 0,
    weight: float = 1.0, uncached: int | None = None, now: int = 0, most: int = 1000,
    keys: Any = None,
) -> QueuedRequest:  # fmt: skip
    held = {} if keys is None else {4: np.array(keys, dtype=np.uint64)}
    request = Request(f"r{serial}", prompt, most, tenant=tenant, keys=held)
    one = QueuedRequest(
        request,
        now,
        prompt if uncached is None else uncached,
        output=output,
        weight=weight,
        serial=serial,
    )
    where.add(one)
    return one


def test_dlpm_serves_the_longest_prefix_of_who_has_a_deficit() -> None:
    """Six requests, prefixes p and q, w = 1 and 2, Q = 20: 0 1 3 4 2 5; deficits 0 and -4."""
    dlpm: Dlpm = order("dlpm", quantum=20)
    of_a, of_b = [11, 12], [21]  # blocks of 4 tokens: prefixes of 8 and 4
    sizes = {"a": (10, 2, 3, of_a), "b": (10, 6, 2, of_b)}
    for serial, tenant in enumerate("aaabba"):
        put(dlpm, tenant, sizes[tenant][0], serial=serial, keys=sizes[tenant][3])
    served, cached = [], set[int]()
    while (one := dlpm.first(0)) is not None:
        prompt, new, output, keys = sizes[one.request.tenant]
        dlpm.taken(one, new if set(keys) <= cached else prompt)
        cached |= set(keys)
        dlpm.served(one.request, output)
        served.append(one.serial)
    assert served == [0, 1, 3, 4, 2, 5]
    assert (dlpm.deficit("a"), dlpm.deficit("b")) == (0, -4)


def test_dlpm_prefers_what_a_worker_held_when_the_request_came() -> None:
    dlpm = order("dlpm")
    put(dlpm, "a", 100, serial=0)
    cached = put(dlpm, "b", 100, serial=1, uncached=20)
    assert dlpm.first(0) is cached


def test_dlpm_serves_of_equal_prefixes_who_has_more_left_and_keeps_missed_refills() -> None:
    for credit, kept in ((0.0, -5.0), (1000.0, 15.0)):
        dlpm: Dlpm = order("dlpm", quantum=20, credit=credit)
        early = put(dlpm, "quiet", 25, serial=0)
        for serial in range(1, 6):
            put(dlpm, "flood", 10, serial=serial)
        late = put(dlpm, "quiet", 1, serial=9)
        assert dlpm.first(0) is early  # both have 20: the first
        dlpm.taken(early, 25)
        dlpm.remove(late)
        for _ in range(3):  # the flood is refilled meanwhile
            dlpm.taken(dlpm.first(0), 10)
        put(dlpm, "quiet", 1, serial=10)
        assert dlpm.deficit("quiet") == kept


def test_under_karma_a_burst_of_who_lends_goes_before_guaranteed_parts_that_can_wait() -> None:
    """Capacity 12: f = 6, guaranteed 3: the lender has 9, and the other its 3 last."""
    karma: KarmaOrder = order("karma", service_s=12, output_weight=0)
    for name in ("flood", "quiet"):
        karma.remove(put(karma, name, serial=0))
    for serial in range(1, 40):
        put(karma, "flood", serial=serial)
    for _ in range(12):  # a quantum in which the flood borrows
        karma.taken(karma.first(0), 1)
    for serial in range(40, 60):
        put(karma, "quiet", serial=serial, now=SECOND)
    served = []
    for _ in range(12):
        one = karma.first(SECOND)
        karma.taken(one, 1)
        served.append(one.request.tenant)
    assert served == ["quiet"] * 9 + ["flood"] * 3


def test_karma_lends_and_pays_back_as_published() -> None:
    """Three users, f = 2, alpha = 1/2: the allocations and credits of five quanta."""
    karma: KarmaOrder = order("karma", service_s=6, output_weight=0)
    demands = ((3, 2, 1), (3, 0, 0), (0, 3, 6), (2, 2, 3), (2, 3, 5))
    for name in "ABC":  # all are users from the start
        one = put(karma, name, serial=0)
        karma.remove(one)
    begin = {name: karma.credits(name) for name in "ABC"}
    given, credits, serial = [], [], 0
    for quantum, row in enumerate(demands):
        now = quantum * SECOND
        waiting = [
            put(karma, name, serial=(serial := serial + 1), now=now)
            for name, demand in zip("ABC", row, strict=True)
            for _ in range(demand)
        ]
        served = Counter[str]()
        for _ in range(6):
            one = karma.first(now)
            if one is None:
                break
            karma.taken(one, 1)
            served[one.request.tenant] += 1
        given.append(tuple(served[name] for name in "ABC"))
        # A user that had less than it wanted lends nothing; the rest is not asked for again.
        karma.first((quantum + 1) * SECOND)
        for one in waiting:
            karma.remove(one)
        credits.append([karma.credits(name) - begin[name] for name in "ABC"])
    assert given == [(3, 2, 1), (3, 0, 0), (0, 3, 3), (1, 2, 3), (2, 2, 2)]
    expected = [(5, 6, 7), (4, 8, 9), (6, 7, 8), (7, 7, 7), (7, 7, 7)]
    assert credits == [[value - 6 for value in row] for row in expected]


def backlog(where: TenantOrder, tenants: dict[str, tuple[int, int]], steps: int) -> Counter[str]:
    """Serve one request at a time of tenants that always wait; return requests by tenant."""
    served, serial = Counter[str](), 0
    for tenant, (prompt, output) in tenants.items():
        for _ in range(2):
            put(where, tenant, prompt, serial=(serial := serial + 1), output=output)
    for _ in range(steps):
        one = where.first(0)
        assert one is not None
        tenant = one.request.tenant
        prompt, output = tenants[tenant]
        put(where, tenant, prompt, serial=(serial := serial + 1), output=output)
        where.began(one.request, "w", 0)
        where.taken(one, prompt)
        where.served(one.request, output)
        where.ended(one.request, 0)
        served[tenant] += 1
    return served


CLASSIC = {"prefill_tokens_s": 9.0, "output_tokens_s": 18.0, "credit": 0.0}


def test_drf_gives_the_classic_example_three_tasks_to_two() -> None:
    served = backlog(order("drf", **CLASSIC), {"A": (1, 4), "B": (3, 1)}, 500)
    assert abs(served["A"] / served["B"] - 1.5) < 0.02


def test_drf_where_workers_do_both_adds_prefill_and_decode() -> None:
    served = backlog(order("drf", is_shared=True, **CLASSIC), {"A": (1, 4), "B": (3, 1)}, 700)
    # seconds of a task: A 1/9 + 4/18, B 3/9 + 1/18
    assert abs(served["A"] / served["B"] - (7 / 18) / (6 / 18)) < 0.02


def test_a_claim_beyond_use_is_given_back() -> None:
    """Claims of 4 and 1,000 tokens, both using 4: the same service."""
    drf = order("drf", claim="max_tokens", **CLASSIC)
    counts, serial = Counter[str](), 0
    for _ in range(400):
        for tenant, most in (("honest", 4), ("liar", 1000)):
            put(drf, tenant, 1, serial=(serial := serial + 1), output=4, most=most)
    for _ in range(400):
        one = drf.first(0)
        drf.began(one.request, "w", 0)
        drf.taken(one, 1)
        drf.served(one.request, 4)
        drf.ended(one.request, 0)
        counts[one.request.tenant] += 1
    assert abs(counts["honest"] - counts["liar"]) <= 1


def test_while_it_runs_a_large_claim_holds_its_tenant_back() -> None:
    drf = order("drf", claim="max_tokens", **CLASSIC)
    for serial in range(4):
        put(drf, "liar", 1, serial=serial, most=1000)
        put(drf, "honest", 1, serial=10 + serial, most=4)
    taken = []
    for _ in range(5):
        one = drf.first(0)
        drf.taken(one, 1)
        taken.append(one.request.tenant)
    assert taken == ["liar", *["honest"] * 4]


@pytest.mark.parametrize("name", ["drf", "market"])
def test_kv_that_is_held_costs_while_others_wait(name: str) -> None:
    """Two tenants use the same tokens; one holds its KV ten seconds longer, and goes last."""
    where = order(name, credit=0.0)
    where.reprice(FleetRates(1e3, 1e3, 1e3, False, 1e-3, 1e-3, 1e-3))
    firsts = [put(where, tenant, 100, serial=n) for n, tenant in enumerate(("slow", "quick"))]
    for tenant in ("slow", "quick"):
        for n in range(2):
            put(where, tenant, 100, serial=10 + n)
    for one in firsts:
        where.began(one.request, "w", 0)
        where.taken(one, 100)
    where.ended(firsts[1].request, SECOND)
    assert where.first(11 * SECOND).request.tenant == "quick"
    assert where.kv_token_ms("slow") == 1_100_000
    assert where.kv_token_ms("quick") == 100_000


def test_a_shared_prefix_costs_each_of_its_holders_a_part() -> None:
    keys = {16: np.arange(1, 65, dtype=np.uint64)}  # 1,024 tokens
    held = KVResidency()
    held.began(Request("a", 1024, 1, tenant="a", keys=keys), "w", 0)
    held.began(Request("b", 1034, 1, tenant="b", keys=keys), "w", SECOND)
    held.began(Request("c", 1024, 1, tenant="b", keys=keys), "other", SECOND)
    held.ended("b", 3 * SECOND)
    held.ended("a", 4 * SECOND)
    assert held.token_s("a", 9 * SECOND) == 1024 + 2 * 512 + 1024
    assert held.token_s("b", 3 * SECOND) == 2 * (512 + 10) + 2 * 1024
    held.ended("c", 4 * SECOND)
    assert held.token_s("b", 9 * SECOND) == held.token_s("b", 4 * SECOND)


def test_requests_of_one_tenant_hold_a_common_prefix_once() -> None:
    keys = {16: np.arange(1, 17, dtype=np.uint64)}
    held = KVResidency()
    for name in "xyz":
        held.began(Request(name, 256, 1, tenant="a", keys=keys), "w", 0)
    assert held.token_s("a", SECOND) == 256
    held.ended("x", SECOND)
    held.ended("y", SECOND)
    assert held.token_s("a", 2 * SECOND) == 512


def test_market_spends_budgets_by_weight_at_the_prices_of_the_moment() -> None:
    market: MarketOrder = order("market", credit=0.0)
    market.reprice(FleetRates(1.0, 1.0, prefill_s=1.0, output_s=10.0))
    served = backlog(market, {"prompts": (100, 1), "tokens": (10, 10)}, 600)
    assert abs(served["prompts"] / served["tokens"] - 1.0) < 0.02  # 110 credits each
    market = order("market", credit=0.0)
    market.reprice(FleetRates(1.0, 1.0, prefill_s=1.0, output_s=1.0))
    served = backlog(market, {"prompts": (100, 1), "tokens": (10, 10)}, 600)
    assert abs(served["tokens"] / served["prompts"] - 101 / 20) < 0.2


def test_market_debts_of_an_idle_fleet_are_bounded_by_the_credit() -> None:
    market: MarketOrder = order("market", credit=5.0)
    market.reprice(FleetRates(1.0, 1.0, prefill_s=1.0, output_s=1.0))
    alone = put(market, "a", 1000, serial=0)
    market.taken(alone, 1000)
    assert market.counter("a") == 5.0


@pytest.mark.parametrize(
    ("chosen", "field"),
    [
        ({"order": "karma", "guaranteed": 1.5}, "guaranteed"),
        ({"order": "dlpm", "quantum": 0}, "quantum"),
        ({"order": "dlpm", "within": "edf"}, "within"),
        ({"order": "drf", "claim": "all"}, "claim"),
        ({"order": "market", "alpha": 1}, "alpha"),
    ],
)
def test_what_an_order_cannot_take_is_named(chosen: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        load(chosen)


def test_every_order_forgets_requests_that_are_removed() -> None:
    for name in ("drf", "karma", "dlpm", "d2lpm", "market"):
        where = order(name)
        kept = put(where, "a", serial=0, keys=[1])
        gone = put(where, "b", serial=1, keys=[2])
        where.remove(gone)
        assert where.first(0) is kept
        where.remove(kept)
        assert where.first(0) is None


def test_drf_shares_are_those_of_the_weights() -> None:
    drf: Drf = order("drf", **CLASSIC)
    counts, serial = Counter[str](), 0
    for _ in range(600):
        for tenant, weight in (("one", 1.0), ("three", 3.0)):
            put(drf, tenant, 9, serial=(serial := serial + 1), weight=weight)
    for _ in range(600):
        one = drf.first(0)
        drf.taken(one, 9)
        counts[one.request.tenant] += 1
    assert abs(counts["three"] / counts["one"] - 3.0) < 0.05


def test_market_prices_a_second_of_the_fleet_at_a_credit() -> None:
    market: MarketOrder = order("market")
    for level in (1.0, 60.0):  # idle, and with the tolls of full workers
        market.reprice(FleetRates(1000.0, 50.0, prefill_s=level * 1e-3, output_s=level * 1e-2))
        prompt, output = market.token_charges
        assert (1000 * prompt + 50 * output) / 2 == pytest.approx(1.0)
        assert output == pytest.approx(10 * prompt)


def test_who_owes_is_not_forgotten_among_many_tenants() -> None:
    for name in ("karma", "dlpm", "d2lpm"):
        where = order(name)
        for serial in range(3):
            where.taken(put(where, "debtor", 900, serial=serial), 900)
        for serial in range(1100):
            where.remove(put(where, f"t{serial}", serial=10 + serial))
        owed = where.credits("debtor") if name == "karma" else where.deficit("debtor")
        assert owed == -2700


@pytest.mark.parametrize("order", ["drf", "market"])
def test_a_fleet_of_prefill_and_decode_workers_has_prices(order: str) -> None:
    plane = ControlPlane(ControlConfig(admission={"order": order}))
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE), ("e", Role.DECODE)):
        plane.observe(WorkerUp(Worker(name, "u", role, blocks=64, max_seqs=4)), 0)
    plane.tick(SECOND)
    assert isinstance(plane.submit(Request("a", 1, 1), SECOND), Route)


@pytest.mark.parametrize("name", ["drf", "market"])
def test_use_that_nobody_waited_for_is_a_debt_of_at_most_the_credit(name: str) -> None:
    made = order(name, credit=1.0)
    before = made.counter("a")
    made.taken(put(made, "a", 1000, serial=0), 1000)
    small = made.counter("a")
    assert before < small < 1.0
    made.taken(put(made, "a", 10**6, serial=1), 10**6)
    assert made.counter("a") == pytest.approx(1.0)
