"""The dispatcher: drives the control plane, and the lives of requests, by the virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from pigou.control.messages import (
    Action,
    Assess,
    CacheChanged,
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
from pigou.engine.checks import QueueFull
from pigou.engine.plan import Finished, Load
from pigou.lifecycle.messages import (
    ClientTimedOut,
    EndRequest,
    FetchKV,
    KVFetched,
    KVFetchFailed,
    LegFailed,
    LifecycleEvent,
    Prefilled,
    RequestOutcome,
    RequestRefused,
    StartDecode,
    StartPrefill,
    StopLeg,
    StreamBegan,
    StreamFinished,
    SubmitRequest,
    TokensReceived,
)
from pigou.lifecycle.migration import Continuation
from pigou.lifecycle.request import Effects, RequestLifecycle
from pigou.request import Request
from pigou.sim.call import Call, Outcome
from pigou.sim.leg import NO_SOURCE, KVSource, Leg, Trip
from pigou.sim.network import Network
from pigou.sim.remote_kv_fetch import Lending
from pigou.sim.virtual_clock import Clock, Phase
from pigou.sim.worker import Behind
from pigou.sim.worker_spec import Member
from pigou.sim.workload import block_hashes


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

    def time_out(self, call: Call, now: int) -> None:
        """The client gives an attempt up; `on_end` is told."""
        trip = self._under.get(call)
        if trip is None:
            self._over(call, Outcome.TIMED_OUT, "", now)
            return
        if trip.leg is not None:
            self._settle(trip.leg, now)
        self._take(trip, ClientTimedOut(), now)

    def _begin(self, call: Call, now: int) -> None:
        id_ = str(call.number) if call.attempts == 1 else f"{call.number}.{call.attempts}"
        size = next(iter(self._members.values())).worker.block_size
        life = RequestLifecycle(id_)
        trip = Trip(call, life, block_hashes(call.job, call.number, size), size, now)
        self._trips[id_] = self._under[call] = trip
        self._perform(trip, life.begin(), now)

    def _end(self, trip: Trip, end: EndRequest, now: int) -> None:
        """A trip is over, well or not."""
        call, id_ = trip.call, trip.life.id
        if end.shed is not None:
            self.shed += 1
            call.retry_after = end.shed.retry_after
        del self._trips[id_], self._under[call]
        self.observe(Ended(id_, end.finish), now)
        self._over(call, _outcome(end.outcome), end.reason, now)

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
            if isinstance(decision, Route | Shed | Recall):
                trip = self._trips.get(decision.request)
                if trip is not None:
                    self._decided(trip, decision, now)
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
            self._plane.on_tokens(seats[:size], counts[:size], now)

    def seat(self, more: int) -> None:
        """There may be so many more streams at once."""
        self._seats = np.zeros(len(self._seats) + more, dtype=np.int64)
        self._counts = self._seats.copy()

    # --- the life of a trip -------------------------------------------------------------------

    def _decided(self, trip: Trip, decision: Route | Shed | Recall, now: int) -> None:
        call = trip.call
        if isinstance(decision, Route):
            trip.priority, trip.source = decision.priority or 0, NO_SOURCE
            call.routed = now
            call.decode, call.prefill = decision.choice.decode, decision.choice.prefill or ""
            trip.seat = self._plane.slot(trip.life.id)
        effects = trip.life.take(decision, now)
        if effects and isinstance(decision, Recall):
            call.moves += 1
        self._perform(trip, effects, now)

    def _take(self, trip: Trip, event: LifecycleEvent, now: int) -> None:
        """Let an event happen to a trip, and do what follows."""
        self._perform(trip, trip.life.take(event, now), now)

    def _perform(self, trip: Trip, effects: Effects, now: int) -> None:
        """Do what follows; a step that is not the next one any more is left out."""
        life = trip.life
        for effect in effects:  # `type` is quicker than a match
            if type(effect) is StopLeg:
                self._stop(trip, effect.leg, now)
            elif type(effect) is EndRequest:
                self._end(trip, effect, now)
            elif type(effect) is StartDecode and effect.leg == life.leg:
                self._decode(trip, effect, now)
            elif type(effect) is SubmitRequest and effect.leg == life.leg:
                self._submit(trip, effect, now)
            elif type(effect) is StartPrefill and effect.leg == life.leg:
                self._prefill(trip, effect, now)
            elif type(effect) is FetchKV and effect.leg == life.leg:
                self.lending.ask(trip, effect, now)
            elif isinstance(effect, PrefillDone | FirstToken | ReadFailed):
                self.observe(effect, now)

    def _submit(self, trip: Trip, submit: SubmitRequest, now: int) -> None:
        call = trip.call
        left = Continuation.after(submit.tokens, call.job.input, call.job.output)
        request = trip.request = Request(
            trip.life.id,
            left.prompt_tokens,
            left.max_tokens,
            trip.hashes,
            arrival=trip.arrived,
            tenant=call.job.tenant,
        )
        if self._behind:
            self._catch_up()
        self.take((self._plane.submit(request, now, submit.exclude),), now)

    # --- legs ---------------------------------------------------------------------------------

    def _prefill(self, trip: Trip, start: StartPrefill, now: int) -> None:
        """Begin the leg that computes the prompt."""
        source = trip.source
        request = self._request(trip, 1, hold=True, remote=source.tokens)
        leg = trip.leg = Leg(trip, start.worker, request, start.leg, source, streams=False)
        self._add(leg, now)

    def _decode(self, trip: Trip, start: StartDecode, now: int) -> None:
        """Begin the leg that streams."""
        request, source = trip.request, trip.source
        if request is None or trip.life.moves or source.tokens:
            left = trip.call.job.output - trip.call.tokens
            request = self._request(trip, left, remote=source.tokens)
        leg = trip.leg = Leg(trip, start.worker, request, start.leg, source)
        self._add(leg, now)

    def _lent(
        self, trip: Trip, fetch: FetchKV, worker: str, held: str, blocks: int, now: int
    ) -> None:
        """A worker holds blocks of a prompt for whoever computes it."""
        self._hold(trip, worker, held, now)
        trip.source = KVSource(worker, held, blocks * trip.block_size)
        self._take(trip, KVFetched(fetch.leg), now)

    def _unread(self, trip: Trip, fetch: FetchKV, now: int) -> None:
        """Nothing is read: all of the prompt is computed."""
        self._take(trip, KVFetchFailed(fetch.leg), now)

    def _hold(self, trip: Trip, worker: str, held: str, now: int) -> None:
        """Keep in mind what a worker holds for a trip, until its lease is over."""
        self._members[worker].holding.add(held)
        self._clock.at(
            now + self._lease, Phase.TICK, trip.call.number,
            lambda at: self._release(worker, held, at),
        )  # fmt: skip

    def _request(self, trip: Trip, output: int, *, hold: bool = False, remote: int = 0) -> Request:
        call, life = trip.call, trip.life
        return Request(
            f"{life.id}+{life.moves}" if life.moves else life.id,
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
            if leg is leg.trip.leg:
                self._reach(leg, at)

        self._clock.at(now + self._way, Phase.SEND, leg.trip.call.number, arrive)

    def _reach(self, leg: Leg, now: int) -> None:
        member = self._members.get(leg.worker)
        if member is None or member.sim is None:
            self._failed(leg, "it is gone", now)
        else:
            member.sim.add(leg, now)

    def _stop(self, trip: Trip, number: int, now: int) -> None:
        """Take a leg from its worker; a fetch is forgotten by its number alone."""
        leg = trip.leg
        if leg is None or leg.number != number:
            return
        trip.leg = None
        member = self._members[leg.worker]
        if member.sim is not None:
            member.sim.abort(leg, now)
        if leg.source.worker:
            self._release(leg.source.worker, leg.source.held, now)

    def _settle(self, leg: Leg, now: int) -> None:
        """Keep what a leg's stream brought so far, before it leaves its worker."""
        member = self._members[leg.worker]
        if member.sim is not None:
            member.sim.settle(leg)
        if leg.streams:
            self._keep(leg, now)

    def _keep(self, leg: Leg, now: int) -> None:
        """Count a stream's tokens, and tell of those that nobody was told of."""
        trip = leg.trip
        trip.call.tokens += leg.produced
        if leg.produced > leg.told:  # quicker than `tell`
            if self._behind and len(self._plane.queue):
                self._catch_up()
            seat, count = self._last
            seat[0], count[0] = trip.seat, leg.produced - leg.told
            self._plane.on_tokens(seat, count, now)
        if leg.produced:
            self._take(trip, TokensReceived(leg.number, leg.produced), now)

    def _release(self, worker: str, held: str, now: int) -> None:
        member = self._members[worker]
        if held in member.holding:
            member.holding.discard(held)
            if member.sim is not None:
                member.sim.release(held, now)

    def broken(self, leg: Leg, now: int) -> None:
        """A leg's worker died under it."""
        if leg is leg.trip.leg:
            self._failed(leg, "its worker died", now)

    def _failed(self, leg: Leg, why: str, now: int) -> None:
        """A worker failed a trip."""
        trip = leg.trip
        self._settle(leg, now)
        trip.call.moves += 1
        self._take(trip, LegFailed(leg.number, frozenset({leg.worker}), why), now)

    # --- what workers tell --------------------------------------------------------------------

    def refused(self, leg: Leg, error: Exception, now: int) -> None:
        """A leg was not taken in."""
        trip = leg.trip
        if leg is not trip.leg:
            return
        if isinstance(error, QueueFull):
            self._failed(leg, str(error), now)
            return
        self._take(trip, RequestRefused(leg.number, str(error)), now)

    def first_token(self, leg: Leg, now: int) -> None:
        """A leg yielded its first token."""
        trip = leg.trip
        if trip.call.tokens == 0:
            trip.call.first = now
        self._take(trip, StreamBegan(leg.number), now)

    def finished(self, leg: Leg, finished: Finished, now: int) -> None:
        """A leg ended by itself."""
        trip, call = leg.trip, leg.trip.call
        if leg is not trip.leg:
            if len(finished.held):
                self._members[leg.worker].sim.release(finished.request, now)  # type: ignore[union-attr]
            return
        trip.leg = None
        if not leg.streams:
            self._prefilled(leg, finished, now)
            return
        if not call.prefill and not call.moves:
            call.cached = finished.cached
        self._keep(leg, now)
        call.last = now
        self._take(trip, StreamFinished(leg.number), now)

    def _prefilled(self, leg: Leg, finished: Finished, now: int) -> None:
        trip = leg.trip
        if not trip.life.moves:
            trip.call.cached = finished.cached
        trip.source = NO_SOURCE
        if len(finished.held):
            self._hold(trip, leg.worker, finished.request, now)
            tokens = len(finished.held) * trip.block_size
            trip.source = KVSource(leg.worker, finished.request, tokens)
        self._take(trip, Prefilled(leg.number), now)

    def wanted(self, leg: Leg, load: Load, now: int) -> None:
        """A leg wants blocks of its source; none, if it has them all."""
        source, held = self._members[leg.source.worker], leg.source.held
        if not len(load.blocks):
            self._release(leg.source.worker, held, now)
            return
        target = self._members[leg.worker]
        to, given = target.sim, source.sim
        assert to is not None
        offered = held in source.holding
        source.holding.discard(held)  # the transfer keeps the lease alive
        tokens = len(load.blocks) * leg.trip.block_size

        def arrived(at: int) -> None:
            there = offered and given is not None and source.sim is given
            if target.sim is to:
                to.loaded(leg.request.id, tokens if there else 0, at)
            if there and given is not None:
                given.release(held, at)

        size = tokens * target.plant.kv_bytes if offered else 0
        self._network.send(source.number, target.number, size, now, arrived)


def _outcome(outcome: RequestOutcome) -> Outcome:
    """Return what the client makes of the end of an attempt."""
    if outcome is RequestOutcome.DONE:
        return Outcome.DONE
    if outcome is RequestOutcome.SHED:
        return Outcome.SHED
    left = outcome is RequestOutcome.CLIENT_TIMED_OUT
    return Outcome.TIMED_OUT if left else Outcome.FAILED
