"""The load generator: sends jobs in a closed or an open loop, and keeps their outcomes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

from pigou.request import SECOND
from pigou.workload.prompts import PromptJob
from pigou.workload.token_counter import Failure, SentRequest

Send = Callable[[PromptJob, int], Awaitable[SentRequest]]


class LoadGenerator:
    """One run of load.

    Example:
        load = LoadGenerator(send)  # `send` sends one prompt, and returns its outcome
        await load.closed(iter(jobs), slots=32)
        print(load.offered_requests, load.failed)
    """

    def __init__(self, send: Send, watch: Callable[[LoadGenerator], None] | None = None) -> None:
        """`watch` is called after each request that ended."""
        self.jobs: list[PromptJob] | None = (
            None  # jobs sent, in the order of `outcomes`; None keeps none
        )
        self._send = send
        self._watch = watch
        self.offered_requests = 0
        self.inflight = 0
        self.failed = 0
        self.outcomes: list[SentRequest] = []
        self.began = time.monotonic_ns()

    async def closed(
        self, jobs: Iterator[PromptJob], slots: int, duration: float | None = None
    ) -> None:
        """Keep `slots` requests in flight until the jobs, or `duration` seconds, run out."""
        self.began = time.monotonic_ns()
        end = None if duration is None else self.began + round(duration * SECOND)

        async def slot() -> None:
            for job in jobs:
                intended = time.monotonic_ns()
                if end is not None and intended >= end:
                    return
                self.offered_requests += 1
                await self._one(job, intended)

        async with asyncio.TaskGroup() as group:
            for _ in range(slots):
                group.create_task(slot())

    async def open(
        self, jobs: Iterable[PromptJob], times: Iterable[int], max_inflight: int | None = None
    ) -> None:
        """Send each job at its time (ns from the start); beyond `max_inflight` jobs wait."""
        slots = asyncio.Semaphore(max_inflight) if max_inflight else None

        async def one(job: PromptJob, intended: int) -> None:
            if slots is None:
                await self._one(job, intended)
            else:
                async with slots:
                    await self._one(job, intended)

        self.began = time.monotonic_ns()
        async with asyncio.TaskGroup() as group:
            for job, at in zip(jobs, times, strict=False):
                intended = self.began + at
                await _until(intended)
                self.offered_requests += 1
                group.create_task(one(job, intended))

    async def sessions(
        self, sessions: Iterable[Sequence[tuple[PromptJob, float]]], starts: Iterable[float],
        slots: int | None = None,
    ) -> None:  # fmt: skip
        """Send each session's (job, think seconds) in turn, `slots` sessions at once."""
        free = asyncio.Semaphore(slots) if slots else None

        async def one(jobs: Sequence[tuple[PromptJob, float]], start: int) -> None:
            intended = start
            for turn_index, (job, think) in enumerate(jobs):
                if turn_index:
                    intended = time.monotonic_ns() + round(think * SECOND)
                await _until(intended)
                self.offered_requests += 1
                await self._one(job, intended)
            if free is not None:
                free.release()

        self.began = time.monotonic_ns()
        async with asyncio.TaskGroup() as group:
            for jobs, at in zip(sessions, starts, strict=False):
                intended = self.began + round(at * SECOND)
                await _until(intended)
                if free is not None:
                    await free.acquire()
                    intended = max(intended, time.monotonic_ns())
                group.create_task(one(jobs, intended))

    async def _one(self, job: PromptJob, intended: int) -> None:
        self.inflight += 1
        try:
            outcome = await self._send(job, intended)
        finally:
            self.inflight -= 1
        self.outcomes.append(outcome)
        if self.jobs is not None:
            self.jobs.append(job)
        self.failed += isinstance(outcome.result, Failure)
        if self._watch is not None:
            self._watch(self)


async def _until(at: int) -> None:
    """Sleep until a time of the monotonic clock, in nanoseconds, and never less."""
    while (ahead := at - time.monotonic_ns()) > 0:
        await asyncio.sleep(ahead / SECOND)
