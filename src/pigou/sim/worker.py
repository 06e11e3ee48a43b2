"""A simulated worker: one EngineCore, whose steps take what a timing model says."""

from __future__ import annotations

from collections import deque
from typing import Literal

import numpy as np

from pigou.config import EngineConfig
from pigou.engine.core import EngineCore
from pigou.engine.errors import QueueFull, RequestTooLarge
from pigou.engine.plan import Effects, Plan, Result
from pigou.events import KVEvent
from pigou.request import Ints, Nanos
from pigou.sim.clock import Clock, Event, Phase
from pigou.sim.gaps import Gaps
from pigou.sim.kernels import Counts, Flags, count, untold
from pigou.sim.leg import Leg, Listener
from pigou.sim.timing import Batch, Timing

_NO_TIMES: Nanos = np.empty(0, dtype=np.int64)
_NOBODY: Ints = np.empty(0, dtype=np.int32)
#: Most steps of one plan; only the arrays of their times depend on it.
MOST_STEPS = 65536


class SimWorker:
    """Plans to its next local change, and is cut back when something reaches it.

    What reaches it waits for the end of the step under way, as the commands of a live worker do.
    So a plan of several steps is in the same state at each of its ends as single steps are, and
    the figures that can be read in between count those steps in (`passed`).

    KV events are published with the step that computes prompts, ends requests or preempts; those
    of plain decode steps (evictions) are published with the next of these.

    Attributes:
        number: its place in the fleet.
        name: its id in the fleet.
        core: what it computes next.
        gaps: between tokens of streams.
        steps: that were computed.
        busy: nanoseconds that they took.
    """

    def __init__(
        self, number: int, name: str, config: EngineConfig, timing: Timing, clock: Clock,
        listener: Listener, gaps: Gaps, *, ahead: bool = False, stepwise: bool = False,
    ) -> None:  # fmt: skip
        """Start with nothing to do.

        Args:
            number: its place in the fleet.
            name: its id in the fleet.
            config: of its core.
            timing: of its steps.
            clock: virtual.
            listener: told of what happens here.
            gaps: takes in those between the tokens of streams.
            ahead: a step is decided when the one before it begins, as by vLLM's asynchronous
                scheduler: what comes during a step counts from the second step after it.
            stepwise: plan a single step at a time.
        """
        self.number, self.name = number, name
        self.core = EngineCore(config)
        self.timing = timing
        self.gaps = gaps
        self.steps, self.busy = 0, 0
        self._clock, self._listener = clock, listener
        self._stepwise, self._ahead = stepwise, int(ahead)
        self._legs: dict[str, Leg] = {}
        self._owner: list[Leg | None] = [None] * config.max_seqs
        rows = config.max_seqs
        self._last: Nanos = np.zeros(rows, dtype=np.int64)
        self._produced: Counts = np.zeros(rows, dtype=np.int64)
        self._told: Counts = np.zeros(rows, dtype=np.int64)
        self._streams: Flags = np.zeros(rows, dtype=np.bool_)
        self._fresh: Flags = np.zeros(rows, dtype=np.bool_)
        self._names = [""] * config.max_seqs  # of the trips in the rows
        self._untold = False  # whether a step ended since tokens were told
        self._anew = 0  # rows whose first token is still to come
        self._rows: Ints = np.zeros(rows, dtype=np.int32)
        self._counts: Ints = np.zeros(rows, dtype=np.int32)
        self._plan: Plan | None = None
        self._ends: Nanos = _NO_TIMES
        self._begin = 0
        self._take = 0
        self._version = 0
        self._awake = False
        self._events: list[KVEvent] = []
        self._inbox: deque[tuple[int, Event]] = deque()  # after how many steps, what
        self._dead = False

    # --- what reaches it ----------------------------------------------------------------------

    def add(self, leg: Leg, now: int) -> None:
        """Take a leg in; the listener is told when the core refuses it."""
        self._legs[leg.request.id] = leg
        # The plan under way leaves the head of the queue waiting, and so everybody behind it.
        self._do(lambda at: self._add(leg, at), now, not self.core.would_wait(leg.request))

    def abort(self, leg: Leg, now: int) -> None:
        """End a leg, or let go of what is held for it; nothing more is heard of it."""
        leg.streams = leg.first = False
        if leg.row >= 0:
            if self._plan is not None and leg.row in self._plan.rows:
                self._count_passed(np.array([leg.row], dtype=np.int32))
            self._streams[leg.row] = False
            self._renew(leg.row, False)
        self._do(lambda _: self._abort(leg), now)

    def loaded(self, request: str, tokens: int, now: int) -> None:
        """The blocks of a leg's load arrived, or `tokens` of them."""
        self._do(lambda _: self._note(self.core.loaded(request, tokens)), now)

    def release(self, request: str, now: int) -> None:
        """Free the blocks that are held for a request."""
        self._do(lambda _: self._note(self.core.release(request)), now)

    def retime(self, timing: Timing, now: int) -> None:
        """Take another time for steps from the next one on."""

        def command(_: int) -> None:
            self.timing = timing

        self._do(command, now)

    def die(self) -> list[Leg]:
        """Stop for good; return the legs that it had, in the order in which they came."""
        legs, self._legs = list(self._legs.values()), {}
        for leg in legs:
            self.settle(leg)
        self.close()
        self._dead = True
        self._plan = None
        self._version += 1
        return legs

    def _do(self, command: Event, now: int, cut: bool = True) -> None:
        """Do something between two steps: now, or after the step in which it came, or after the
        one after that, which was decided already where steps are planned `ahead`.

        Without `cut` it may as well wait until the plan under way ends by itself.
        """
        if self._dead:
            return
        passed = 0
        if self._plan is not None:
            passed = self.passed()
            if passed and int(self._ends[passed - 1]) == now:
                self._take, passed = passed, 0
                self._end(now)
        if self._plan is not None:
            wait = passed + 1 + self._ahead
        elif self._ahead and not self._idle:
            wait = 1
        elif self._inbox:  # a step has just ended; first what came before
            wait = 0
        else:
            command(now)
            self._wake(now)
            return
        self._inbox.append((self.steps + wait, command))
        if cut and self._plan is not None and wait < self._take:
            self._until(wait)

    def _open(self, now: int) -> None:
        """Do what had to wait until now, or everything if there is nothing to wait for."""
        idle = self._idle
        while self._inbox and (idle or self._inbox[0][0] <= self.steps):
            self._inbox.popleft()[1](now)
            idle = idle or self._idle

    @property
    def _idle(self) -> bool:
        """Whether nobody computes here."""
        return self.core.running == self.core.loading

    def _add(self, leg: Leg, now: int) -> None:
        try:
            self.core.add(leg.request)
        except (ValueError, RequestTooLarge, QueueFull) as error:
            del self._legs[leg.request.id]
            self._listener.refused(leg, error, now)

    def _abort(self, leg: Leg) -> None:
        self._note(self.core.abort(leg.request.id))
        if self._legs.pop(leg.request.id, None) is not None and leg.row >= 0:
            self._leave(leg)

    # --- what can be read ---------------------------------------------------------------------

    def settle(self, leg: Leg) -> None:
        """Write to a leg what it has yielded by now, and how much of that was told."""
        row = leg.row
        if row < 0:
            return
        leg.produced, leg.told = int(self._produced[row]), int(self._told[row])
        if self._plan is not None and row in self._plan.rows:
            leg.produced += self.passed()

    def told(self) -> list[tuple[str, int]]:
        """Return the streams (ids of their trips) that have tokens which nobody was told of, and
        how many; tell them.
        """
        plan = self._plan
        if not self.core.running or (plan is None and not self._untold):
            return []
        rows, passed = _NOBODY, 0
        if plan is not None and self._take > 1:
            passed = self.passed()
            if passed:
                rows = plan.rows
        if not passed and not self._untold:
            return []
        self._untold = False
        found = untold(
            rows, passed, self._produced, self._told, self._streams, self._rows, self._counts
        )
        names = self._names
        who, counts = self._rows[:found].tolist(), self._counts[:found].tolist()
        return [(names[row], n) for row, n in zip(who, counts, strict=True)]

    def load(self, now: int) -> tuple[int, int, float]:
        """Return running and waiting requests, and the share of blocks in use."""
        core = self.core
        step = came = 0
        if self._plan is not None and self._take > 1:
            step = self.passed()
            # Of what came, the plan under way was not cut for those who only wait.
            came = sum(after <= self.steps + step for after, _ in self._inbox)
            if step and int(self._ends[step - 1]) == now:
                step -= 1
        return core.running, core.waiting + came, core.usage_at(step)

    def passed(self) -> int:
        """Steps of the plan under way that have ended by now."""
        if self._plan is None:
            return 0
        mine = (Phase.STEP, self.number) < self._clock.place
        side: Literal["left", "right"] = "right" if mine else "left"
        return int(self._ends[: self._take].searchsorted(self._clock.now, side))

    def close(self) -> None:
        """The run is over: count the steps of the plan under way that have ended."""
        steps = self.passed()
        if self._plan is not None and steps:
            self.steps += steps
            self.busy += int(self._ends[steps - 1]) - self._begin
            self._count_passed(self._plan.rows)

    # --- steps --------------------------------------------------------------------------------

    def _wake(self, now: int) -> None:
        """Plan at the end of this moment, if nothing is under way."""
        if self._plan is None and not self._awake and not self._dead:
            self._awake = True
            self._clock.at(now, Phase.PLAN, self.number, self._start)

    def _start(self, now: int) -> None:
        self._awake = False
        if self._plan is None and not self._dead:
            self._schedule(now)

    def _schedule(self, now: int) -> None:
        plan = self.core.schedule(now)
        self._admit(plan, now)
        if not plan:
            return
        repeat = min(plan.repeat, MOST_STEPS)
        if repeat > 1:
            if self._stepwise or plan.started or (self._anew and self._fresh[plan.rows].any()):
                repeat = 1  # first tokens are told when they come
            elif self._inbox:
                repeat = max(1, min(repeat, self._inbox[0][0] - self.steps))
        took = self.timing.durations(Batch(plan.counts, plan.kv_lens, plan.samples), repeat)
        ends = now + (took if repeat == 1 else took.cumsum())
        self._run(plan, now, ends)

    def _run(self, plan: Plan, begin: int, ends: Nanos) -> None:
        self._plan, self._begin, self._ends = plan, begin, ends
        self._until(len(ends))

    def _until(self, steps: int) -> None:
        """The plan under way ends after so many steps."""
        self._take = steps
        self._version += 1
        version = self._version
        self._clock.at(
            int(self._ends[steps - 1]), Phase.STEP, self.number,
            lambda now: self._end(now) if version == self._version else None,
        )  # fmt: skip

    def _end(self, now: int) -> None:
        """The plan under way ends, after the steps that it was left."""
        plan, steps = self._plan, self._take
        assert plan is not None
        self._plan = None
        self._version += 1
        effects = self.core.apply(plan, Result(steps=steps))
        self.steps += steps
        self.busy += now - self._begin
        self._events += effects.events
        if self._events and (
            effects.finished
            or plan.preempted
            or plan.started
            or (plan.repeat == 1 and int(plan.counts.max()) > 1)
        ):
            events, self._events = tuple(self._events), []
            self._listener.cache_changed(self.name, events, now)
        self._count(plan, steps, effects, now)
        for finished in effects.finished:
            leg = self._legs.pop(finished.request)
            self._leave(leg)
            self._listener.finished(leg, finished, now)
        self._open(now)
        self._wake(now)

    def _count(self, plan: Plan, steps: int, effects: Effects, now: int) -> None:
        """Count the tokens of streams, and the gaps between them."""
        self._untold = True
        gaps, first = self.gaps, self._rows
        begun = count(
            plan.rows, effects.tokens, self._ends, steps, self._produced, self._last,
            self._streams, self._fresh, first, gaps.histogram, gaps.sums,
        )  # fmt: skip
        for row in first[:begun].tolist() if begun else ():
            leg = self._owner[row]
            assert leg is not None
            self._fresh[row] = leg.first = False
            self._anew -= 1
            self._listener.first_token(leg, now)

    def _count_passed(self, rows: Ints) -> None:
        """Count the gaps of rows whose plan will not be counted for them to its end."""
        steps, gaps = self.passed(), self.gaps
        if steps:
            tokens = np.full(len(rows), steps, dtype=np.int32)
            count(
                rows, tokens, self._ends, steps, self._produced, self._last,
                self._streams & ~self._fresh, self._fresh, self._rows, gaps.histogram, gaps.sums,
            )  # fmt: skip
            self._produced[rows] -= steps  # these are counted when the plan ends

    def _note(self, effects: Effects) -> None:
        self._events += effects.events

    def _admit(self, plan: Plan, now: int) -> None:
        """Note who lost a row, who took one, and begin the loads."""
        for request in plan.preempted:
            leg = self._legs[request]
            leg.trip.call.preemptions += 1
            self._leave(leg)
        for load in plan.loads:
            leg = self._legs[load.request]
            self._occupy(leg, load.row)
            self._listener.wanted(leg, load, now)
        for started in plan.started:
            leg = self._legs[started.request]
            # One that was loaded may lose its row in the same moment, or have it already.
            if leg.row < 0 and started.request not in plan.preempted:
                self._occupy(leg, started.row)

    def _occupy(self, leg: Leg, row: int) -> None:
        """Give a leg a row: its first, or another one after a preemption."""
        leg.row = row
        self._owner[row] = leg
        self._names[row] = leg.trip.id
        self._untold = True
        self._produced[row], self._told[row], self._last[row] = leg.produced, leg.told, leg.last
        self._streams[row] = leg.streams
        self._renew(row, leg.streams and leg.first)

    def _leave(self, leg: Leg) -> None:
        """Take a leg's row, and keep its figures."""
        row = leg.row
        leg.produced, leg.told = int(self._produced[row]), int(self._told[row])
        leg.last = int(self._last[row])
        leg.row = -1
        self._owner[row] = None
        self._streams[row] = False
        self._renew(row, False)

    def _renew(self, row: int, fresh: bool) -> None:
        """Note whether a row's first token is still to come."""
        self._anew += fresh - bool(self._fresh[row])
        self._fresh[row] = fresh
