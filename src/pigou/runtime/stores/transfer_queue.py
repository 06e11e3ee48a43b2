"""Link: one queue and one thread that moves blocks in one direction."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from pigou.request import SECOND
from pigou.runtime.stores.store import Bools, StoreError

log = logging.getLogger(__name__)

#: A link whose own loop fails more often than this stays down.
_LIVES = 5


@dataclass(frozen=True, slots=True)
class OffloadResult:
    """How a job ended."""

    good: Bools  # which of its blocks arrived, whole, shape (n,)
    # empty, or why there was nothing more to be had: the store is down, an error, closed. Blocks
    # that were missing, or had no room, have no reason.
    reason: str
    nanos: int


@dataclass(slots=True)
class TransferJob:
    """Work for a link."""

    good: Bools  # which blocks have arrived; `run` fills it in as it goes
    run: Callable[[], None]  # does the work; raises StoreError when the medium fails
    release: Callable[[], None]  # gives back what the job holds; called once, whether it ran or not
    # told once how it ended, after `release`, on the link's thread.
    done: Callable[[OffloadResult], None]
    patient: bool = False  # runs even while the store is down, and takes no room in the queue
    reason: str = ""  # `run` may say why blocks did not arrive though nothing failed


@dataclass(frozen=True, slots=True)
class TransferQueueStatus:
    """A link, to be shown."""

    up: bool  # whether it takes work
    reason: str  # why not
    jobs: int
    blocks: int
    moved: int  # blocks that arrived
    missed: int  # blocks that did not: absent, without room, void, torn
    failed: int  # blocks of jobs that ended in an error
    refused: int  # blocks of jobs that were not taken
    errors: int  # jobs that ended in an error
    restarts: int  # times that its loop failed and was begun again
    bytes: int  # of the blocks that arrived
    seconds: float
    latency: float  # seconds of a job besides those of its blocks, as measured
    bytes_per_second: float


@dataclass(slots=True)
class _Counts:
    moved: int = 0
    missed: int = 0
    failed: int = 0
    refused: int = 0
    errors: int = 0
    restarts: int = 0
    nanos: int = 0


@dataclass(slots=True)
class _State:
    """What the link's lock guards."""

    queue: deque[TransferJob] = field(default_factory=deque)
    blocks: int = 0
    running: TransferJob | None = None
    closed: bool = False


class TransferQueue:
    """Runs jobs in the order of their arrival; refuses rather than letting the queue grow.

    An error in a job fails this job, and is logged once however often it repeats. After some in a
    row the link is down: it takes nothing, fails what waits, and probes until it may try again.
    """

    def __init__(
        self,
        name: str,
        breaker: CircuitBreaker,
        rate: TransferRate,
        probe: Callable[[], None],
        *,
        block_bytes: int,
        limit: int,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.name = name
        self._breaker = breaker
        self._rate = rate
        self._probe = probe
        self._block_bytes = block_bytes
        self._limit = limit
        self._clock = clock
        self._counts = _Counts()
        self._state = _State()
        self._wake = threading.Condition()
        self._logged = ""
        self._dead = ""
        self._thread = threading.Thread(target=self._main, name=f"pigou {name}", daemon=True)
        self._thread.start()

    def offer(self, job: TransferJob) -> bool:
        """Take a job, or refuse it: then nothing of it is called, and it is the caller's again."""
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
        """Seconds until `blocks` more blocks have arrived, those before them included."""
        with self._wake:
            jobs = len(self._state.queue) + (self._state.running is not None)
            latency, slope = self._rate.law()
            return latency * (jobs + 1) + slope * (self._state.blocks + blocks)

    def law(self) -> tuple[float, float]:
        """Seconds of a job besides those of its blocks, and of each block, as measured."""
        with self._wake:
            return self._rate.law()

    def status(self) -> TransferQueueStatus:
        """Describe the link."""
        with self._wake:
            state, counts = self._state, self._counts
            latency, slope = self._rate.law()
            return TransferQueueStatus(
                up=self._breaker.allows and not self._dead and not state.closed,
                reason="closed" if state.closed else self._breaker.reason or self._dead,
                jobs=len(state.queue) + (state.running is not None),
                blocks=state.blocks,
                moved=counts.moved,
                missed=counts.missed,
                failed=counts.failed,
                refused=counts.refused,
                errors=counts.errors,
                restarts=counts.restarts,
                bytes=counts.moved * self._block_bytes,
                seconds=counts.nanos / SECOND,
                latency=latency,
                bytes_per_second=self._block_bytes / slope if slope else float("inf"),
            )

    def close(self, seconds: float) -> bool:
        """Take no more, finish what waits within `seconds`, fail the rest.

        Returns whether the thread has ended.
        """
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
            self._end(job, reason, 0)

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
            begin, reason = self._clock(), "the link's loop failed"
            try:
                reason = self._run(job)
            finally:
                self._end(job, reason, self._clock() - begin)
                with self._wake:
                    self._state.running = None
                    self._wake.notify_all()

    def _next(self) -> TransferJob | None:
        """Wait for a job, and probe meanwhile when the link is down; None at the end."""
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
        except BaseException as error:  # whatever a job raises, the thread lives on
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

    def _end(self, job: TransferJob, reason: str, nanos: int) -> None:
        good = int(np.count_nonzero(job.good))
        with self._wake:
            self._state.blocks -= len(job.good)
            self._counts.moved += good
            if reason:
                self._counts.failed += len(job.good) - good
            else:
                self._counts.missed += len(job.good) - good
            self._counts.nanos += nanos
        for call in (job.release, lambda: job.done(OffloadResult(job.good, reason, nanos))):
            try:
                call()
            except Exception:
                log.exception("%s: a job's end failed", self.name)


class TransferRate:
    """seconds(n) = latency + n x seconds per block, by least squares, the past fading.

    Each observation counts `FADE` times as much as the next one. The law begins as a guess, which
    fades alike.
    """

    FADE = 0.97

    def __init__(self, latency: float, per_block: float) -> None:
        """Begin with a guess: `latency` and `per_block`, seconds."""
        self._w = self._x = self._y = self._xx = self._xy = 0.0
        self._add(1, latency + per_block)
        self._add(64, latency + 64 * per_block)

    def observe(self, blocks: int, seconds: float) -> None:
        """Note that `blocks` blocks, at least 1, took `seconds`."""
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
        """Latency and seconds per block, neither negative."""
        spread = self._w * self._xx - self._x * self._x
        through = self._xy / self._xx  # the law without latency
        if spread <= 1e-9 * self._w * self._xx:
            return 0.0, through
        slope = (self._w * self._xy - self._x * self._y) / spread
        if slope < 0:
            return self._y / self._w, 0.0
        latency = (self._y - slope * self._x) / self._w
        return (latency, slope) if latency >= 0 else (0.0, through)

    def seconds(self, blocks: int) -> float:
        """Seconds that `blocks` blocks take."""
        latency, slope = self.law()
        return latency + blocks * slope


class BreakerState(StrEnum):
    """What a breaker lets through."""

    CLOSED = "closed"  #: everything
    OPEN = "open"  #: nothing, until it is time to probe
    TRIAL = "trial"  #: everything, but one failure opens it again


class CircuitBreaker:
    """Opens after some failures in a row; each pause until the next trial is twice the last.

    Times are nanoseconds of one clock, and arguments.
    """

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
        """Whether to try."""
        return self.state is not BreakerState.OPEN

    def wait(self, now: int) -> int:
        """Nanoseconds until it is time to probe; 0 is now. Of meaning while it is open."""
        return max(0, self._until - now)

    def failed(self, now: int, reason: str) -> bool:
        """Note a failure; returns whether it opened just now."""
        self._failures += 1
        self.reason = reason
        if self.state is BreakerState.CLOSED and self._failures < self._limit:
            return False
        if self.state is BreakerState.OPEN:  # a probe, or work that was under way
            return False
        self.state = BreakerState.OPEN
        self._until = now + self._pause
        self._pause = min(2 * self._pause, self._max_pause)
        return True

    def probed(self, now: int, alive: bool) -> None:
        """Note what a probe found: a sign of life lets work through on trial."""
        if alive:
            self.state = BreakerState.TRIAL
        else:
            self._until = now + self._pause
            self._pause = min(2 * self._pause, self._max_pause)

    def succeeded(self) -> bool:
        """Note a success; returns whether it closed just now."""
        closed = self.state is not BreakerState.CLOSED
        self.state = BreakerState.CLOSED
        self.reason = ""
        self._failures = 0
        self._pause = self._first
        return closed
