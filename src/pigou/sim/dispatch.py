"""The dispatcher: drives ControlPlane as the gateway's pilot and generator do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from pigou.control.messages import (
    Action,
    Assess,
    CacheChanged,
    Choice,
    Decision,
    Ended,
    FirstToken,
    Observation,
    PrefillDone,
    Queue,
    ReadFailed,
    Recall,
    Route,
    Shed,
)
from pigou.control.plane import ControlPlane
from pigou.engine.errors import QueueFull
from pigou.engine.plan import Finished, Load
from pigou.request import FinishReason, Request
from pigou.sim.call import Call, Outcome
from pigou.sim.clock import Clock, Phase
from pigou.sim.hashes import block_hashes
from pigou.sim.leg import Leg, Trip
from pigou.sim.lending import Lending
from pigou.sim.member import Member
from pigou.sim.network import Network
from pigou.sim.worker import Behind

#: As the gateway's: failures in a row after which a call is given up, and moves altogether.
MAX_FAILURES, MAX_MOVES = 4, 16


class Dispatcher:
    """Takes calls to workers, and tells the control plane what becomes of them.

    Attributes:
        shed: calls that were refused for want of room, counted each time.
        inflight: trips under way, queued ones included.
        lending: asks workers for what they have cached.
    """

    def __init__(
        self, plane: ControlPlane, clock: Clock, network: Network, members: Mapping[str, Member],
        overhead: int, lease: int, assess: Callable[[Assess, int], None], way: int = 0,
        behind: Behind | None = None,
    ) -> None:  # fmt: skip
        """Prepare for calls.

        Args:
            plane: who runs where.
            clock: virtual.
            network: between the members.
            members: workers by name.
            overhead: nanoseconds from the client to the fleet.
            lease: nanoseconds for which blocks are kept for a worker that does not ask.
            assess: told when the Price of Anarchy is asked for.
            way: nanoseconds that each leg takes to its worker.
            behind: workers that are to catch up before the control plane routes anything.
        """
        self.shed = 0
        self._plane, self._clock, self._network = plane, clock, network
        self._members, self._overhead, self._lease = members, overhead, lease
        self._assess = assess
        self._way = way
        self._behind = {} if behind is None else behind
        self._trips: dict[str, Trip] = {}
        self._under: dict[Call, Trip] = {}
        self.lending = Lending(clock, members, way, self._lent, self._unread)
        self._seats, self._counts = (np.zeros(0, dtype=np.int64) for _ in range(2))
        self._last = (np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))

    @property
    def inflight(self) -> int:
        """Trips under way, queued ones included."""
        return len(self._trips)

    # --- the client's side --------------------------------------------------------------------

    def send(self, call: Call, now: int) -> None:
        """Begin an attempt at a call; `on_end` is told when it is over."""
        call.sent = now
        call.attempts += 1
        call.first = call.last = call.tokens = 0
        call.outcome, call.reason = Outcome.PENDING, ""
        attempt = call.attempts

        def arrive(at: int) -> None:
            if call.attempts == attempt and call.outcome is Outcome.PENDING:
                self._begin(call, at)

        if self._overhead:
            self._clock.at(now + self._overhead, Phase.SEND, call.number, arrive)
        else:
            self._begin(call, now)

    def cancel(self, call: Call, outcome: Outcome, now: int) -> None:
        """The client gives an attempt up; `on_end` is told."""
        trip = self._under.get(call)
        if trip is None:
            self._over(call, outcome, "", now)
        else:
            self._end(trip, outcome, FinishReason.ABORT, "", now)

    def _begin(self, call: Call, now: int) -> None:
        id_ = str(call.number) if call.attempts == 1 else f"{call.number}.{call.attempts}"
        size = next(iter(self._members.values())).worker.block_size
        trip = Trip(call, id_, block_hashes(call.job, call.number, size), size, now)
        self._trips[id_] = self._under[call] = trip
        self._submit(trip, now)

    def _end(
        self, trip: Trip, outcome: Outcome, finish: FinishReason, reason: str, now: int
    ) -> None:
        """A trip is over, well or not."""
        self._leave(trip, now)
        del self._trips[trip.id], self._under[trip.call]
        self.observe(Ended(trip.id, finish), now)
        self._over(trip.call, outcome, reason, now)

    def _over(self, call: Call, outcome: Outcome, reason: str, now: int) -> None:
        call.outcome, call.reason, call.ended = outcome, reason, now
        call.on_end(call, now)

    # --- the control plane's side -------------------------------------------------------------

    def observe(self, observation: Observation, now: int) -> None:
        """Tell the control plane a fact, and do what it decides."""
        if self._behind and len(self._plane.queue):  # somebody may be routed
            self._catch_up()
        decisions = self._plane.observe(observation, now)
        if decisions:
            self.take(decisions, now)

    def take(self, decisions: Iterable[Decision | Action], now: int) -> None:
        """Do what the control plane decides."""
        for decision in decisions:
            if isinstance(decision, Route):
                trip = self._trips.get(decision.request)
                if trip is not None:
                    trip.priority = decision.priority or 0
                    self._go(trip, decision.choice, now)
            elif isinstance(decision, Shed):
                trip = self._trips.get(decision.request)
                if trip is not None:
                    self.shed += 1
                    trip.call.retry_after = decision.retry_after
                    self._end(trip, Outcome.SHED, FinishReason.ERROR, decision.reason, now)
            elif isinstance(decision, Recall):
                self._recall(decision, now)
            elif isinstance(decision, Assess):
                self._assess(decision, now)
            else:
                assert isinstance(decision, Queue)

    def tick(self, now: int) -> None:
        """Let time pass for the control plane, and do what it decides."""
        if self._behind and len(self._plane.queue):
            self._catch_up()
        self.take(self._plane.tick(now), now)

    def cache_changed(self, changed: CacheChanged, now: int) -> None:
        """Tell the control plane of a worker's KV events; it decides nothing upon them."""
        self._plane.observe(changed, now)

    def _catch_up(self) -> None:
        """Let all KV events of the past be known, before they matter."""
        for worker in list(self._behind.values()):
            worker.catch_up()

    def tell(self, members: Sequence[Member], now: int) -> None:
        """Tell the control plane of the tokens that came from workers since the last time."""
        seats, counts, size = self._seats, self._counts, 0
        for member in members:
            if member.sim is not None:
                size = member.sim.told(now, seats, counts, size)
        if size:
            self._plane.came(seats[:size], counts[:size])

    def seat(self, more: int) -> None:
        """There may be so many more streams at once."""
        self._seats = np.zeros(len(self._seats) + more, dtype=np.int64)
        self._counts = self._seats.copy()

    def _submit(self, trip: Trip, now: int) -> None:
        call = trip.call
        request = trip.request = Request(
            trip.id,
            call.job.input + call.tokens,
            call.job.output - call.tokens,
            trip.hashes,
            arrival=trip.arrived,
            tenant=call.job.tenant,
        )
        if self._behind:
            self._catch_up()
        self.take((self._plane.submit(request, now, trip.tried),), now)

    # --- legs ---------------------------------------------------------------------------------

    def _go(self, trip: Trip, choice: Choice, now: int) -> None:
        call = trip.call
        call.routed = now
        call.decode, call.prefill = choice.decode, choice.prefill or ""
        trip.decoder = choice.decode
        trip.seat = self._plane.seat(trip.id)
        if choice.read is None:
            self._lead(trip, now)
        else:
            self.lending.ask(trip, choice.read, now)

    def _lead(self, trip: Trip, now: int, source: str = "", held: str = "", kv: int = 0) -> None:
        """Begin the first leg; `source` holds `kv` tokens of the prompt as `held`."""
        prefill = trip.call.prefill
        if not prefill:
            self._stream(trip, now, source, held, kv)
            return
        request = self._request(trip, 1, hold=True, remote=kv)
        trip.prefill = Leg(trip, prefill, request, source, held, streams=False)
        self._add(trip.prefill, now)

    def _lent(self, trip: Trip, worker: str, held: str, blocks: int, now: int) -> None:
        """A worker holds blocks of a prompt for whoever computes it."""
        self._hold(trip, worker, held, now)
        self._lead(trip, now, worker, held, blocks * trip.block_size)

    def _unread(self, trip: Trip, now: int) -> None:
        """Nothing is read: all of the prompt is computed."""
        self.observe(ReadFailed(trip.id), now)
        self._lead(trip, now)

    def _hold(self, trip: Trip, worker: str, held: str, now: int) -> None:
        """Keep in mind what a worker holds for a trip, until its lease is over."""
        self._members[worker].holding.add(held)
        self._clock.at(
            now + self._lease, Phase.TICK, trip.call.number,
            lambda at: self._release(worker, held, at),
        )  # fmt: skip

    def _stream(self, trip: Trip, now: int, source: str = "", held: str = "", kv: int = 0) -> None:
        """Begin the leg that streams; `source` holds `kv` tokens of the prompt as `held`."""
        request = trip.request
        if request is None or trip.moves or kv:
            left = trip.call.job.output - trip.call.tokens
            request = self._request(trip, left, remote=kv)
        trip.decode = Leg(trip, trip.decoder, request, source, held)
        self._add(trip.decode, now)

    def _request(self, trip: Trip, output: int, *, hold: bool = False, remote: int = 0) -> Request:
        call = trip.call
        return Request(
            f"{trip.id}+{trip.moves}" if trip.moves else trip.id,
            call.job.input + call.tokens,
            output,
            trip.hashes,
            arrival=trip.arrived,
            tenant=call.job.tenant,
            hold=hold,
            priority=trip.priority,
            remote=remote,
        )

    def _add(self, leg: Leg, now: int) -> None:
        if not self._way:
            self._reach(leg, now)
            return

        def arrive(at: int) -> None:
            if leg in (leg.trip.prefill, leg.trip.decode):
                self._reach(leg, at)

        self._clock.at(now + self._way, Phase.SEND, leg.trip.call.number, arrive)

    def _reach(self, leg: Leg, now: int) -> None:
        member = self._members.get(leg.worker)
        if member is None or member.sim is None:
            self._failed(leg, "it is gone", now)
        else:
            member.sim.add(leg, now)

    def _leave(self, trip: Trip, now: int) -> None:
        """Take a trip from its workers; what its stream brought is kept."""
        trip.asked = ""
        for leg in (trip.prefill, trip.decode):
            if leg is None:
                continue
            member = self._members[leg.worker]
            if member.sim is not None:
                member.sim.settle(leg)
            if leg is trip.decode:
                self._keep(leg)
            if member.sim is not None:
                member.sim.abort(leg, now)
            if leg.source:
                self._release(leg.source, leg.held, now)
        trip.prefill = trip.decode = None

    def _keep(self, leg: Leg) -> None:
        """Count a stream's tokens, and tell of those that nobody was told of."""
        leg.trip.call.tokens += leg.produced
        if leg.produced > leg.told:  # as `Tokens`, and quicker
            if self._behind and len(self._plane.queue):
                self._catch_up()
            seat, count = self._last
            seat[0], count[0] = leg.trip.seat, leg.produced - leg.told
            self._plane.came(seat, count)

    def _release(self, worker: str, held: str, now: int) -> None:
        member = self._members[worker]
        if held in member.holding:
            member.holding.discard(held)
            if member.sim is not None:
                member.sim.release(held, now)

    def broken(self, leg: Leg, now: int) -> None:
        """A leg's worker died under it."""
        if leg in (leg.trip.prefill, leg.trip.decode):
            self._failed(leg, "its worker died", now)

    def _recall(self, recall: Recall, now: int) -> None:
        """Take a trip that has no token from its worker, and submit it anew."""
        trip = self._trips.get(recall.request)
        if trip is None or trip.call.tokens or trip.call.first:
            return
        if trip.prefill is not None:
            self.observe(PrefillDone(trip.id, False), now)
        self._leave(trip, now)
        trip.moves += 1
        trip.call.moves += 1
        trip.tried = frozenset({recall.worker})
        self._submit(trip, now)

    def _failed(self, leg: Leg, why: str, now: int) -> None:
        """A worker failed a trip: try others, unless there is no sense in it."""
        trip, call = leg.trip, leg.trip.call
        before = call.tokens
        if leg is trip.prefill:
            self.observe(PrefillDone(trip.id, False), now)
        self._leave(trip, now)
        trip.moves += 1
        call.moves += 1
        came = call.tokens > before
        trip.failures = 1 if came else trip.failures + 1
        trip.tried = frozenset({leg.worker}) | (frozenset() if came else trip.tried)
        if trip.failures == MAX_FAILURES or trip.moves == MAX_MOVES:
            self._end(trip, Outcome.FAILED, FinishReason.ERROR, why, now)
        else:
            self._submit(trip, now)

    # --- what workers tell --------------------------------------------------------------------

    def refused(self, leg: Leg, error: Exception, now: int) -> None:
        """A leg was not taken in."""
        trip = leg.trip
        if leg not in (trip.prefill, trip.decode):
            return
        if isinstance(error, QueueFull):
            self._failed(leg, str(error), now)
            return
        if leg is trip.prefill:
            self.observe(PrefillDone(trip.id, False), now)
        self._end(trip, Outcome.FAILED, FinishReason.ERROR, str(error), now)

    def first_token(self, leg: Leg, now: int) -> None:
        """A leg yielded its first token."""
        call = leg.trip.call
        if call.tokens == 0:
            call.first = now
            self.observe(FirstToken(leg.trip.id), now)

    def finished(self, leg: Leg, finished: Finished, now: int) -> None:
        """A leg ended by itself."""
        trip, call = leg.trip, leg.trip.call
        if leg is trip.prefill:
            self._prefilled(leg, finished, now)
        elif leg is trip.decode:
            trip.decode = None
            if not call.prefill and not call.moves:
                call.cached = finished.cached
            self._keep(leg)
            call.last = now
            self._end(trip, Outcome.DONE, FinishReason.STOP, "", now)
        elif len(finished.held):
            self._members[leg.worker].sim.release(finished.request, now)  # type: ignore[union-attr]

    def _prefilled(self, leg: Leg, finished: Finished, now: int) -> None:
        trip = leg.trip
        trip.prefill = None
        if not trip.moves:
            trip.call.cached = finished.cached
        kv = len(finished.held) * trip.block_size
        held = finished.request if kv else ""
        if kv:
            self._hold(trip, leg.worker, held, now)
        self.observe(PrefillDone(trip.id), now)
        self._stream(trip, now, leg.worker if kv else "", held, kv)

    def wanted(self, leg: Leg, load: Load, now: int) -> None:
        """A leg wants blocks of its source; none, if it has them all."""
        source = self._members[leg.source]
        if not len(load.blocks):
            self._release(leg.source, leg.held, now)
            return
        target = self._members[leg.worker]
        to, given = target.sim, source.sim
        assert to is not None
        offered = leg.held in source.holding
        source.holding.discard(leg.held)  # the transfer keeps the lease alive
        tokens = len(load.blocks) * leg.trip.block_size

        def arrived(at: int) -> None:
            there = offered and given is not None and source.sim is given
            if target.sim is to:
                to.loaded(leg.request.id, tokens if there else 0, at)
            if there and given is not None:
                given.release(leg.held, at)

        size = tokens * target.plant.kv_bytes if offered else 0
        self._network.send(source.number, target.number, size, now, arrived)
