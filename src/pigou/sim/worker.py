"""A simulated worker: one EngineCore, with a timing model in place of the executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import numpy as np

from pigou.config import EngineConfig
from pigou.engine.checks import QueueFull, RequestTooLarge
from pigou.engine.core import EngineCore
from pigou.engine.plan import Effects, Plan, Result
from pigou.kv.tiers import Tiers
from pigou.request import Counts, Ints, KVEvent, Nanos, Request
from pigou.sim.drafts import SimDrafts
from pigou.sim.request_run import Leg, Listener, Publish
from pigou.sim.streams import ITLHistogram, Streams
from pigou.sim.tiers import TierLinks
from pigou.sim.timing import StepKeys, Timing, step_end_times, varies
from pigou.sim.virtual_clock import Clock, Event, Inbox, Phase

#: Workers by number that have KV events to publish.
LaggingWorkers: TypeAlias = "dict[int, SimWorker]"
_NO_TIMES: Nanos = np.empty(0, dtype=np.int64)
_NO_ROWS: Ints = np.empty(0, dtype=np.int32)
#: Most steps of one plan; only the arrays of their times depend on it.
MAX_STEPS = 65536
_STEP, _PLAN = int(Phase.STEP), int(Phase.PLAN)  # quicker to look up, and to compare


@dataclass(slots=True)
class StepMeter:
    """Counts of one worker, since its start."""

    prefill_steps: int = 0
    prefill_ns: int = 0
    prefill_tokens: int = 0
    decode_stall_ns: int = 0  # longest step without a prompt since `take_stall`; mean of a plan

    def count(self, plan: Plan, steps: int, ns: int) -> None:
        """Count steps of a plan, and their nanoseconds."""
        if plan.counts.item(-1) > 1 and not len(plan.drafts):
            self.prefill_steps += steps
            self.prefill_ns += ns
            self.prefill_tokens += steps * plan.chunk_tokens
        elif steps and ns // steps > self.decode_stall_ns:
            self.decode_stall_ns = ns // steps

    def take_stall(self) -> int:
        """Return `decode_stall_ns`, and begin anew."""
        stall_ns, self.decode_stall_ns = self.decode_stall_ns, 0
        return stall_ns


class SimWorker:
    """Plans to its next local change; a command cuts the plan at the end of the current step.

    KV events are published with steps that compute, end or preempt; a chunked prompt's before the
    control plane looks (`catch_up`).
    """

    drafts: SimDrafts | None = None  # speculation

    def __init__(
        self, number: int, config: EngineConfig, timing: Timing, clock: Clock,
        listener: Listener, publish: Publish, itl: ITLHistogram, *, ahead: bool = False,
        stepwise: bool = False, lagging: LaggingWorkers | None = None,
        tiers: Tiers | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        """Start idle; `ahead` plans a step as the one before begins (asynchronous scheduling).

        `lagging` holds workers with unpublished events; without it prompt chunks are single steps.
        """
        self.number = number
        self.core = EngineCore(config, tiers=tiers)
        self.links = (
            None if tiers is None else TierLinks(self.core, tiers, number, clock, self.call_core)
        )
        self.timing, self._varies = timing, varies(timing)
        self.steps, self.busy_ns, self.meter = 0, 0, StepMeter()
        self._clock, self._listener, self._publish = clock, listener, publish
        self._stepwise, self._ahead = stepwise, int(ahead)
        self._lagging = lagging
        self._legs: dict[str, Leg] = {}
        self._streams = Streams(config.max_seqs, itl)
        self._plan: Plan | None = None
        self._yield_rows: Ints = _NO_ROWS  # rows that yield a token in each of its steps, if many
        self._end_times: Nanos = _NO_TIMES
        self._begin_ns = self._end_step = 0
        self._first_end_ns = 0  # end of the plan's first step, ns
        self._many_chunks = False  # whether the plan under way computes several chunks
        self._version, self._planned = 0, False
        self._events: list[KVEvent] = []
        self._inbox, self._dead = Inbox(), False
        self._step_keys = StepKeys(seed, number)

    # --- commands -----------------------------------------------------------------------------

    def add(self, leg: Leg, now: int) -> None:
        """Take a leg in; the listener hears if the core refuses it."""
        self._legs[leg.request.id] = leg
        # The plan under way leaves the head of the queue waiting, and so all others.
        self._between_steps(
            lambda at: self._add(leg, at), now, not self.core.would_wait(leg.request)
        )

    def abort(self, leg: Leg, now: int) -> None:
        """Abort a leg, or free its held blocks; the listener gets nothing more."""
        leg.streams = leg.first = False
        if leg.row >= 0:
            if self._plan is not None and leg.row in self._yield_rows:
                self._count_passed(np.array([leg.row], dtype=np.int32))
            self._streams.drop(leg.row)
        self._between_steps(lambda _: self._abort(leg), now)

    def loaded(self, request: str, tokens: int, now: int) -> None:
        """Take in the arrived blocks of a leg's load, which hold `tokens` tokens."""
        self._between_steps(lambda _: self._add_events(self.core.loaded(request, tokens)), now)

    def hold_cached(self, request: Request, on_held: Callable[[int, int], None], now: int) -> None:
        """Hold the cached blocks of a prompt; `on_held` gets their number and the time."""
        self._between_steps(lambda at: on_held(len(self.core.hold_cached(request, at)), at), now)

    def release(self, request: str, now: int) -> None:
        """Free the blocks held for a request."""
        self._between_steps(lambda _: self._add_events(self.core.release(request)), now)

    def retime(self, timing: Timing, now: int) -> None:
        """Use another timing model from the next step on."""

        def command(_: int) -> None:
            self.timing, self._varies = timing, varies(timing)

        self._between_steps(command, now)

    def die(self) -> list[Leg]:
        """Stop for good; return its legs in the order of their arrival."""
        self.catch_up()
        legs, self._legs = list(self._legs.values()), {}
        for leg in legs:
            self.settle(leg)
        self.close()
        self._dead = True
        self._end_plan()
        return legs

    def _between_steps(self, command: Event, now: int, cut: bool = True) -> None:
        """Run a command between two steps: now, or after the step under way."""
        if self._dead:
            return
        passed = 0
        if self._plan is not None:
            passed = self.passed()
            if passed and self._end_times.item(passed - 1) == now:
                self._end_step, passed = passed, 0
                self._apply(now)
                self._plan_next(now)
        if self._plan is not None:
            wait = passed + 1 + self._ahead
        elif self._ahead and not self._idle:
            wait = 1
        elif self._inbox.waiting:  # a step has just ended; earlier commands go first
            wait = 0
        else:
            command(now)
            self._plan_next(now)
            return
        self._inbox.put(self.steps + wait, command)
        if cut and self._plan is not None and wait < self._end_step:
            self._end_after(wait)

    @property
    def _idle(self) -> bool:
        return not self.core.computing

    def _add(self, leg: Leg, now: int) -> None:
        try:
            self.core.add(leg.request)
        except (ValueError, RequestTooLarge, QueueFull) as error:
            del self._legs[leg.request.id]
            self._listener.refused(leg, error, now)

    def _abort(self, leg: Leg) -> None:
        self._add_events(self.core.abort(leg.request.id))
        if self._legs.pop(leg.request.id, None) is not None and leg.row >= 0:
            self._streams.leave(leg)

    # --- figures ------------------------------------------------------------------------------

    def settle(self, leg: Leg) -> None:
        """Write a leg's tokens so far, with `passed` steps of its plan."""
        if leg.row >= 0:
            in_plan = self._plan is not None and leg.row in self._yield_rows
            self._streams.settle(leg, self.passed() if in_plan else 0)

    def publish_tokens(self, now: int, slots: Counts, counts: Counts, size: int) -> int:
        """Publish the new tokens of streams by now, as `Streams.publish` does."""
        rows, end_times, steps = self._yield_rows, self._end_times, self._end_step
        if self._plan is None or steps <= 1:
            if not self._streams.unpublished:
                return size
            rows, end_times, steps = _NO_ROWS, _NO_TIMES, 0
        return self._streams.publish(rows, end_times, steps, now, slots, counts, size)

    def load(self, now: int) -> tuple[int, int, float]:
        """Return running and waiting requests, and the share of blocks in use."""
        core = self.core
        step = added = 0
        if self._plan is not None and self._end_step > 1:
            step = self.passed()
            # Requests that only wait did not cut the plan under way.
            added = self._inbox.until(self.steps + step)
            if step and self._end_times.item(step - 1) == now:
                step -= 1
        return core.running, core.waiting + added, core.usage_at(step)

    def passed(self) -> int:
        """Ended steps of the current plan."""
        if self._plan is None:
            return 0
        inclusive = (_STEP, self.number) < self._clock.position
        side: Literal["left", "right"] = "right" if inclusive else "left"
        return int(self._end_times[: self._end_step].searchsorted(self._clock.now, side))

    def progress(self) -> tuple[int, int]:
        """Return the steps computed by now, and their time in nanoseconds."""
        steps = self.passed()
        end_ns: int = self._end_times.item(steps - 1) if steps else self._begin_ns
        return self.steps + steps, self.busy_ns + end_ns - self._begin_ns

    def close(self) -> None:
        """Count the current plan's ended steps, at the end of the run."""
        if self.passed():
            self.steps, self.busy_ns = self.progress()
            self._count_passed(self._yield_rows)

    def catch_up(self) -> None:
        """Publish KV events of the chunks computed by now; the rest of the plan is planned anew."""
        if not self._many_chunks or self._first_end_ns > self._clock.now:
            return
        steps = self.passed()
        if steps:
            self._end_step = steps
            at = self._end_times.item(steps - 1)
            self._apply(at)
            if at < self._clock.now:
                self._schedule(at)
            else:
                self._plan_next(at)

    # --- steps --------------------------------------------------------------------------------

    def _plan_next(self, now: int) -> None:
        if self._plan is None and not self._planned and not self._dead:
            self._planned = True
            self._clock.at(now, _PLAN, self.number, self._plan_now)

    def _plan_now(self, now: int) -> None:
        self._planned = False
        if self._plan is None and not self._dead:
            self._schedule(now)

    def _schedule(self, now: int) -> None:
        if self.links is not None and self.core.waiting:
            self.links.measure(now, self._notice_ns())
        plan = self.core.schedule(now, drafts=None if self.drafts is None else self.drafts.offers)
        if self.links is not None:
            self.links.make(plan.moves, now)
            self.links.expect(now)
        if plan.started or plan.loads or plan.preempted:
            self._admit(plan, now)
        if not plan:
            if self._inbox.waiting and self._idle:  # no step will end
                self._inbox.open(self.steps, now, lambda: self._idle)
                self._plan_next(now)
            return
        repeat = 1 if self._stepwise or plan.drafts_pay else min(plan.repeat, MAX_STEPS)
        chunks = repeat > 1 and plan.counts.item(-1) > 1
        yield_rows = plan.rows[:-1] if chunks else plan.rows
        if repeat > 1:
            uncut = self._lagging is None if chunks else bool(plan.started)
            if uncut or self._streams.awaits_first(yield_rows):
                repeat = 1  # the listener hears of first tokens at once
            elif self._inbox.waiting:
                repeat = max(1, min(repeat, self._inbox.next - self.steps))
        self._plan, self._begin_ns, self._yield_rows = plan, now, yield_rows
        step_key = self._step_keys.of(plan, self.steps) if self._varies else None
        self._end_times = step_end_times(self.timing, now, plan, repeat, step_key)
        if self.drafts is not None:
            self._end_times += self.drafts.draft(plan, self.timing)
        self._many_chunks, self._first_end_ns = chunks and repeat > 1, self._end_times.item(0)
        if self._many_chunks and self._lagging is not None:
            self._lagging[self.number] = self
        self._end_after(repeat)

    def _end_plan(self) -> None:
        self._plan = None
        self._version += 1
        if self._many_chunks and self._lagging is not None:
            self._many_chunks = False
            del self._lagging[self.number]

    def _end_after(self, steps: int) -> None:
        self._end_step = steps
        self._version += 1
        version = self._version
        end_ns = self._end_times.item(steps - 1)
        self._clock.at(end_ns, _STEP, self.number, partial(self._plan_ended, version))

    def _plan_ended(self, version: int, now: int) -> None:
        """End the plan under way by itself, unless it has ended in another way."""
        if version != self._version:
            return
        self._apply(now)
        if self._clock.last(now) and not self._planned:  # the event of `_plan_next` would be next
            self._clock.position = (_PLAN, self.number)
            self._plan_now(now)
        else:
            self._plan_next(now)

    def _apply(self, now: int) -> None:
        plan, steps = self._plan, self._end_step
        assert plan is not None
        self._end_plan()
        result = Result(steps=steps)
        if self.drafts is not None:
            result = self.drafts.verify(plan, self._begin_ns, self._end_times[:steps])
        effects = self.core.apply(plan, result)
        self.steps += steps
        self.busy_ns += now - self._begin_ns
        self.meter.count(plan, steps, now - self._begin_ns)
        self._events += effects.events
        if self._events and (
            effects.finished or plan.preempted or plan.started or max(plan.counts.tolist()) > 1
        ):
            events, self._events = tuple(self._events), []
            self._publish(events, now)
        for leg in self._streams.count(plan.rows, effects.tokens, self._end_times, steps):
            self._listener.first_token(leg, now)
        for finished in effects.finished:
            leg = self._legs.pop(finished.request)
            self._streams.leave(leg)
            self._listener.finished(leg, finished, now)
        if self._inbox.waiting:
            self._inbox.open(self.steps, now, lambda: self._idle)

    def _count_passed(self, rows: Ints) -> None:
        steps = self.passed()
        if steps:
            self._streams.count_passed(rows, self._end_times, steps)

    def _notice_ns(self) -> int:
        """Return the typical nanoseconds until a command runs: until a step's end."""
        if self._idle or not len(self._end_times):
            return 0
        step = self._end_times.item(0) - self._begin_ns
        return step // 2 + self._ahead * step

    def call_core(self, call: Callable[[int], Effects], now: int) -> None:
        """Call the core between two steps."""
        self._between_steps(lambda at: self._add_events(call(at)), now)

    def _add_events(self, effects: Effects) -> None:
        self._events += effects.events

    def _admit(self, plan: Plan, now: int) -> None:
        """Take rows from preempted legs, give rows to started ones, and begin the loads."""
        for request in plan.preempted:
            leg = self._legs[request]
            leg.attempt.run.preemptions += 1
            self._streams.leave(leg)
        for load in plan.loads:
            if len(load.tiers):
                assert self.links is not None
                self.links.restore(load, now)
            if load.row < 0:  # for a session between two requests
                continue
            leg = self._legs[load.request]
            self._streams.occupy(leg, load.row)
            if not len(load.tiers):
                self._listener.wanted(leg, load, now)
        for started in plan.started:
            leg = self._legs[started.request]
            leg.attempt.run.begin(now)
            # One that was loaded may lose its row in the same moment, or have it already.
            if leg.row < 0 and started.request not in plan.preempted:
                self._streams.occupy(leg, started.row)
