"""TransferQueue: one bounded queue and one thread that moves blocks in one direction."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from pigou.request import SECOND
from pigou.runtime.stores.store import Bools, StoreError

log = logging.getLogger(__name__)

#: Max restarts of a link's loop; beyond them it stays down.
_LIVES = 5


@dataclass(frozen=True, slots=True)
class OffloadResult:
    """Outcome of a transfer job."""

    good: Bools  # blocks that arrived intact, shape (n,)
    reason: str  # why the job failed; empty for blocks merely missing or without room


def ignore(_moved: OffloadResult) -> None:
    """Do nothing at a job's end."""


@dataclass(slots=True)
class TransferJob:
    """Work for a transfer queue."""

    good: Bools  # blocks that have arrived; `run` sets it
    run: Callable[[], object]  # raises StoreError if the medium fails
    release: Callable[[], None] = lambda: None  # frees resources; called once, even if not run
    done: Callable[[OffloadResult], None] = ignore  # called once, after `release`, on the thread
    patient: bool = False  # runs while the store is down, and never counts as queued
    reason: str = ""  # set by `run` if blocks did not arrive though nothing failed


@dataclass(slots=True)
class TransferQueueStatus:
    """Status and counters of a transfer queue."""

    up: bool = True
    reason: str = ""  # why it is down
    jobs: int = 0
    blocks: int = 0
    moved: int = 0  # blocks that arrived
    refused: int = 0  # blocks of refused jobs
    errors: int = 0  # failed jobs
    restarts: int = 0  # starts of the loop after a failure


@dataclass(slots=True)
class _State:
    """State guarded by the queue's lock."""

    queue: deque[TransferJob] = field(default_factory=deque)
    blocks: int = 0
    running: TransferJob | None = None
    closed: bool = False


class TransferQueue:
    """Runs jobs in FIFO order; refuses jobs when full, or while failures keep the link down."""

    def __init__(
        self, name: str, breaker: CircuitBreaker, rate: TransferRate, probe: Callable[[], None], *,
        limit: int, clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:  # fmt: skip
        self.name = name
        self._breaker = breaker
        self._rate = rate
        self._probe = probe
        self._limit = limit
        self._clock = clock
        self._counts = TransferQueueStatus()
        self._state = _State()
        self._wake = threading.Condition()
        self._logged = ""
        self._dead = ""
        self._thread = threading.Thread(target=self._main, name=f"pigou {name}", daemon=True)
        self._thread.start()

    def offer(self, job: TransferJob) -> bool:
        """Queue a job; False if refused, and then none of its callbacks is called."""
        with self._wake:
            state = self._state
            full = state.blocks > 0 and state.blocks + len(job.good) > self._limit
            busy = not job.patient and (full or not self._breaker.allows)
            if state.closed or self._dead or busy:
                self._counts.refused += len(job.good)
                return False
            state.queue.append(job)
            state.blocks += len(job.good)
            self._wake.notify_all()
        return True

    def seconds(self, blocks: int) -> float:
        """Return the expected seconds until `blocks` more blocks arrive, queued ones first."""
        with self._wake:
            jobs = len(self._state.queue) + (self._state.running is not None)
            latency, slope = self._rate.law()
            return latency * (jobs + 1) + slope * (self._state.blocks + blocks)

    def law(self) -> tuple[float, float]:
        """Return the measured latency per job and seconds per block."""
        with self._wake:
            return self._rate.law()

    def status(self) -> TransferQueueStatus:
        """Return status and counters."""
        with self._wake:
            state = self._state
            return replace(
                self._counts, up=self._breaker.allows and not self._dead and not state.closed,
                reason="closed" if state.closed else self._breaker.reason or self._dead,
                jobs=len(state.queue) + (state.running is not None), blocks=state.blocks,
            )  # fmt: skip

    def close(self, seconds: float) -> bool:
        """Drain for up to `seconds`, fail the remaining jobs; True if the thread ended."""
        end = time.monotonic() + seconds
        with self._wake:
            self._state.closed = True
            self._wake.notify_all()
            self._wake.wait_for(lambda: not self._state.queue, seconds)
        self._fail_all("closed")
        self._thread.join(max(0.0, end - time.monotonic()))
        return not self._thread.is_alive()

    def _fail_all(self, reason: str) -> None:
        with self._wake:
            rest = list(self._state.queue)
            self._state.queue.clear()
            self._wake.notify_all()
        for job in rest:
            self._end(job, reason)

    def _main(self) -> None:
        while True:
            try:
                self._work()
                return
            except BaseException as error:
                log.critical("%s: its loop failed", self.name, exc_info=error)
                with self._wake:
                    self._counts.restarts += 1
                    if self._counts.restarts <= _LIVES:
                        continue
                    self._dead = f"its loop failed {_LIVES} times, the last time by {error!r}"
                self._fail_all(self._dead)
                return

    def _work(self) -> None:
        while (job := self._next()) is not None:
            reason = "the link's loop failed"
            try:
                reason = self._run(job)
            finally:
                self._end(job, reason)
                with self._wake:
                    self._state.running = None
                    self._wake.notify_all()

    def _next(self) -> TransferJob | None:
        """Wait for a job, probing while the link is down; None at the end."""
        while True:
            with self._wake:
                state = self._state
                if state.queue:
                    state.running = state.queue.popleft()
                    return state.running
                if state.closed:
                    return None
                down = not self._breaker.allows
                wait = self._breaker.wait(self._clock()) / SECOND if down else None
                if wait is None or wait > 0:
                    self._wake.wait(wait)
                    continue
            self._try_again()

    def _try_again(self) -> None:
        try:
            self._probe()
        except Exception as error:
            with self._wake:
                self._breaker.reason = str(error)
                self._breaker.probed(self._clock(), alive=False)
        else:
            with self._wake:
                self._breaker.probed(self._clock(), alive=True)

    def _run(self, job: TransferJob) -> str:
        if not (job.patient or self._breaker.allows):
            return self._breaker.reason
        begin = self._clock()
        try:
            job.run()
        except BaseException as error:  # the thread outlives any job
            self._failed(job, error)
            return str(error) or type(error).__name__
        with self._wake:
            self._logged = ""
            good = int(np.count_nonzero(job.good))
            if good:
                self._rate.observe(good, (self._clock() - begin) / SECOND)
            if not job.patient and self._breaker.succeeded():
                log.warning("%s is up again", self.name)
        return job.reason

    def _failed(self, job: TransferJob, error: BaseException) -> None:
        reason = str(error) or type(error).__name__
        with self._wake:
            self._counts.errors += 1
            opened = not job.patient and self._breaker.failed(self._clock(), reason)
            known, self._logged = self._logged == reason, reason
        if not known:
            trace = None if isinstance(error, StoreError) else error
            log.error("%s: %s", self.name, reason, exc_info=trace)
        if opened:
            log.warning("%s is down: %s", self.name, reason)

    def _end(self, job: TransferJob, reason: str) -> None:
        with self._wake:
            self._state.blocks -= len(job.good)
            self._counts.moved += int(np.count_nonzero(job.good))
        for call in (job.release, lambda: job.done(OffloadResult(job.good, reason))):
            try:
                call()
            except Exception:
                log.exception("%s: a job's end failed", self.name)


class TransferRate:
    """Fits seconds(n) = latency + n * seconds_per_block by decayed least squares."""

    FADE = 0.97

    def __init__(self, latency: float, per_block: float) -> None:
        """Start from a guess, in seconds."""
        self._w = self._x = self._y = self._xx = self._xy = 0.0
        self._add(1, latency + per_block)
        self._add(64, latency + 64 * per_block)

    def observe(self, blocks: int, seconds: float) -> None:
        """Record that `blocks` >= 1 blocks took `seconds`."""
        for name in ("_w", "_x", "_y", "_xx", "_xy"):
            setattr(self, name, getattr(self, name) * self.FADE)
        self._add(blocks, seconds)

    def _add(self, n: float, seconds: float) -> None:
        self._w += 1
        self._x += n
        self._y += seconds
        self._xx += n * n
        self._xy += n * seconds

    def law(self) -> tuple[float, float]:
        """Return latency and seconds per block, both >= 0."""
        spread = self._w * self._xx - self._x * self._x
        through = self._xy / self._xx  # slope with zero latency
        if spread <= 1e-9 * self._w * self._xx:
            return 0.0, through
        slope = (self._w * self._xy - self._x * self._y) / spread
        if slope < 0:
            return self._y / self._w, 0.0
        latency = (self._y - slope * self._x) / self._w
        return (latency, slope) if latency >= 0 else (0.0, through)


class BreakerState(StrEnum):
    """State of a circuit breaker."""

    CLOSED = "closed"  #: all work
    OPEN = "open"  #: none; probes when due
    TRIAL = "trial"  #: all work, but one failure opens it again


class CircuitBreaker:
    """Opens after consecutive failures; the pause doubles with each failed trial. Times in ns."""

    def __init__(self, failures: int, pause: int, max_pause: int) -> None:
        self.state = BreakerState.CLOSED
        self.reason = ""
        self._limit = failures
        self._failures = 0
        self._first = pause
        self._pause = pause
        self._max_pause = max_pause
        self._until = 0

    @property
    def allows(self) -> bool:
        """True if work may be tried."""
        return self.state is not BreakerState.OPEN

    def wait(self, now: int) -> int:
        """Return the nanoseconds until the next probe, 0 if due; meaningful only while open."""
        return max(0, self._until - now)

    def failed(self, now: int, reason: str) -> bool:
        """Record a failure; True if the breaker opened now."""
        self._failures += 1
        self.reason = reason
        if self.state is BreakerState.CLOSED and self._failures < self._limit:
            return False
        if self.state is BreakerState.OPEN:  # from a probe, or work in flight
            return False
        self.state = BreakerState.OPEN
        self._until = now + self._pause
        self._pause = min(2 * self._pause, self._max_pause)
        return True

    def probed(self, now: int, alive: bool) -> None:
        """Record a probe's result; success starts a trial."""
        if alive:
            self.state = BreakerState.TRIAL
        else:
            self._until = now + self._pause
            self._pause = min(2 * self._pause, self._max_pause)

    def succeeded(self) -> bool:
        """Record a success; True if the breaker closed now."""
        closed = self.state is not BreakerState.CLOSED
        self.state = BreakerState.CLOSED
        self.reason = ""
        self._failures = 0
        self._pause = self._first
        return closed
