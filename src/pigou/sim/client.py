"""The client: when it means to send, whether it may, and what it makes of failures."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from random import Random
from typing import Literal, Protocol

import msgspec

from pigou.config import ConfigError
from pigou.request import SECOND
from pigou.sim.call import Call, Outcome
from pigou.sim.virtual_clock import EPOCH, Clock, Phase
from pigou.sim.workload import MOST_SECONDS, ClosedLoop, Job, OpenLoop, Session

#: Keys of client events, apart from those of calls.
_USERS = 2**40
#: Of a wait, more than which are over any limit.
_DOUBLINGS = 100


class ClientConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a client goes about it.

    Attributes:
        pool: connections, and so requests at once; 0 for no limit.
        take: who takes a freed one: `fifo`, `random` or `lifo` among those who wait.
        barging: probability that whoever freed it takes it again before any of them, if it has
            something to send.
        timeout: seconds after which an attempt is given up; 0 for never.
        retries: further attempts after one that failed.
        backoff: seconds before the first further attempt, doubled for each one more; half to all
            of it, at random.
    """

    pool: int = 0
    take: Literal["fifo", "random", "lifo"] = "fifo"
    barging: float = 0.0
    timeout: float = 0.0
    retries: int = 0
    backoff: float = 0.5

    def __post_init__(self) -> None:
        """Refuse clients that never send, or wait for ever."""
        for name in ("pool", "retries"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0")
        for name in ("timeout", "backoff"):
            if not 0.0 <= getattr(self, name) <= MOST_SECONDS:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it must be at least 0, and at most "
                    f"{MOST_SECONDS} seconds (a year)"
                )
        if not 0.0 <= self.barging < 1.0:
            raise ConfigError(f"barging is {self.barging}; it must be at least 0, and below 1")
        if self._retrying > MOST_SECONDS:
            raise ConfigError(
                f"retries is {self.retries}, and backoff {self.backoff} s, doubled each time: they "
                f"take over {MOST_SECONDS} seconds (a year); lower one of them"
            )

    @property
    def _retrying(self) -> float:
        """Seconds that a request takes at most whose every attempt runs into its timeout."""
        doubled = 2.0 ** min(self.retries, _DOUBLINGS) - 1.0
        return self.backoff * doubled + self.timeout * self.retries


class Server(Protocol):
    """Who serves calls."""

    def send(self, call: Call, now: int) -> None:
        """Begin an attempt at a call; its `on_end` is told when it is over."""
        ...

    def time_out(self, call: Call, now: int) -> None:
        """Give an attempt up for its time; `on_end` is told."""
        ...


@dataclass(slots=True, eq=False)
class _User:
    """Sends its jobs one after another; `busy` from the intention to the end of each."""

    number: int
    jobs: Iterator[Job]
    active: bool = True
    busy: bool = False
    sent: bool = False


class Client:
    """Sends a workload's jobs.

    Attributes:
        calls: what it meant to send so far, in the order of the intentions.
        done: whether nothing more will happen, or matter.
        open: calls that are not over.
        expected: calls that there will be; None where that depends on how they are served.
    """

    def __init__(
        self, workload: OpenLoop | ClosedLoop, config: ClientConfig, server: Server,
        clock: Clock, seed: int = 0,
    ) -> None:  # fmt: skip
        """Prepare; the first jobs are sent when the clock runs."""
        self.calls: list[Call] = []
        self.done = False
        self.open = 0
        self.expected = workload.jobs
        self._config, self._server, self._clock = config, server, clock
        self._rng = Random(seed)
        self._free = config.pool
        self._waiting: deque[Call] = deque()
        self._sender: dict[Call, _User] = {}
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
                self._join(chain.from_iterable(each.jobs for each in sessions), EPOCH)
        else:
            self._busy = len(workload.sessions)
            starts = ((EPOCH + each.start, number) for number, each in enumerate(workload.sessions))
            self._announce(iter(sorted(starts)), workload.sessions)

    # --- users --------------------------------------------------------------------------------

    def _join(self, jobs: Iterator[Job], at: int) -> None:
        """A user more, who will want to send at this time."""
        user = _User(len(self._users), jobs, busy=True)
        self._users.append(user)
        self._busy += 1
        self._clock.at(at, Phase.SEND, _USERS + user.number, lambda now: self._next(user, now))

    def _announce(self, starts: Iterator[tuple[int, int]], sessions: Sequence[Session]) -> None:
        """Tell the clock of the session that starts next; a heap of all would be slow."""
        found = next(starts, None)
        if found is None:
            return
        at, number = found
        user = _User(number, iter(sessions[number].jobs), busy=True)

        def start(now: int) -> None:
            self._announce(starts, sessions)
            self._next(user, now)

        self._clock.at(at, Phase.SEND, _USERS + number, start)

    def _start_closed(self, loop: ClosedLoop) -> None:
        self._limit = loop.requests or self._limit
        self._stop = EPOCH + round(loop.seconds * SECOND)
        self._chunk = round(loop.barrier * SECOND)
        self._chunk_end = EPOCH + self._chunk if self._chunk else 2**62
        self._draws = self._draw(loop)
        users, at = loop.phases[0][0], round(loop.ramp * SECOND)
        for number in range(users):
            self._join(self._draws, EPOCH + at * number // users)
        at += EPOCH
        for (_, seconds), (users, _) in pairwise(loop.phases):
            at += round(seconds * SECOND)
            self._clock.at(at, Phase.SEND, -1, partial(self._resize, users))
        self._clock.at(self._stop, Phase.SEND, -1, self._stopped)

    def _draw(self, loop: ClosedLoop) -> Iterator[Job]:
        think = round(loop.think * SECOND)
        while True:
            job = loop.lengths.draw(self._rng)
            yield replace(job, think=think) if think else job

    def _resize(self, users: int, now: int) -> None:
        """From now on there are so many users; one too many stops after its request."""
        for user in self._users:
            user.active = user.number < users
            if user.active and not user.busy and now < self._chunk_end:
                user.busy = True
                self._busy += 1
                self._next(user, now)
        while len(self._users) < users:
            self._join(self._draws, now)

    def _stopped(self, now: int) -> None:  # noqa: ARG002  (a clock event)
        """A closed loop sends no more."""
        assert self._closed is not None
        if not self._closed.drain or not self._busy:
            self.done = True

    def _next(self, user: _User, now: int, wait: int = 0) -> None:
        """A user wants to send its next job, after a wait."""
        job = None
        if user.active and now < min(self._stop, self._chunk_end) and self._more:
            job = next(user.jobs, None)
        if job is None:
            self._rest(user, now)
            return
        at = now + wait + (job.think if user.sent else 0)
        user.sent = True
        if at > now:
            self._clock.at(
                at, Phase.SEND, _USERS + user.number, lambda at: self._mean(user, job, at)
            )
        else:
            self._mean(user, job, now)

    @property
    def _more(self) -> bool:
        return len(self.calls) < self._limit

    def _rest(self, user: _User, now: int) -> None:
        """A user has nothing to send, now or for good."""
        user.busy = False
        self._busy -= 1
        if self._busy:
            return
        if self._closed is None or now >= self._stop or not self._more:
            self.done = True
        elif now >= self._chunk_end:  # all waited for all: the next chunk begins
            self._chunk_end = now + self._chunk
            rested = [each for each in self._users if each.active]
            self._busy += len(rested)
            for each in rested:
                each.busy = True
            for each in rested:
                self._next(each, now)

    # --- calls --------------------------------------------------------------------------------

    def _mean(self, user: _User, job: Job, now: int) -> None:
        """A user means to send a job now."""
        if now >= self._stop or not self._more:
            self._rest(user, now)
            return
        call = Call(len(self.calls), job, now, self._over)
        self.calls.append(call)
        self._sender[call] = user
        self.open += 1
        self._ask(call, now)

    def _ask(self, call: Call, now: int) -> None:
        """Send a call as soon as there is a connection."""
        if self._config.pool and not self._free:
            self._waiting.append(call)
            return
        self._free -= 1
        self._send(call, now)

    def _send(self, call: Call, now: int) -> None:
        if self._config.timeout:
            attempt = call.attempts + 1

            def give_up(at: int) -> None:
                if call.attempts == attempt and call.outcome is Outcome.PENDING:
                    self._server.time_out(call, at)

            at = now + round(self._config.timeout * SECOND)
            self._clock.at(at, Phase.SEND, call.number, give_up)
        self._server.send(call, now)

    def _over(self, call: Call, now: int) -> None:
        """An attempt is over: its connection is free."""
        self._free += 1
        config = self._config
        failed = call.outcome is not Outcome.DONE
        if failed and call.attempts <= config.retries:
            self._hand(now)
            wait = config.backoff * 2 ** (call.attempts - 1) * self._rng.uniform(0.5, 1.0)
            at = now + max(round(wait * SECOND), call.retry_after, 1)
            self._clock.at(at, Phase.SEND, call.number, lambda at: self._again(call, at))
            return
        self.open -= 1
        user = self._sender.pop(call)
        # Who failed for good does not come again at the same moment.
        wait = max(round(config.backoff * SECOND), 1) if failed else 0
        barges = config.pool and self._waiting and config.barging
        if barges and self._rng.random() < config.barging:
            self._next(user, now, wait)
            self._hand(now)
        else:
            self._hand(now)
            self._next(user, now, wait)

    def _again(self, call: Call, now: int) -> None:
        call.outcome = Outcome.PENDING
        self._ask(call, now)

    def _hand(self, now: int) -> None:
        """Give free connections to those who wait."""
        while self._waiting and self._free > 0:
            take = self._config.take
            if take == "fifo":
                call = self._waiting.popleft()
            elif take == "lifo":
                call = self._waiting.pop()
            else:
                place = self._rng.randrange(len(self._waiting))
                call = self._waiting[place]
                del self._waiting[place]
            self._free -= 1
            self._send(call, now)
