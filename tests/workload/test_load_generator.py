from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import repeat

import numpy as np

from pigou.request import SECOND
from pigou.workload.load_generator import LoadGenerator
from pigou.workload.prompts import PromptJob
from pigou.workload.token_counter import Failure, SentRequest, Stream

MS = SECOND // 1000


def made(count: int) -> Iterator[PromptJob]:
    return iter([PromptJob([n], 1) for n in range(count)])


async def answer(job: PromptJob, intended: int, seconds: float) -> SentRequest:
    sent = time.monotonic_ns()
    await asyncio.sleep(seconds)
    now = time.monotonic_ns()
    stream = Stream(now, now, 1, None, None, 1, "usage", np.zeros(0, np.int64))
    return SentRequest(intended, sent, job.output, stream)


def test_an_open_loop_waits_for_nobody() -> None:
    drive = LoadGenerator(lambda job, at: answer(job, at, 0.5))
    asyncio.run(drive.open(made(20), [MS * n for n in range(20)]))
    assert len(drive.outcomes) == drive.offered_requests == 20
    assert max(o.sent for o in drive.outcomes) < min(o.result.first for o in drive.outcomes)
    assert sorted(o.intended - drive.began for o in drive.outcomes) == [MS * n for n in range(20)]


def test_a_client_that_is_late_does_not_move_the_intended_time() -> None:
    async def late() -> LoadGenerator:
        drive = LoadGenerator(lambda job, at: answer(job, at, 0.0))
        asyncio.get_running_loop().call_later(0.005, time.sleep, 0.2)
        await drive.open(made(2), [0, 50 * MS])
        return drive

    drive = asyncio.run(late())
    last = max(drive.outcomes, key=lambda o: o.intended)
    assert last.intended == drive.began + 50 * MS
    assert last.sent - last.intended > 100 * MS


def test_a_bound_on_an_open_loop_makes_requests_wait_in_the_client() -> None:
    inflight, peak = 0, 0

    async def send(job: PromptJob, at: int) -> SentRequest:
        nonlocal inflight, peak
        inflight += 1
        peak = max(peak, inflight)
        outcome = await answer(job, at, 0.02)
        inflight -= 1
        return outcome

    drive = LoadGenerator(send)
    asyncio.run(drive.open(made(6), repeat(0), max_inflight=2))
    assert peak == 2
    waits = sorted((o.sent - o.intended) // MS for o in drive.outcomes)
    assert waits[2] >= 19
    assert waits[4] >= 39


def test_a_closed_loop_keeps_its_slots_full_and_no_more() -> None:
    seen: list[int] = []
    drive = LoadGenerator(lambda job, at: answer(job, at, 0.01), lambda d: seen.append(d.inflight))
    asyncio.run(drive.closed(made(12), 3))
    assert len(drive.outcomes) == drive.offered_requests == 12
    # Seen after one has ended and before its slot sends the next: so the other two.
    assert max(seen) == 2


def test_a_closed_loop_sends_for_the_duration_and_waits_for_the_rest() -> None:
    drive = LoadGenerator(lambda job, at: answer(job, at, 0.06))
    asyncio.run(drive.closed(made(10**6), 2, duration=0.1))
    assert drive.offered_requests == len(drive.outcomes) <= 4
    assert max(o.intended for o in drive.outcomes) < drive.began + 0.1 * SECOND


def test_failures_are_counted_as_they_come() -> None:
    async def fail(job: PromptJob, at: int) -> SentRequest:
        return SentRequest(at, at, 1, Failure("timeout", ""))

    drive = LoadGenerator(fail)
    asyncio.run(drive.closed(made(5), 2))
    assert (drive.failed, drive.inflight) == (5, 0)
