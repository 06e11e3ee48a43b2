"""Which worker served which request: a ledger over the event plane."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from pigou_lab.dynamo_host.event_plane import Envelope, Life, SequenceEvent, sequence_events

#: Prefix that Dynamo's frontend adds to a request id to make a reply id.
_PREFIXES = ("chatcmpl-", "cmpl-")


def request_id(reply_id: str) -> str:
    """Return Dynamo's id of a request from the `id` of its reply."""
    for prefix in _PREFIXES:
        if reply_id.startswith(prefix):
            return reply_id.removeprefix(prefix)
    return reply_id


@dataclass(slots=True)
class Served:
    """Who served a request, as far as is known."""

    request: str  # Dynamo's request id
    # workers that served it, in order; several if it migrated, or if prefill and decode were on
    # different workers.
    workers: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)  # data-parallel rank on each
    own: bool = False  # whether the last of these workers said so itself; routers did otherwise
    prefilled: bool = False  # whether its prompt is computed
    freed: bool = False  # whether it is over

    @property
    def worker(self) -> int:
        """The last worker."""
        return self.workers[-1]


@dataclass(frozen=True, slots=True)
class AttributionShare:
    """How many of a set of requests are attributed."""

    requests: int  # asked about
    matched: int
    missing: tuple[str, ...]

    @property
    def share(self) -> float:
        """Attributed share; 1.0 without requests."""
        return self.matched / self.requests if self.requests else 1.0


class RequestLedger:
    """Maps requests to workers from event-plane messages; sequence gaps count as missed."""

    def __init__(self, capacity: int = 1_000_000) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; it must be at least 1")
        self.missed = 0  # messages that other messages show to have been lost
        self._capacity = capacity
        self._served: OrderedDict[str, Served] = OrderedDict()
        self._sequence: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._served)

    def __getitem__(self, request: str) -> Served:
        """Return the workers of a request, by Dynamo's id or the reply's; raises KeyError."""
        return self._served[request_id(request)]

    def get(self, request: str) -> Served | None:
        """Return the workers of a request, or None."""
        return self._served.get(request_id(request))

    def take(self, message: Envelope) -> tuple[SequenceEvent, ...]:
        """Take in a message of topic `SEQUENCES`; return its events. Raises WireError."""
        self._count(message)
        events = sequence_events(message.payload)
        for event in events:
            self.apply(event)
        return events

    def apply(self, event: SequenceEvent) -> None:
        """Take in one fact."""
        served = self._served.get(event.request)
        if served is None:
            served = self._served[event.request] = Served(event.request)
            while len(self._served) > self._capacity:
                self._served.popitem(last=False)
        position = (event.worker, event.rank)
        if position not in zip(served.workers, served.ranks, strict=True):
            served.workers.append(event.worker)
            served.ranks.append(event.rank)
            served.own = False
        elif event.life is Life.ADDED and event.worker != served.worker:
            # It came back to a worker that it had been on.
            at = served.workers.index(event.worker)
            served.workers.append(served.workers.pop(at))
            served.ranks.append(served.ranks.pop(at))
            served.own = False
        served.own = served.own or (event.own and event.worker == served.worker)
        served.prefilled = served.prefilled or event.life is Life.PREFILLED
        served.freed = served.freed or event.life is Life.FREED

    def match(self, requests: Iterable[str]) -> AttributionShare:
        """Return how many requests, by Dynamo's ids or those of their replies, are attributed."""
        request_ids = [request_id(request) for request in requests]
        missing = tuple(request for request in request_ids if request not in self._served)
        return AttributionShare(len(request_ids), len(request_ids) - len(missing), missing)

    def counts(self) -> dict[int, int]:
        """Return requests by worker."""
        counts: dict[int, int] = {}
        for served in self._served.values():
            counts[served.worker] = counts.get(served.worker, 0) + 1
        return counts

    def _count(self, message: Envelope) -> None:
        last = self._sequence.get(message.publisher_id)
        if last is not None and message.sequence > last + 1:
            self.missed += message.sequence - last - 1
        if last is None or message.sequence > last:
            self._sequence[message.publisher_id] = message.sequence
