"""Queue orders: interface, registry, and all orders except the fair ones."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, TypeAlias

import msgspec

from pigou.config import check_bounds
from pigou.registry import named, read_struct
from pigou.request import NEVER, SECOND, Request

GROUP = "pigou.admission"
#: The key of `ControlConfig.admission` that names the order; the others are its parameters.
NAME = "order"
_MILLISECOND = SECOND // 1000
#: The workers that a request excludes, and those among which it must be; empty for all.
WorkerLimits: TypeAlias = tuple[frozenset[str], frozenset[str]]


class QueueLane(NamedTuple):
    """Requests that wait apart from others (`pigou.control.admission.lanes`)."""

    workload: str = ""  # class with a cap on its streams; empty for all others
    is_long: bool = False  # long prompts, where workers have a lane for them


class NoOrderParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An order without parameters."""


def load(chosen: Mapping[str, Any]) -> QueueOrder:
    """Build the order named `order`, with the rest as parameters; raises ConfigError."""
    values = dict(chosen)
    name = values.pop(NAME, None)
    kind = named(GROUP, name, "admission order")
    order: QueueOrder = kind(read_struct(f"admission order {name}", kind.Params, values))
    return order


class QueueOrder:
    """Order of waiting requests: one heap by `key`; first come, first served by default.

    Every request passes `add`, `first` and `taken`, also one routed at once. Built with parameters
    of type `Params`, a frozen `msgspec.Struct`.
    """

    Params: ClassVar[type[msgspec.Struct]] = NoOrderParams
    #: Whether the order needs queues in the workers that are all but empty.
    holds_back: ClassVar[bool] = False
    #: Whether a newcomer is refused whose deadline cannot be met any more.
    refuses_late: ClassVar[bool] = False
    #: Lanes whose requests cannot go now; `first` passes them over.
    blocked: Collection[QueueLane] = ()
    #: Whether `first` passes over the tenants `held`, which get no further stream now.
    holds: ClassVar[bool] = False
    held: Collection[str] = ()

    def __init__(self, params: msgspec.Struct | None = None) -> None:
        self.params: Any = params or self.Params()
        self._heap = Heap()

    @property
    def reserve(self) -> float:
        """Share of each worker closed to tenants above their share of the fleet."""
        return 0.0

    def key(self, waiting: QueuedRequest) -> Any:
        """Return a request's sort key, constant while it waits."""
        return waiting.serial

    def add(self, waiting: QueuedRequest) -> None:
        """Add a waiting request."""
        self._heap.add(self.key(waiting), waiting)

    def remove(self, waiting: QueuedRequest) -> None:
        """Remove an unserved request."""
        self._heap.remove(waiting)

    def first(self, now: int) -> QueuedRequest | None:
        """Return the next request, which stays; None if none is in an open lane."""
        return self._heap.first(self.blocked)

    def last(self, waiting: QueuedRequest, max_count: int, own: bool) -> list[QueuedRequest]:
        """Return up to `max_count` less urgent requests to shed, least urgent first."""
        tenant = waiting.request.account if own else None
        return self._heap.last(max_count, self.key(waiting), tenant)

    def taken(self, waiting: QueuedRequest, uncached: int) -> None:
        """Record that a request was sent to a worker that computes `uncached` tokens."""
        self._heap.remove(waiting)

    def served(self, request: Request, tokens: int) -> None:
        """Count output tokens of a routed request."""

    def underserved(self, waiting: QueuedRequest) -> bool:
        """True if its tenant had too little service to count as above its share."""
        return False

    def priority(self, waiting: QueuedRequest, above: bool) -> int | None:
        """Return the priority sent to workers, None for the client's own."""
        return None


class Fcfs(QueueOrder):
    """First come, first served."""

    def last(self, waiting: QueuedRequest, max_count: int, own: bool) -> list[QueuedRequest]:
        """Return none: the newcomer itself is last."""
        return []


class Priority(QueueOrder):
    """Lower `Request.priority` first, as in vLLM; strict, so low priorities may starve."""

    def key(self, waiting: QueuedRequest) -> Any:
        """Return the priority."""
        return waiting.request.priority


class ShortestParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `Shortest`."""

    # tokens that a request is taken to be shorter by for each second that it waits.
    ageing: int = 1000

    def __post_init__(self) -> None:
        check_bounds("ageing", self.ageing, ge=1, unit=" token a second")


class Shortest(QueueOrder):
    """Fewest uncached prompt tokens first, with ageing.

    Rank at time t of a request with u tokens waiting since s: u - ageing (t - s). The key u +
    ageing s gives the same order and is constant; no request starves.
    """

    Params: ClassVar[type[msgspec.Struct]] = ShortestParams

    def key(self, waiting: QueuedRequest) -> Any:
        """Return u + ageing s, in token nanoseconds per second."""
        return waiting.uncached * SECOND + int(self.params.ageing) * waiting.since


class ShortestRemainingParams(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """Parameters of `ShortestRemaining`."""

    # tokens that a request is taken to be shorter by for each second that it waits.
    ageing: float = 125.0
    # output tokens that take as long as an uncached prompt token.
    input_weight: float = 0.05

    def __post_init__(self) -> None:
        check_bounds("ageing", self.ageing, gt=0, unit=" tokens a second")
        check_bounds("input_weight", self.input_weight, ge=0)


class ShortestRemaining(QueueOrder):
    """Fewest predicted output tokens first, with ageing (`pigou.control.lengths`).

    Key of a request with p predicted output tokens and u uncached prompt tokens, waiting since s: p
    + input_weight u + ageing s. One that arrives more than (p + input_weight u - 1) / ageing later
    does not overtake it. `max_tokens` does not move it.
    """

    Params: ClassVar[type[msgspec.Struct]] = ShortestRemainingParams
    holds_back: ClassVar[bool] = True

    def key(self, waiting: QueuedRequest) -> Any:
        """Return the key, in token nanoseconds per second."""
        params = self.params
        tokens = waiting.length + params.input_weight * waiting.uncached
        return round(tokens * SECOND) + round(params.ageing * waiting.since)


class EdfParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `Edf`."""

    # assumed time to the first token, from queueing, of requests without a deadline or past it.
    patience_ms: int = 10_000

    def __post_init__(self) -> None:
        check_bounds("patience_ms", self.patience_ms, ge=0)


class Edf(QueueOrder):
    """Earliest deadline first; missed deadlines are replaced by `patience_ms` after queueing."""

    Params: ClassVar[type[msgspec.Struct]] = EdfParams
    refuses_late: ClassVar[bool] = True

    def key(self, waiting: QueuedRequest) -> Any:
        """Return the deadline, in nanoseconds."""
        deadline = waiting.request.deadline
        return self._patience(waiting) if deadline == NEVER else deadline

    def first(self, now: int) -> QueuedRequest | None:
        """Return the next request; each misses its deadline at most once."""
        while (waiting := self._heap.first(self.blocked)) is not None:
            patience = self._patience(waiting)
            if not self.key(waiting) < now < patience or waiting.late:
                return waiting
            waiting.late = True
            self._heap.remove(waiting)
            self._heap.add(patience, waiting)
        return None

    def _patience(self, waiting: QueuedRequest) -> int:
        return waiting.since + (waiting.due_ms or int(self.params.patience_ms)) * _MILLISECOND


class QueuedRequest(msgspec.Struct, eq=False):
    """A queued request."""

    request: Request
    since: int  # nanoseconds
    uncached: int  # prompt tokens not cached on the best worker
    output: int = 1  # expected output tokens
    length: float = 1.0  # the same without the declared limit
    weight: float = 1.0
    exclude: frozenset[str] = frozenset()  # failed workers
    # it ran before, and its worker failed; it goes first, and is not shed for space.
    returned: bool = False
    serial: int = 0  # number in order of arrival
    late: bool = False  # missed its deadline (`edf`)
    accepted: bool = False  # a further sequence of an accepted group: not shed
    aside: bool = False  # lets others pass until a permitted worker has room
    lane: QueueLane = QueueLane()
    due_ms: int = 0  # from queueing, by its class; 0 without one

    @property
    def limits(self) -> WorkerLimits:
        """Workers it must not use, and those it must."""
        return self.exclude, self.request.eligible

    @property
    def tokens(self) -> int:
        """Uncached prompt tokens plus expected output tokens."""
        return self.uncached + self.output * self.request.sequences

    @property
    def held_tokens(self) -> int:
        """Tokens of its group's sequences not submitted yet."""
        return self.request.held_tokens + self.request.held * self.output


class Heap:
    """Waiting requests by key, ties by `serial`; removed entries are deleted lazily."""

    def __init__(self) -> None:
        self._heaps: dict[QueueLane, list[tuple[Any, int, QueuedRequest]]] = {}
        self._live: dict[str, tuple[Any, int, QueuedRequest]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[QueuedRequest]:
        """Iterate in no particular order."""
        return (entry[2] for entry in self._live.values())

    def add(self, key: Any, waiting: QueuedRequest) -> None:
        """Add a request; all keys of a heap must be comparable."""
        entry = (key, waiting.serial, waiting)
        self._live[waiting.request.id] = entry
        heapq.heappush(self._heaps.setdefault(waiting.lane, []), entry)

    def remove(self, waiting: QueuedRequest) -> None:
        """Remove a request, if present."""
        if self._live.pop(waiting.request.id, None) is None:
            return
        if len(self._heaps[waiting.lane]) > 2 * len(self._live) + 16:
            self._heaps = {}
            for entry in self._live.values():
                self._heaps.setdefault(entry[2].lane, []).append(entry)
            for heap in self._heaps.values():
                heapq.heapify(heap)

    def last(self, max_count: int, before: Any, tenant: str | None = None) -> list[QueuedRequest]:
        """Return requests with keys above `before`, greatest and newest first, in O(n)."""
        entries = (
            entry
            for entry in self._live.values()
            if entry[0] > before
            and not entry[2].accepted
            and tenant in (None, entry[2].request.account)
        )
        last = heapq.nlargest(max_count, entries, key=lambda entry: entry[:2])
        return [entry[2] for entry in last]

    def first(self, blocked: Collection[QueueLane] = ()) -> QueuedRequest | None:
        """Return the request with the lowest key in an open lane, which stays; None if none is."""
        first = None
        for lane, heap in self._heaps.items():
            if lane in blocked:
                continue
            while heap and self._live.get(heap[0][2].request.id) is not heap[0]:
                heapq.heappop(heap)
            if heap and (first is None or heap[0] < first):
                first = heap[0]
        return None if first is None else first[2]
