"""The gateway's view: reconciled from snapshots, whatever happens to events and to the registry."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.fleet.registry.entries import entry

from pigou.fleet.registry.discovery import (
    EntryChanged,
    ProbeWanted,
    RegistryView,
    WorkerDeparted,
    WorkerRegistered,
    WorkerSuspected,
    WorkerTrusted,
)
from pigou.fleet.registry.entry import WorkerEntry
from pigou.request import SECOND, Role

W0, W1, W2 = entry("w0"), entry("w1"), entry("w2")


@dataclass
class Clocked:
    """A view with its clock; `see` reads a snapshot."""

    view: RegistryView = field(default_factory=RegistryView)
    now: int = 0

    def see(self, *entries: WorkerEntry, after_s: float = 1.0) -> list[object]:
        self.now += round(after_s * SECOND)
        return [*self.view.snapshot(self.now, entries), *self.view.probes(self.now)]


def test_a_snapshot_without_changes_has_no_effects() -> None:
    clock = Clocked()
    assert clock.see(W0, W1) == [WorkerRegistered(W0), WorkerRegistered(W1)]
    assert clock.see(W0, W1) == []


def test_a_worker_whose_entry_is_gone_is_suspect_and_goes_once_a_probe_fails() -> None:
    clock = Clocked()
    clock.see(W0, W1)
    suspected, probe = clock.see(W1)
    assert isinstance(suspected, WorkerSuspected)
    assert suspected.identity == W0.identity
    assert probe == ProbeWanted(W0)
    assert clock.view.probed(clock.now, W0.identity, lives=True) == []
    assert clock.view.suspects == (W0.identity,)
    (gone,) = clock.view.probed(clock.now, W0.identity, lives=False)
    assert isinstance(gone, WorkerDeparted)
    assert clock.view.entries == (W1,)


def test_a_suspect_that_registers_again_is_trusted() -> None:
    clock = Clocked()
    clock.see(W0, W1)
    clock.see(W1)
    assert clock.see(W0, W1) == [WorkerTrusted(W0.identity)]
    assert clock.view.probed(clock.now, W0.identity, lives=False) == []


def test_a_suspect_is_probed_again_and_again_and_once_at_a_time() -> None:
    clock = Clocked()
    clock.see(W0, W1)
    clock.see(W1)
    assert clock.view.probes(clock.now + 100 * SECOND) == []
    clock.view.probed(clock.now, W0.identity, lives=True)
    assert clock.view.probes(clock.now) == []
    assert clock.view.next_ns() == clock.now + 5 * SECOND
    assert clock.view.probes(clock.now + 5 * SECOND) == [ProbeWanted(W0)]


def test_an_address_of_another_incarnation_is_no_sign_of_life() -> None:
    """SGLang issues 26842 and 30270: a reused address answers, and kept its traffic."""
    clock = Clocked()
    clock.see(W0, W1)
    successor = entry("w9", "incarnation-b", url=W0.url)
    effects = clock.see(W1, successor)
    assert WorkerRegistered(successor) in effects
    assert [e.identity for e in effects if isinstance(e, WorkerDeparted)] == [W0.identity]


def test_a_worker_that_was_started_again_is_another_one() -> None:
    clock = Clocked()
    clock.see(W0, W1)
    again = entry("w0", "incarnation-b", url="http://10.0.0.9:1")
    effects = clock.see(again, W1)
    assert WorkerRegistered(again) in effects
    assert [e.identity for e in effects if isinstance(e, WorkerDeparted)] == [W0.identity]


def test_a_newer_epoch_changes_a_worker_and_an_older_one_does_not() -> None:
    clock = Clocked()
    clock.see(W0)
    flipped = entry("w0", epoch=1, role=Role.PREFILL)
    assert clock.see(flipped) == [EntryChanged(flipped)]
    assert clock.see(W0) == []
    assert clock.view.entry(W0.identity) == flipped


def test_events_only_ask_for_a_snapshot_and_many_ask_for_one() -> None:
    clock = Clocked()
    clock.see(W0)
    assert not clock.view.relist_due(clock.now)
    for _ in range(100):
        clock.view.wake(clock.now + 1000)
    assert clock.view.next_ns() == clock.now + SECOND // 2
    assert not clock.view.relist_due(clock.now + 1000)


def test_what_events_missed_is_read_after_thirty_seconds() -> None:
    """SGLang issue 32322: deletions got lost, and the view was wrong for 20 minutes."""
    clock = Clocked()
    clock.see(W0, W1)
    assert clock.view.next_ns() == clock.now + 30 * SECOND
    assert any(isinstance(e, WorkerSuspected) for e in clock.see(W0, after_s=30))


def test_the_last_view_stays_while_the_registry_is_away() -> None:
    clock = Clocked()
    clock.see(W0, W1)
    for _ in range(50):
        clock.now = clock.view.next_ns()
        clock.view.unavailable(clock.now, "connection refused")
    assert clock.view.entries == (W0, W1)
    assert clock.view.suspects == ()
    assert clock.view.stale
    assert clock.view.outages == 1
    assert SECOND / 2 <= clock.view.next_ns() - clock.now <= 7.5 * SECOND
    assert clock.see(W0, W1) == []
    assert not clock.view.stale


def test_after_an_outage_workers_have_the_time_of_a_lease_to_come_back() -> None:
    """Dynamo issue 3493: leases that ended with their server took the fleet away."""
    clock = Clocked()
    clock.see(W0, W1, W2)
    clock.view.unavailable(clock.now, "connection refused")
    assert clock.see() == []
    assert clock.see(W0, after_s=5) == []
    assert clock.view.next_ns() <= clock.now + 5 * SECOND
    effects = clock.see(W0, W1, after_s=5)
    assert [e.identity for e in effects if isinstance(e, WorkerSuspected)] == [W2.identity]


def test_leases_that_end_right_after_an_outage_take_nobody_away() -> None:
    """NATS shows records whose time was over during the outage once more, then drops them."""
    clock = Clocked()
    clock.see(W0, W1)
    clock.view.unavailable(clock.now, "connection refused")
    assert clock.see(W0, W1) == []
    assert clock.see() == []
    assert clock.see(W0, W1) == []


def test_a_registry_that_was_emptied_takes_no_fleet_away() -> None:
    clock = Clocked()
    clock.see(W0, W1)
    assert clock.see() == []
    assert clock.see(W0, W1, after_s=9) == []
    assert clock.view.suspects == ()


def test_one_that_stays_empty_makes_all_suspect_after_the_time_of_a_lease() -> None:
    clock = Clocked()
    clock.see(W0, W1)
    clock.see()
    assert len([e for e in clock.see(after_s=10) if isinstance(e, WorkerSuspected)]) == 2


def test_the_last_worker_of_a_fleet_may_leave() -> None:
    clock = Clocked()
    clock.see(W0)
    assert isinstance(clock.see()[0], WorkerSuspected)


def test_a_registry_that_was_away_at_the_start_gives_no_grace() -> None:
    clock = Clocked()
    clock.view.unavailable(0, "connection refused")
    assert clock.view.outages == 0
    clock.see(W0, W1)
    assert isinstance(clock.see(W1)[0], WorkerSuspected)
