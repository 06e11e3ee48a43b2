"""The lease keeper: renewals before the end, and a loss that ends nothing."""

from __future__ import annotations

import pytest

from pigou.fleet.nats_connection import ReconnectBackoff
from pigou.fleet.registry.registration import LeaseKeeper, LeaseStep
from pigou.request import SECOND


def held(ttl_s: float = 10.0, seed: int = 0) -> LeaseKeeper:
    keeper = LeaseKeeper(ttl_s, seed)
    keeper.succeeded(0, 0)
    return keeper


def test_the_first_step_registers_at_once() -> None:
    assert LeaseKeeper(10.0).step(7) == LeaseStep("register", 7)


def test_a_renewal_is_due_after_half_of_the_time_and_a_late_one_at_half_of_what_remains() -> None:
    """Dynamo PR 4363: a late renewal is tried at 7.5 of 10, and not after the end."""
    keeper = held()
    assert keeper.step(0) == LeaseStep("renew", 5 * SECOND)
    keeper.failed(5 * SECOND)
    assert keeper.step(5 * SECOND) == LeaseStep("renew", 7_500_000_000)
    keeper.failed(7_500_000_000)
    assert keeper.step(7_500_000_000) == LeaseStep("renew", 8_750_000_000)


def test_the_lease_counts_from_when_the_call_was_sent() -> None:
    keeper = LeaseKeeper(10.0)
    keeper.succeeded(0, 4 * SECOND)
    assert keeper.step(4 * SECOND) == LeaseStep("renew", 7 * SECOND)
    assert keeper.step(10 * SECOND).action == "register"


def test_a_lost_lease_registers_again_and_counts_once() -> None:
    """Dynamo issue 3493: one blip made every service lose its lease and restart."""
    keeper = held()
    keeper.lost(3 * SECOND)
    step = keeper.step(3 * SECOND)
    assert step.action == "register"
    assert 3 * SECOND <= step.at_ns < 3.5 * SECOND
    keeper.lost(4 * SECOND)
    assert keeper.lapses == 1


@pytest.mark.parametrize("first_lost", [True, False])
def test_hundreds_of_workers_come_back_at_different_times(first_lost: bool) -> None:
    """Dynamo PR 7932: hundreds of replicas came back in lock step."""
    due = []
    for seed in range(300):
        keeper = held(seed=seed)
        now = 11 * SECOND
        if first_lost:
            keeper.lost(now)
        else:
            keeper.failed(now)
        due.append(keeper.step(now).at_ns - now)
    assert len(set(due)) > 290
    assert max(due) - min(due) > 0.2 * SECOND


def test_the_wait_between_tries_doubles_up_to_its_end() -> None:
    keeper = LeaseKeeper(10.0, backoff=ReconnectBackoff(jitter=0.0))
    waits, now = [], 0
    for _ in range(6):
        keeper.failed(now)
        at = keeper.step(now).at_ns
        waits.append((at - now) / SECOND)
        now = at
    assert waits == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_short_remainder_does_not_make_tries_swarm() -> None:
    keeper, now = held(), 5 * SECOND
    tries = 0
    while now < 10 * SECOND:
        keeper.failed(now)
        now = keeper.step(now).at_ns
        tries += 1
    assert tries < 8
