"""The simulated client: intended send times, connection pool, timeouts and retries."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from random import Random
from typing import Literal, Protocol

import msgspec

from pigou.config import ConfigError, check_bounds, check_fields
from pigou.request import SECOND
from pigou.sim.arrival_rate import MAX_SECONDS
from pigou.sim.request_run import RequestRun, RunOutcome
from pigou.sim.virtual_clock import EPOCH, Clock, Phase
from pigou.sim.workload import ClosedLoop, OpenLoop, RequestSession, RequestSpec

#: Keys of the events of users, apart from those of requests.
_USERS = 2**40
#: Doublings of a wait that exceed any limit.
_DOUBLINGS = 100


class ClientConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a client sends."""

    pool: int = 0  # connections, and so requests at once; 0 for no limit
    take: Literal["fifo", "random", "lifo"] = (
        "fifo"  # waiting request that takes a freed connection
    )
    barging: float = 0.0  # probability that its last user takes it again first
    timeout: float = 0.0  # timeout of an attempt in seconds; 0 for none
    retries: int = 0  # further attempts after one that failed
    backoff: float = 0.5  # seconds before the first retry, doubled for each more; times 0.5 to 1
    max_backoff: float = 0.0  # longest of those waits in seconds; 0 for no limit
    heeds_retry_after: bool = True  # waits as long as a refusal says

    def __post_init__(self) -> None:
        check_fields(self, "pool", "retries", ge=0)
        seconds = "timeout", "backoff", "max_backoff"
        check_fields(self, *seconds, ge=0, le=MAX_SECONDS, unit=" seconds (a year)")
        check_bounds("barging", self.barging, ge=0, lt=1)
        if self._max_retry_s > MAX_SECONDS:
            raise ConfigError(
                f"retries is {self.retries}, and backoff {self.backoff} s, doubled each time: they "
                f"take over {MAX_SECONDS} seconds (a year); lower one of them"
            )

    @property
    def _max_retry_s(self) -> float:
        """Seconds of a request whose every attempt times out, at most."""
        backoff = self.backoff * (2.0 ** min(self.retries, _DOUBLINGS) - 1.0)
        if self.max_backoff:
            backoff = min(backoff, self.max_backoff * self.retries)
        return backoff + self.timeout * self.retries

    def wait_s(self, failed: int) -> float:
        """Return the most seconds to wait after `failed` attempts."""
        wait = self.backoff * 2.0 ** min(failed - 1, _DOUBLINGS)
        return min(wait, self.max_backoff or wait)


class Server(Protocol):
    """Serves requests."""

    def send(self, run: RequestRun, now: int) -> None:
        """Begin an attempt; `on_end` is called at its end."""
        ...

    def time_out(self, run: RequestRun, now: int) -> None:
        """Give an attempt up; `on_end` is called."""
        ...


@dataclass(slots=True, eq=False)
class _User:
    """Sends its requests one after another; `busy` from the intention to the end of each."""

    number: int
    specs: Iterator[RequestSpec]
    active: bool = True
    busy: bool = False
    sent: bool = False


class SimulatedClient:
    """Sends a workload's requests."""

    def __init__(
        self, workload: OpenLoop | ClosedLoop, config: ClientConfig, server: Server,
        clock: Clock, seed: int = 0,
    ) -> None:  # fmt: skip
        self.runs: list[RequestRun] = []
        self.done = False
        self.open = 0
        self.expected = workload.request_count
        self._config, self._server, self._clock = config, server, clock
        self.own: dict[str, ClientConfig] = {}  # timeouts and retries of tenants who have theirs
        self._rng = Random(seed)
        self._free = config.pool
        self._waiting: deque[RequestRun] = deque()
        self._sender: dict[RequestRun, _User] = {}
        self._users: list[_User] = []
        self._busy = 0
        self._closed = workload if isinstance(workload, ClosedLoop) else None
        self._stop = self._limit = self._chunk_end = 2**62
        self._chunk = 0
        if isinstance(workload, ClosedLoop):
            self._start_closed(workload)
        elif workload.concurrency:
            sessions = iter(workload.sessions)
            for _ in range(workload.concurrency):
                self._add_user(chain.from_iterable(session.requests for session in sessions), EPOCH)
        else:
            all_sessions = workload.sessions
            self._busy = len(all_sessions)
            starts = ((EPOCH + one.start_ns, number) for number, one in enumerate(all_sessions))
            self._schedule_session(iter(sorted(starts)), all_sessions)

    def is_open(self, run: RequestRun) -> bool:
        """Whether a request has not ended, further attempts counted."""
        return run in self._sender

    # --- users --------------------------------------------------------------------------------

    def _add_user(self, specs: Iterator[RequestSpec], at: int) -> None:
        user = _User(len(self._users), specs, busy=True)
        self._users.append(user)
        self._busy += 1
        self._clock.at(at, Phase.SEND, _USERS + user.number, lambda now: self._next(user, now))

    def _schedule_session(
        self, starts: Iterator[tuple[int, int]], sessions: Sequence[RequestSession]
    ) -> None:
        """Schedule the session that starts next; a heap of all would be slow."""
        first = next(starts, None)
        if first is None:
            return
        at, number = first
        user = _User(number, iter(sessions[number].requests), busy=True)

        def start(now: int) -> None:
            self._schedule_session(starts, sessions)
            self._next(user, now)

        self._clock.at(at, Phase.SEND, _USERS + number, start)

    def _start_closed(self, loop: ClosedLoop) -> None:
        self._limit = loop.requests or self._limit
        self._stop = EPOCH + round(loop.seconds * SECOND)
        self._chunk = round(loop.barrier * SECOND)
        self._chunk_end = EPOCH + self._chunk if self._chunk else 2**62
        self._draws = self._drawn(loop)
        users, at = loop.phases[0][0], round(loop.ramp * SECOND)
        for number in range(users):
            self._add_user(self._draws, EPOCH + at * number // users)
        at += EPOCH
        for (_, seconds), (users, _) in pairwise(loop.phases):
            at += round(seconds * SECOND)
            self._clock.at(at, Phase.SEND, -1, partial(self._resize, users))
        self._clock.at(self._stop, Phase.SEND, -1, self._stopped)

    def _drawn(self, loop: ClosedLoop) -> Iterator[RequestSpec]:
        think = round(loop.think * SECOND)
        while True:
            spec = loop.lengths.sample(self._rng)
            yield replace(spec, think_ns=think) if think else spec

    def _resize(self, users: int, now: int) -> None:
        for user in self._users:
            user.active = user.number < users
            if user.active and not user.busy and now < self._chunk_end:
                user.busy = True
                self._busy += 1
                self._next(user, now)
        while len(self._users) < users:
            self._add_user(self._draws, now)

    def _stopped(self, now: int) -> None:  # noqa: ARG002  (a clock event)
        assert self._closed is not None
        if not self._closed.drain or not self._busy:
            self.done = True

    def _next(self, user: _User, now: int, wait: int = 0) -> None:
        spec = None
        if user.active and now < min(self._stop, self._chunk_end) and self._may_send:
            spec = next(user.specs, None)
        if spec is None:
            self._idle(user, now)
            return
        at = now + wait + (spec.think_ns if user.sent else 0)
        user.sent = True
        if at > now:
            self._clock.at(
                at, Phase.SEND, _USERS + user.number, lambda at: self._intend(user, spec, at)
            )
        else:
            self._intend(user, spec, now)

    @property
    def _may_send(self) -> bool:
        return len(self.runs) < self._limit

    def _idle(self, user: _User, now: int) -> None:
        user.busy = False
        self._busy -= 1
        if self._busy:
            return
        if self._closed is None or now >= self._stop or not self._may_send:
            self.done = True
        elif now >= self._chunk_end:  # all waited for all: the next chunk begins
            self._chunk_end = now + self._chunk
            active = [other for other in self._users if other.active]
            self._busy += len(active)
            for other in active:
                other.busy = True
            for other in active:
                self._next(other, now)

    # --- requests -----------------------------------------------------------------------------

    def _intend(self, user: _User, spec: RequestSpec, now: int) -> None:
        if now >= self._stop or not self._may_send:
            self._idle(user, now)
            return
        run = RequestRun(len(self.runs), spec, now, self._attempt_ended)
        self.runs.append(run)
        self._sender[run] = user
        self.open += 1
        self._acquire(run, now)

    def _acquire(self, run: RequestRun, now: int) -> None:
        if self._config.pool and not self._free:
            self._waiting.append(run)
            return
        self._free -= 1
        self._send(run, now)

    def _send(self, run: RequestRun, now: int) -> None:
        config = self.own.get(run.spec.tenant, self._config)
        if config.timeout:
            attempt = run.attempts + 1

            def give_up(at: int) -> None:
                if run.attempts == attempt and run.outcome is RunOutcome.PENDING:
                    self._server.time_out(run, at)

            at = now + round(config.timeout * SECOND)
            self._clock.at(at, Phase.SEND, run.number, give_up)
        self._server.send(run, now)

    def _attempt_ended(self, run: RequestRun, now: int) -> None:
        self._free += 1
        config = self.own.get(run.spec.tenant, self._config)
        failed = run.outcome is not RunOutcome.DONE
        if failed and run.attempts <= config.retries:
            self._hand_out(now)
            wait = config.wait_s(run.attempts) * self._rng.uniform(0.5, 1.0)
            heeded_ns = run.retry_after_ns if config.heeds_retry_after else 0
            at = now + max(round(wait * SECOND), heeded_ns, 1)
            self._clock.at(at, Phase.SEND, run.number, lambda at: self._retry(run, at))
            return
        self.open -= 1
        user = self._sender.pop(run)
        # After a request that failed for good the user waits before the next.
        wait = max(round(config.backoff * SECOND), 1) if failed else 0
        barges = self._config.pool and self._waiting and self._config.barging
        if barges and self._rng.random() < self._config.barging:
            self._next(user, now, wait)
            self._hand_out(now)
        else:
            self._hand_out(now)
            self._next(user, now, wait)

    def _retry(self, run: RequestRun, now: int) -> None:
        run.outcome = RunOutcome.PENDING
        self._acquire(run, now)

    def _hand_out(self, now: int) -> None:
        while self._waiting and self._free > 0:
            take = self._config.take
            if take == "fifo":
                run = self._waiting.popleft()
            elif take == "lifo":
                run = self._waiting.pop()
            else:
                index = self._rng.randrange(len(self._waiting))
                run = self._waiting[index]
                del self._waiting[index]
            self._free -= 1
            self._send(run, now)
