"""Everything at once: requests of all kinds, while workers are killed and clients leave."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from tests.e2e.fleet import Fleet
from tests.e2e.test_e2e_kills import Case, cases

__all__ = ["cases"]  # the fixture

SECONDS = 60
CLIENTS = 8


class Client(threading.Thread):
    """Sends one request after another; each must be whole, but those it leaves early."""

    def __init__(self, fleet: Fleet, cases: list[Case], seed: int, leaves: float) -> None:
        super().__init__(daemon=True)
        self.fleet, self.cases, self.leaves = fleet, cases, leaves
        self.random = random.Random(seed)
        self.over = threading.Event()
        self.whole = self.left = 0
        self.errors: list[str] = []

    def run(self) -> None:
        while not self.over.is_set() and not self.errors:
            case = self.random.choice(self.cases)
            try:
                self.ask(case)
            except Exception as error:
                self.errors.append(f"{case.name}: {error!r}")

    def ask(self, case: Case) -> None:
        salt = {"cache_salt": f"{self.random.randrange(3)}"}
        patience = self.random.randrange(12) if self.random.random() < self.leaves else 1000
        chunks = self.fleet.follow(**case.body | salt)
        stream = next(chunks)
        for _ in range(patience):
            following = next(chunks, None)
            if following is None:
                break
            stream = following
        else:
            self.left += 1
            chunks.close()
            return
        assert stream.told == case.expected
        self.whole += 1


@pytest.fixture
def clients(real: Fleet, cases: list[Case]) -> Iterator[list[Client]]:
    found = [Client(real, cases, seed, leaves=0.3) for seed in range(CLIENTS)]
    yield found
    for each in found:
        each.over.set()


def finish(clients: list[Client]) -> None:
    for each in clients:
        each.over.set()
    for each in clients:
        each.join(90)
        assert not each.is_alive(), "a stream never ends"
        assert not each.errors, each.errors
    print(f"{sum(c.whole for c in clients)} whole streams, {sum(c.left for c in clients)} left")


def test_clients_that_leave_at_any_time_leak_nothing(real: Fleet, clients: list[Client]) -> None:
    for each in clients:
        each.start()
    end = time.monotonic() + 90
    while not any(each.errors for each in clients):
        left, whole = (sum(getattr(c, name) for c in clients) for name in ("left", "whole"))
        if min(left, whole) >= 12:
            break
        assert time.monotonic() < end, f"{left} left, {whole} whole"
        time.sleep(0.1)
    finish(clients)
    real.settle()


@pytest.mark.slow
def test_whatever_is_killed_whenever_streams_are_whole_and_nothing_leaks(
    real: Fleet, clients: list[Client]
) -> None:
    generator = random.Random(3)
    for each in clients:
        each.start()
    end, kills = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        time.sleep(generator.random() * 2)
        up = [row["pid"] for row in real.rows().values() if row["state"] == "up"]
        if up:
            real.note()
            number = signal.SIGSTOP if generator.random() < 0.2 else signal.SIGKILL
            with suppress(ProcessLookupError):  # it was killed while it hung
                os.kill(generator.choice(up), number)
            kills += 1
        time.sleep(4)
    real.recovered()
    finish(clients)
    print(f"{kills} workers killed or stopped")
    real.settle()
