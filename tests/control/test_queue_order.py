"""Laws of the orders: who of the waiting goes next."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.config import ConfigError
from pigou.control.admission.queue_order import Heap, QueuedRequest, QueueOrder, load
from pigou.request import NEVER, SECOND, Request

ORDERS = ["fcfs", "priority", "edf", "shortest", "shortest-remaining", "fair", "priority-fair"]
MILLI = SECOND // 1000


def waiting(serial: int, since: int = 0, uncached: int = 1, **fields: Any) -> QueuedRequest:
    request = Request(f"r{serial}", max(1, uncached), 8, **fields)
    return QueuedRequest(request, since, uncached, serial=serial)


#: Milliseconds until the next comes, its uncached tokens, priority, deadline after arrival, tenant.
COMERS = st.lists(
    st.tuples(
        st.integers(0, 2000),
        st.integers(1, 5000),
        st.integers(-2, 2),
        st.one_of(st.none(), st.integers(0, 20_000)),
        st.sampled_from("abc"),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=40,
)


def play(
    order: QueueOrder, comers: list[tuple[Any, ...]]
) -> list[tuple[QueuedRequest, int, tuple[QueuedRequest, ...]]]:
    """Let them come, and after each one serve so many; return who went, when, and who waited on."""
    now, came, went = 0, [], []

    def serve() -> None:
        found = order.first(now)
        if found is not None:
            assert found in came
            order.taken(found, found.uncached)
            came.remove(found)
            went.append((found, now, tuple(came)))

    for serial, (gap, uncached, priority, patience, tenant, served) in enumerate(comers):
        now += gap * MILLI
        deadline = NEVER if patience is None else now + patience * MILLI
        one = waiting(serial, now, uncached, priority=priority, deadline=deadline, tenant=tenant)
        order.add(one)
        came.append(one)
        for _ in range(served):
            serve()
    while came:
        before = len(came)
        serve()
        assert len(came) == before - 1, "somebody waits, and nobody is first"
    assert order.first(now) is None
    return went


@settings(max_examples=examples(100))
@given(st.sampled_from(ORDERS), COMERS)
def test_everybody_goes_once(name: str, comers: list[tuple[Any, ...]]) -> None:
    went = [one.serial for one, _, _ in play(load({"order": name}), comers)]
    assert sorted(went) == list(range(len(comers)))


@settings(max_examples=examples(100))
@given(st.sampled_from(ORDERS), COMERS, st.data())
def test_whoever_is_removed_is_never_first(
    name: str, comers: list[tuple[Any, ...]], data: st.DataObject
) -> None:
    order = load({"order": name})
    came = []
    for serial, (_, uncached, priority, _, tenant, _) in enumerate(comers):
        came.append(waiting(serial, 0, uncached, priority=priority, tenant=tenant))
        order.add(came[-1])
    gone = data.draw(st.sets(st.sampled_from(came)))
    for one in gone:
        order.remove(one)
    seen = set()
    while (found := order.first(0)) is not None:
        order.taken(found, 1)
        seen.add(found)
    assert seen == set(came) - gone


@given(COMERS)
def test_fcfs_serves_in_the_order_of_arrival(comers: list[tuple[Any, ...]]) -> None:
    went = [one.serial for one, _, _ in play(load({"order": "fcfs"}), comers)]
    assert went == sorted(went)


@given(COMERS)
def test_priority_serves_the_lowest_first_and_fcfs_within(comers: list[tuple[Any, ...]]) -> None:
    for one, _, others in play(load({"order": "priority"}), comers):
        for other in others:
            assert (one.request.priority, one.serial) < (other.request.priority, other.serial)


def overtakings(
    went: list[tuple[QueuedRequest, int, tuple[QueuedRequest, ...]]],
) -> list[tuple[QueuedRequest, QueuedRequest]]:
    """Return (who went, who had come before and waited on) of all pairs."""
    return [
        (one, other) for one, _, others in went for other in others if other.serial < one.serial
    ]


@settings(max_examples=examples(200))
@given(COMERS, st.integers(1, 3000))
def test_with_ageing_nobody_is_overtaken_by_whoever_comes_later_than_its_bound(
    comers: list[tuple[Any, ...]], ageing: int
) -> None:
    for one, other in overtakings(play(load({"order": "shortest", "ageing": ageing}), comers)):
        shorter = other.uncached - one.uncached
        assert shorter > 0
        assert (one.since - other.since) * ageing <= shorter * SECOND


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30, unique=True))
def test_of_those_that_come_together_the_shortest_goes_first(sizes: list[int]) -> None:
    order = load({"order": "shortest"})
    for serial, size in enumerate(sizes):
        order.add(waiting(serial, 0, size))
    went = []
    while (one := order.first(0)) is not None:
        order.taken(one, one.uncached)
        went.append(one.uncached)
    assert went == sorted(sizes)


@settings(max_examples=examples(200))
@given(COMERS, st.integers(0, 5000))
def test_edf_serves_deadlines_that_can_be_met_first_and_starves_nobody(
    comers: list[tuple[Any, ...]], patience: int
) -> None:
    went = play(load({"order": "edf", "patience_ms": patience}), comers)
    for one, when, others in went:
        for other in others:
            mine, theirs = one.request.deadline, other.request.deadline
            if when <= theirs < NEVER and when <= mine < NEVER:
                assert mine <= theirs, "a later deadline went first"
    for one, other in overtakings(went):
        deadline = other.request.deadline
        own = other.since + patience * MILLI
        bound = own if deadline == NEVER else max(own, deadline)
        if one.request.deadline >= one.since:
            assert one.since <= bound, "it was overtaken by one that came after its bound"


def test_edf_puts_requests_that_are_late_behind_those_that_are_not() -> None:
    order = load({"order": "edf", "patience_ms": 10_000})
    order.add(waiting(0, 0, deadline=1 * SECOND))
    order.add(waiting(1, 0, deadline=3 * SECOND))
    first = order.first(SECOND // 2)
    assert first is not None
    assert first.serial == 0
    late = order.first(2 * SECOND)
    assert late is not None
    assert late.serial == 1


def test_priority_bands_share_fairly_within_each() -> None:
    order = load({"order": "priority-fair"})
    serial = 0
    for tenant, priority, count in (("a", 1, 6), ("b", 1, 3), ("a", 0, 2), ("b", 0, 2)):
        for _ in range(count):
            order.add(waiting(serial, 0, 10, tenant=tenant, priority=priority))
            serial += 1
    went = []
    while (one := order.first(0)) is not None:
        order.taken(one, one.uncached)
        went.append((one.request.priority, one.request.tenant))
    assert went[:4] == [(0, "a"), (0, "b")] * 2
    assert went[4:10] == [(1, "a"), (1, "b")] * 3


def test_a_tenant_may_order_its_own_requests() -> None:
    order = load({"order": "fair", "within": "priority"})
    order.add(waiting(0, priority=5, tenant="a"))
    order.add(waiting(1, priority=1, tenant="a"))
    order.add(waiting(2, priority=9, tenant="b"))
    went = []
    while (one := order.first(0)) is not None:
        order.taken(one, 10)
        went.append(one.serial)
    assert went == [1, 2, 0]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (
            {"order": "nope"},
            r"'nope'.*d2lpm, dlpm, drf, edf, fair, fcfs, karma, market, ",
        ),
        ({}, "None; it must be one of"),
        ({"order": "shortest", "ageing": 0}, "ageing is 0; it must be at least 1"),
        ({"order": "shortest", "aging": 3}, "unknown field `aging`; its keys are: ageing"),
        ({"order": "fcfs", "ageing": 3}, "its keys are: none"),
        ({"order": "edf", "patience_ms": -1}, "patience_ms is -1"),
        ({"order": "fair", "input_weight": -1.0}, "input_weight is -1.0"),
        ({"order": "fair", "input_weight": 0, "output_weight": 0}, "both 0"),
        ({"order": "fair", "reserve": 1.0}, r"reserve is 1.0; it must be at least 0, below 1"),
        ({"order": "fair", "within": "random"}, "within"),
    ],
)
def test_what_cannot_be_honoured_is_refused(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(chosen)


def test_a_heap_forgets_what_was_removed() -> None:
    heap = Heap()
    everybody = [waiting(serial) for serial in range(1000)]
    for one in everybody:
        heap.add(one.serial, one)
    for one in everybody[:990]:
        heap.remove(one)
    assert sum(map(len, heap._heaps.values())) <= 2 * len(heap) + 16
    first = heap.first()
    assert first is not None
    assert first.serial == 990
