"""What a planner orders is done, or refused in the same words by every fleet."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.control.planner.actuation import ManagedWorker, carry_out
from pigou.control.planner.messages import (
    Action,
    AddWorkers,
    DrainWorker,
    FlipRole,
    RebalancePool,
    RemoveWorker,
    SetOperatingPoint,
)
from pigou.control.planner.tenant_load import TenantLoad
from pigou.request import Role
from pigou.windows.planner_window import WorkerState


class ListedFleet:
    """A fleet that is a list; it notes what is ordered."""

    def __init__(self, *workers: ManagedWorker, room: int = 9) -> None:
        self.workers = {worker.id: worker for worker in workers}
        self.pools = ["prefill", "decode"]
        self.orders: list[tuple[str, ...]] = []
        self.room = room

    @property
    def size(self) -> int:
        return len(self.workers)

    def worker(self, id: str) -> ManagedWorker | None:
        return self.workers.get(id)

    def is_last_decoder(self, id: str) -> bool:
        ready = [w.id for w in self.workers.values()
                 if w.state is WorkerState.READY and self.decodes(w.pool)]  # fmt: skip
        return ready == [id]

    def start_refusal(self, pool: str) -> str:
        return "" if self.room else f"no device is free for {pool}"

    def flip_refusal(self, id: str, pool: str) -> str:
        return "" if pool in self.pools else f"{id} cannot serve in pool {pool!r}"

    def decodes(self, pool: str) -> bool:
        return pool != "prefill"

    def limits_refusal(self, pool: str) -> str:
        return "" if pool == "decode" else "its limits are fixed"

    def set_limits(
        self, pool: str, max_seqs: int | None, max_batched_tokens: int | None, now: int
    ) -> None:
        self.orders.append(("limits", pool, f"{max_seqs} {max_batched_tokens}"))

    def add(self, pool: str, now: int) -> str:
        self.room -= 1
        id = f"{pool}-{self.size}"
        self.workers[id] = ManagedWorker(id, pool, WorkerState.STARTING)
        self.orders.append(("add", pool))
        return id

    def drain(self, id: str, now: int) -> None:
        self.workers[id] = replace(self.workers[id], state=WorkerState.DRAINING)
        self.orders.append(("drain", id))

    def remove(self, id: str, now: int) -> None:
        del self.workers[id]
        self.orders.append(("remove", id))

    def flip(self, id: str, pool: str, now: int) -> None:
        self.workers[id] = replace(self.workers[id], pool=pool)
        self.orders.append(("flip", id, pool))


def fleet(room: int = 9) -> ListedFleet:
    ready = WorkerState.READY
    return ListedFleet(
        ManagedWorker("p0", "prefill", ready),
        ManagedWorker("d0", "decode", ready),
        ManagedWorker("d1", "decode", ready),
        ManagedWorker("d2", "decode", WorkerState.STARTING),
        room=room,
    )


@pytest.mark.parametrize(
    ("action", "orders"),
    [
        (AddWorkers("decode", 2), [("add", "decode"), ("add", "decode")]),
        (DrainWorker("d0"), [("drain", "d0")]),
        (RemoveWorker("d2"), [("remove", "d2")]),
        (FlipRole("d0", Role.PREFILL, "prefill"), [("flip", "d0", "prefill")]),
        (RebalancePool("decode", "d0"), []),
        (SetOperatingPoint(pool="decode", max_seqs=3), [("limits", "decode", "3 None")]),
    ],
)
def test_what_can_be_done_is_done(action: Action, orders: list[tuple[str, ...]]) -> None:
    made = fleet()
    assert carry_out(action, made, 1) == ""
    assert made.orders == orders


@pytest.mark.parametrize(
    ("action", "refusal"),
    [
        (AddWorkers("both", 1), "there is no pool 'both'"),
        (DrainWorker("d2"), "d2 is not ready"),
        (DrainWorker("nobody"), "nobody is not ready"),
        (RemoveWorker("nobody"), "nobody is not there"),
        (FlipRole("d2", Role.PREFILL, "prefill"), "d2 is not ready"),
        (FlipRole("d0", Role.BOTH, "both"), "d0 cannot serve in pool 'both'"),
        (SetOperatingPoint(pool="both", max_seqs=3), "there is no pool 'both'"),
        (SetOperatingPoint(pool="prefill", max_seqs=3), "prefill: its limits are fixed"),
        (
            SetOperatingPoint(pool="decode", max_batched_tokens=0),
            "decode: max_batched_tokens is 0; it must be at least 1",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(action: Action, refusal: str) -> None:
    made = fleet()
    assert carry_out(action, made, 1) == refusal
    assert made.orders == []


def test_the_last_worker_that_decodes_is_left() -> None:
    made = fleet()
    assert carry_out(DrainWorker("d0"), made, 1) == ""
    for action in (DrainWorker("d1"), RemoveWorker("d1"), FlipRole("d1", Role.PREFILL, "prefill")):
        assert carry_out(action, made, 2) == "d1 is the last worker that decodes"
    assert made.orders == [("drain", "d0")]
    assert carry_out(DrainWorker("p0"), made, 3) == ""  # decode workers prefill, too


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.dictionaries(st.sampled_from("abcd"), st.floats(0.0, 1e6), min_size=1),
    st.dictionaries(st.sampled_from("abcd"), st.floats(0.1, 10.0)),
)
def test_no_tenant_moves_a_planner_further_than_its_share_of_the_budget(
    max_workers: int, wanted: int, work: dict[str, float], weights: dict[str, float]
) -> None:
    limit = TenantLoad(work, weights).max_workers(wanted, max_workers)
    assert limit <= min(wanted, max_workers)
    total = sum(weights.get(name, 1.0) for name in {*work, *weights})
    load = sum(work.values())
    for name, own in work.items():
        share = max_workers * weights.get(name, 1.0) / total
        without = load - own
        if load:  # what the others need, and its share, whatever it sends
            assert limit <= math.ceil(wanted * without / load + share - 1e-9)
    if len({*work, *weights}) == 1:  # alone, it may have all
        assert limit == min(wanted, max_workers)


def test_made_up_names_move_a_planner_no_further_than_one_tenant() -> None:
    weights, work = {"a": 1.0, "*": 1.0}, {"a": 1.0}
    sybil = {f"made-up-{number}": 3.0 for number in range(3)}
    limit = TenantLoad(work | sybil, weights).max_workers(8, 8)
    assert limit == TenantLoad(work | {"x": 9.0}, weights).max_workers(8, 8)
    assert TenantLoad(work | sybil).max_workers(8, 8) > limit


def test_a_share_below_one_worker_is_a_limit_of_one() -> None:
    made, load = fleet(), TenantLoad({"a": 1.0}, {"a": 1e-12, "b": 1.0})
    refusal = carry_out(AddWorkers("decode", 2), made, 1, max_workers=8, load=load)
    assert "shares of it allow 1" in refusal
    assert not made.orders


def test_workers_are_added_as_far_as_the_limit_and_the_machine_go() -> None:
    made = fleet()
    assert carry_out(AddWorkers("decode", 3), made, 1, max_workers=5) == (
        "decode: 2 workers more than max_workers allows"
    )
    assert made.size == 5
    assert carry_out(AddWorkers("decode", 1), made, 2, max_workers=3) == (
        "decode: 1 workers more than max_workers allows"
    )
    assert made.size == 5
    made = fleet(room=1)
    assert carry_out(AddWorkers("decode", 3), made, 1) == (
        "decode: 2 workers are not started: no device is free for decode"
    )
    assert made.size == 5
