"""The desk: takes requests in, queues them, refuses them, and says when the next may go."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from pigou.config import ControlConfig
from pigou.control.admission.drain_rate import LEAST_RETRY, DrainRate
from pigou.control.admission.queue import WaitQueue
from pigou.control.admission.queue_order import Keyed, Waiting, load
from pigou.control.admission.tenant_quota import Activity, Refusal, Shares
from pigou.control.admission.worker_capacity import Room
from pigou.control.messages import Choice, Decision, Queue, Route, Shed
from pigou.control.routing.view import FleetView
from pigou.control.state import Load
from pigou.control.stream_slots import Counts, Seats
from pigou.request import NEVER, SECOND, Request

#: A worker that failed a request is tried again for it after this time, if no other can serve.
EXCLUDED_FOR = SECOND


class Chosen(NamedTuple):
    """Where a request goes.

    Attributes:
        choice: its workers.
        uncached: tokens of its prompt that are to be computed.
        priority: that the workers are sent; None for the client's own.
    """

    choice: Choice
    uncached: int
    priority: int | None = None


#: Chooses workers for a request; None when none can take it.
Choose = Callable[[Waiting], Chosen | None]


class Desk:
    """The queue, the room of the workers, and the rate at which requests leave.

    Attributes:
        activity: which tenants share the fleet.
        queue: who waits.
        room: what workers can be given.
        rate: how fast requests leave.
        counts: whether the order counts the tokens that each tenant is served.
    """

    def __init__(self, config: ControlConfig) -> None:
        """Start with nobody waiting.

        Raises:
            ConfigError: there is no order of that name, or it has no such parameter.
        """
        order = load(config.admission)
        self.activity = Activity()
        shares = Shares(self.activity, config.max_queued, config.max_queued_tokens)
        self.queue = WaitQueue(order, shares)
        self.room = Room(config, order.holds_back, order.reserve)
        self.rate = DrainRate()
        self._weights = config.tenant_weights
        self.counts = getattr(type(order), "served", None) is not Keyed.served
        self._timeout = config.queue_timeout
        self._displaced: list[Shed] = []

    def submit(
        self, waiting: Waiting, now: int, up: Collection[str], least: float, choose: Choose
    ) -> Decision:
        """Decide what becomes of a request.

        Args:
            waiting: the request.
            now: nanoseconds.
            up: workers that are up.
            least: seconds that its first token takes at least, as far as that is known.
            choose: as of `drain`.
        """
        request = waiting.request.id
        waiting.weight = self._weights.get(waiting.request.tenant, 1.0)
        waiting.kept = waiting.request.later
        self.activity.seen(waiting.request.tenant, waiting.weight, now)
        if waiting.request.group and not waiting.returned:
            refusal = self.queue.refusal(waiting) if waiting.request.held else None
            if refusal is not None and not self._displace(waiting, refusal, now):
                return self._shed(waiting, refusal, now)
            self.queue.shares.hold(waiting)
        alone = not self.queue and not waiting.returned
        if alone and (found := choose(waiting)) is not None:
            self.queue.passed(waiting, found.uncached)
            return Route(request, found.choice, found.priority)
        late = self._late(waiting, now, least)
        # As it were before this one; a group was asked for as a whole.
        refusal = None if waiting.request.held else self.queue.refusal(waiting)
        if refusal is not None and late is None and self._displace(waiting, refusal, now):
            refusal = None
        ahead = self.queue.add(waiting)
        skip = [each for each in self._blocked(up) if each != waiting.exclude]
        if not alone and self.queue.next(now, skip) is waiting:
            found = choose(waiting)
            if found is not None:
                self.queue.take(waiting, found.uncached)
                return Route(request, found.choice, found.priority)
        if refusal is None and late is None:
            return Queue(request, ahead)
        self.queue.remove(request)
        if late is not None:
            self.queue.shares.release(waiting.request.group)
            return Shed(request, late, LEAST_RETRY)
        assert refusal is not None
        return self._shed(waiting, refusal, now)

    def _shed(self, waiting: Waiting, refusal: Refusal, now: int) -> Shed:
        retry = self._retry(waiting, refusal.tenant, now)
        return Shed(waiting.request.id, refusal.reason, retry, refusal.tenant)

    def _displace(self, waiting: Waiting, refusal: Refusal, now: int) -> bool:
        """Shed the least urgent in place of a more urgent newcomer; return whether it can wait."""
        gone = self.queue.displace(waiting)
        reason = "a more urgent request took its place in the full queue"
        for each in gone:
            self._displaced.append(self._shed(each, Refusal(reason, refusal.tenant), now))
        return bool(gone)

    def displaced(self) -> list[Shed]:
        """Return the refusals of those that were shed for others since the last call."""
        found, self._displaced = self._displaced, []
        return found

    def drain(self, now: int, up: Collection[str], choose: Choose) -> list[Route]:
        """Route queued requests, in order, as far as workers have room.

        The first that finds none ends the round, so that it is not overtaken; one that finds none
        because of whom it excludes lets others pass.

        Args:
            now: nanoseconds.
            up: workers that are up.
            choose: chooses workers, and charges them.
        """
        routes: list[Route] = []
        if not self.queue:
            return routes
        skip: list[frozenset[str]] = []
        while (waiting := self.queue.next(now, skip)) is not None:
            found = choose(waiting)
            if found is not None:
                self.queue.take(waiting, found.uncached)
                routes.append(Route(waiting.request.id, found.choice, found.priority))
            elif waiting.exclude.isdisjoint(up):
                break
            else:
                skip.append(waiting.exclude)
        return routes

    def overdue(self, now: int, up: bool = True) -> list[Shed]:
        """Take out those that waited too long; the others may soon use any worker again.

        `up`: there are workers, so that accepted sequences will find one in the end.
        """
        shed = []
        for waiting in self.queue.overdue(now - self._timeout, up):
            retry = self._retry(waiting, False, now)
            shed.append(Shed(waiting.request.id, "it waited too long for a worker", retry))
        self.queue.forgive(now - EXCLUDED_FOR)
        return shed

    def give_up(self, request: Request, worker: str, now: int) -> Shed:
        """Return the refusal of a request that waited too long inside a worker."""
        waited_s = (now - request.arrival) / SECOND
        reason = (
            f"it waited {waited_s:.0f} s, the last of them inside {worker}, without being begun"
        )
        retry = self.rate.retry_after(len(self.queue) + 1, self.queue.shares.tokens, now)
        return Shed(request.id, reason, retry)

    def above(self, waiting: Waiting) -> bool:
        """Whether its tenant has more than its part of the fleet.

        Not one that had so little of late that this is but a burst.
        """
        if self.queue.order.behind(waiting):
            return False
        return self.activity.above(waiting.request.tenant, waiting.weight)

    def priority(self, waiting: Waiting, above: bool) -> int | None:
        """Return the priority that workers are sent, None for the client's own.

        A tenant that has several requests waiting asks for more than it gets, and counts as one
        `above` its part, unless it is alone. Further sequences of a request yield to other
        requests inside the workers too, where neither order nor client says otherwise.
        """
        tenant, weight, order = waiting.request.tenant, waiting.weight, self.queue.order
        if not above and self.queue.shares.held(tenant)[0] > 1:
            above = not order.behind(waiting) and self.activity.part(tenant, weight) < 1.0
        told = order.priority(waiting, above)
        background = waiting.request.later and not waiting.request.priority
        return int(background) if told is None and background else told

    def began(self, request: Request, choice: Choice, row: int, fleet: FleetView, now: int) -> None:
        """A request was routed to decode on worker `row`; `fleet` is as it saw it."""
        self.room.take(request, choice, row, fleet, now)
        self.activity.began(request.tenant, request.sequences)

    def failed(self, request: Request) -> None:
        """A routed request lost its worker."""
        self.room.free(request.id)
        self.activity.ended(request.tenant, request.sequences)

    def ended(self, request: Request, now: int) -> None:
        """A routed request left the fleet."""
        self.rate.ended(now, self.room.free(request.id))
        self.activity.ended(request.tenant, request.sequences)
        self.activity.seen(request.tenant, self._weights.get(request.tenant, 1.0), now)

    def came(self, who: Seats[Load], seats: Counts, counts: Counts) -> None:
        """Output tokens of routed requests came: tell the order, where it `counts` them.

        Args:
            who: has which seat.
            seats: of the requests, (n,).
            counts: tokens of each, (n,).
        """
        served = self.queue.order.served
        for seat, count in zip(seats.tolist(), counts.tolist(), strict=True):
            routed = who.who[seat]
            assert routed is not None, "tokens of a seat that nobody has"
            served(routed.request, count)

    def _blocked(self, up: Collection[str]) -> list[frozenset[str]]:
        return [each for each in self.queue.excluded() if not each.isdisjoint(up)]

    def _late(self, waiting: Waiting, now: int, least: float) -> str | None:
        """Return why there is no sense in queueing a newcomer, where the order asks that."""
        deadline = waiting.request.deadline
        accepted = waiting.returned or waiting.kept
        if not self.queue.order.refuses_late or accepted or deadline == NEVER:
            return None
        if now + least * SECOND <= deadline:
            return None
        late = (now - deadline) / SECOND + least
        return f"its first token would come at least {late:.3f} s after its deadline"

    def _retry(self, waiting: Waiting, tenant: bool, now: int) -> int:
        """Return nanoseconds until all that wait, or all of its tenant, will have left."""
        shares = self.queue.shares
        part = 1.0
        requests, tokens = len(self.queue), shares.tokens
        if tenant:
            requests, tokens = shares.held(waiting.request.tenant)
            part = self.activity.part(waiting.request.tenant, waiting.weight)
        return self.rate.retry_after(requests + 1, tokens + waiting.tokens, now, part)
