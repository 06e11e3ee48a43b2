"""A simulated worker: one EngineCore, whose steps take what a timing model says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, TypeAlias

import numpy as np

from pigou.config import EngineConfig
from pigou.engine.checks import QueueFull, RequestTooLarge
from pigou.engine.core import EngineCore
from pigou.engine.plan import Effects, Plan, Result
from pigou.events import KVEvent
from pigou.kv.tiers import Tiers
from pigou.request import Ints, Nanos, Request
from pigou.sim.leg import Leg, Listener
from pigou.sim.streams import Counts, Gaps, Streams
from pigou.sim.tiers import TierLinks
from pigou.sim.timing import Moments, Timing, ends, varies
from pigou.sim.virtual_clock import Clock, Event, Inbox, Phase

#: Workers by number whose KV events have not all been published.
Behind: TypeAlias = "dict[int, SimWorker]"
_NO_TIMES: Nanos = np.empty(0, dtype=np.int64)
_NOBODY: Ints = np.empty(0, dtype=np.int32)
#: Most steps of one plan; only the arrays of their times depend on it.
MOST_STEPS = 65536
_STEP, _PLAN = int(Phase.STEP), int(Phase.PLAN)  # quicker to look up, and to compare


class SimWorker:
    """Plans to its next local change, and is cut back when something reaches it.

    What reaches it waits for the end of the step under way, as the commands of a live worker do.
    So a plan of several steps is in the same state at each of its ends as single steps are, and
    the figures that can be read in between count those steps in (`passed`).

    KV events are published with the step that computes prompts, ends requests or preempts; those
    of plain decode steps (evictions) are published with the next of these. A plan of many chunks
    of a prompt publishes them when somebody is about to look (`catch_up`), or when it ends.

    Attributes:
        number: its place in the fleet.
        name: its id in the fleet.
        core: what it computes next.
        steps: that were computed.
        busy: nanoseconds that they took.
    """

    def __init__(
        self, number: int, name: str, config: EngineConfig, timing: Timing, clock: Clock,
        listener: Listener, gaps: Gaps, *, ahead: bool = False, stepwise: bool = False,
        behind: Behind | None = None, tiers: Tiers | None = None, seed: int = 0,
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
            behind: where it says that it has events to publish before they are looked at
                (`catch_up`); with None chunks of prompts are single steps.
            tiers: beyond its device; None for none.
            seed: of how alike steps differ.
        """
        self.number, self.name = number, name
        self.core = EngineCore(config, tiers=tiers)
        self._links = (
            None if tiers is None else TierLinks(self.core, tiers, number, clock, self._tell)
        )
        self.timing, self._varies = timing, varies(timing)
        self.steps, self.busy = 0, 0
        self._clock, self._listener = clock, listener
        self._stepwise, self._ahead = stepwise, int(ahead)
        self._behind = behind
        self._legs: dict[str, Leg] = {}
        self._streams = Streams(config.max_seqs, gaps)
        self._plan: Plan | None = None
        self._yield: Ints = _NOBODY  # rows that yield a token in each of its steps, if many
        self._ends: Nanos = _NO_TIMES
        self._begin = self._take = 0
        self._soon = 0  # when its first step ends
        self._chunks = False  # whether the plan under way computes several chunks
        self._version, self._awake = 0, False
        self._events: list[KVEvent] = []
        self._inbox, self._dead = Inbox(), False
        self._moments = Moments(seed, number)

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
            if self._plan is not None and leg.row in self._yield:
                self._count_passed(np.array([leg.row], dtype=np.int32))
            self._streams.drop(leg.row)
        self._do(lambda _: self._abort(leg), now)

    def loaded(self, request: str, tokens: int, now: int) -> None:
        """The blocks of a leg's load arrived, or `tokens` of them."""
        self._do(lambda _: self._note(self.core.loaded(request, tokens)), now)

    def lend(self, request: Request, told: Callable[[int, int], None], now: int) -> None:
        """Hold what is cached of a prompt; `told` hears how many blocks, and when.

        Nobody hears anything of a worker that dies before.
        """
        self._do(lambda at: told(len(self.core.hold_cached(request, at)), at), now)

    def release(self, request: str, now: int) -> None:
        """Free the blocks that are held for a request."""
        self._do(lambda _: self._note(self.core.release(request)), now)

    def retime(self, timing: Timing, now: int) -> None:
        """Take another time for steps from the next one on."""

        def command(_: int) -> None:
            self.timing, self._varies = timing, varies(timing)

        self._do(command, now)

    def die(self) -> list[Leg]:
        """Stop for good; return the legs that it had, in the order in which they came."""
        self.catch_up()
        legs, self._legs = list(self._legs.values()), {}
        for leg in legs:
            self.settle(leg)
        self.close()
        self._dead = True
        self._forget()
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
            if passed and self._ends.item(passed - 1) == now:
                self._take, passed = passed, 0
                self._end(now)
        if self._plan is not None:
            wait = passed + 1 + self._ahead
        elif self._ahead and not self._idle:
            wait = 1
        elif self._inbox.waiting:  # a step has just ended; first what came before
            wait = 0
        else:
            command(now)
            self._wake(now)
            return
        self._inbox.put(self.steps + wait, command)
        if cut and self._plan is not None and wait < self._take:
            self._until(wait)

    @property
    def _idle(self) -> bool:
        """Whether nobody computes here."""
        return not self.core.computing

    def _add(self, leg: Leg, now: int) -> None:
        try:
            self.core.add(leg.request)
        except (ValueError, RequestTooLarge, QueueFull) as error:
            del self._legs[leg.request.id]
            self._listener.refused(leg, error, now)

    def _abort(self, leg: Leg) -> None:
        self._note(self.core.abort(leg.request.id))
        if self._legs.pop(leg.request.id, None) is not None and leg.row >= 0:
            self._streams.leave(leg)

    # --- what can be read ---------------------------------------------------------------------

    def settle(self, leg: Leg) -> None:
        """Write to a leg what it has yielded by now, and how much of that was told."""
        if leg.row >= 0:
            under = self._plan is not None and leg.row in self._yield
            self._streams.settle(leg, self.passed() if under else 0)

    def told(self, now: int, seats: Counts, counts: Counts, size: int) -> int:
        """Write streams (their seats) that have tokens which nobody was told of, and how many, from
        index `size` on; return `size` and how many streams there are. They are told then.
        """
        told, take = self._streams.told, self._take
        if self._plan is not None and take > 1:
            mine = (_STEP, self.number) < self._clock.place
            return told(self._yield, self._ends, take, now, mine, seats, counts, size)
        if not self._streams.untold:
            return size
        return told(_NOBODY, _NO_TIMES, 0, now, False, seats, counts, size)

    def load(self, now: int) -> tuple[int, int, float]:
        """Return running and waiting requests, and the share of blocks in use."""
        core = self.core
        step = came = 0
        if self._plan is not None and self._take > 1:
            step = self.passed()
            # Of what came, the plan under way was not cut for those who only wait.
            came = self._inbox.until(self.steps + step)
            if step and self._ends.item(step - 1) == now:
                step -= 1
        return core.running, core.waiting + came, core.usage_at(step)

    def passed(self) -> int:
        """Steps of the plan under way that have ended by now."""
        if self._plan is None:
            return 0
        mine = (_STEP, self.number) < self._clock.place
        side: Literal["left", "right"] = "right" if mine else "left"
        return int(self._ends[: self._take].searchsorted(self._clock.now, side))

    def close(self) -> None:
        """The run is over: count the steps of the plan under way that have ended."""
        steps = self.passed()
        if self._plan is not None and steps:
            self.steps += steps
            self.busy += self._ends.item(steps - 1) - self._begin
            self._count_passed(self._yield)

    def catch_up(self) -> None:
        """Publish the KV events of the chunks that have been computed by now.

        It ends the plan under way where its last chunk ended, and plans what it is at.
        """
        if not self._chunks or self._soon > self._clock.now:
            return
        steps = self.passed()
        if steps:
            self._take = steps
            at = self._ends.item(steps - 1)
            self._settle(at)
            if at < self._clock.now:
                self._schedule(at)
            else:
                self._wake(at)

    # --- steps --------------------------------------------------------------------------------

    def _wake(self, now: int) -> None:
        """Plan at the end of this moment, if nothing is under way."""
        if self._plan is None and not self._awake and not self._dead:
            self._awake = True
            self._clock.at(now, _PLAN, self.number, self._start)

    def _start(self, now: int) -> None:
        self._awake = False
        if self._plan is None and not self._dead:
            self._schedule(now)

    def _schedule(self, now: int) -> None:
        if self._links is not None and self.core.waiting:
            self._links.measure(now, self._notice())
        plan = self.core.schedule(now)
        if self._links is not None:
            self._links.make(plan.moves, now)
            self._links.expect(now)
        if plan.started or plan.loads or plan.preempted:
            self._admit(plan, now)
        if not plan:
            if self._inbox.waiting and self._idle:  # for the end of a step that there is not
                self._inbox.open(self.steps, now, lambda: self._idle)
                self._wake(now)
            return
        repeat = 1 if self._stepwise else min(plan.repeat, MOST_STEPS)
        chunks, yields = repeat > 1 and plan.counts.item(-1) > 1, plan.rows
        if chunks:
            yields = yields[:-1]
        if repeat > 1:
            none = self._behind is None if chunks else bool(plan.started)
            if none or self._streams.begins(yields):
                repeat = 1  # first tokens are told when they come
            elif self._inbox.waiting:
                repeat = max(1, min(repeat, self._inbox.next - self.steps))
        self._plan, self._begin, self._yield = plan, now, yields
        moment = self._moments.of(plan, self.steps) if self._varies else None
        self._ends = ends(self.timing, now, plan, repeat, moment)
        self._chunks, self._soon = chunks and repeat > 1, self._ends.item(0)
        if self._chunks and self._behind is not None:
            self._behind[self.number] = self
        self._until(repeat)

    def _forget(self) -> None:
        """No plan is under way any more."""
        self._plan = None
        self._version += 1
        if self._chunks and self._behind is not None:
            self._chunks = False
            del self._behind[self.number]

    def _until(self, steps: int) -> None:
        """The plan under way ends after so many steps."""
        self._take = steps
        self._version += 1
        version = self._version
        self._clock.at(self._ends.item(steps - 1), _STEP, self.number, partial(self._over, version))

    def _end(self, now: int) -> None:
        """The plan under way ends, after the steps that it was left."""
        self._settle(now)
        self._wake(now)

    def _over(self, version: int, now: int) -> None:
        """The plan under way ends by itself, unless it has ended in another way."""
        if version != self._version:
            return
        self._settle(now)
        if self._clock.last(now) and not self._awake:  # what `_wake` asks for would come next
            self._clock.place = (_PLAN, self.number)
            self._start(now)
        else:
            self._wake(now)

    def _settle(self, now: int) -> None:
        """Take in what the steps of the plan brought, and do what waited for their end."""
        plan, steps = self._plan, self._take
        assert plan is not None
        self._forget()
        effects = self.core.apply(plan, Result(steps=steps))
        self.steps += steps
        self.busy += now - self._begin
        self._events += effects.events
        if self._events and (
            effects.finished or plan.preempted or plan.started or max(plan.counts.tolist()) > 1
        ):
            events, self._events = tuple(self._events), []
            self._listener.cache_changed(self.name, events, now)
        for leg in self._streams.count(plan.rows, effects.tokens, self._ends, steps):
            self._listener.first_token(leg, now)
        for finished in effects.finished:
            leg = self._legs.pop(finished.request)
            self._streams.leave(leg)
            self._listener.finished(leg, finished, now)
        if self._inbox.waiting:
            self._inbox.open(self.steps, now, lambda: self._idle)

    def _count_passed(self, rows: Ints) -> None:
        """Count the gaps of rows whose plan will not be counted for them to its end."""
        steps = self.passed()
        if steps:
            self._streams.count_passed(rows, self._ends, steps)

    def _notice(self) -> int:
        """Return the nanoseconds until what happens is taken note of, mostly: the steps' ends."""
        if self._idle or not len(self._ends):
            return 0
        step = self._ends.item(0) - self._begin
        return step // 2 + self._ahead * step

    def _tell(self, call: Callable[[int], Effects], now: int) -> None:
        """Call the core between two steps."""
        self._do(lambda at: self._note(call(at)), now)

    def _note(self, effects: Effects) -> None:
        self._events += effects.events

    def _admit(self, plan: Plan, now: int) -> None:
        """Note who lost a row, who took one, and begin the loads."""
        for request in plan.preempted:
            leg = self._legs[request]
            leg.trip.call.preemptions += 1
            self._streams.leave(leg)
        for load in plan.loads:
            if len(load.tiers):
                assert self._links is not None
                self._links.restore(load, now)
            if load.row < 0:  # for a session that is away
                continue
            leg = self._legs[load.request]
            self._streams.occupy(leg, load.row)
            if not len(load.tiers):
                self._listener.wanted(leg, load, now)
        for started in plan.started:
            leg = self._legs[started.request]
            # One that was loaded may lose its row in the same moment, or have it already.
            if leg.row < 0 and started.request not in plan.preempted:
                self._streams.occupy(leg, started.row)
