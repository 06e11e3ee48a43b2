"""Queue orders: their protocol, their registry, and all but the fair ones."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeAlias

import msgspec

from pigou.config import ConfigError
from pigou.registry import named
from pigou.request import NEVER, SECOND, Request

GROUP = "pigou.admission"
#: The key of `ControlConfig.admission` that names the order; the others are its parameters.
NAME = "order"


class NoOrderParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of an order without parameters."""


def load(chosen: Mapping[str, Any]) -> QueueOrder:
    """Return the order of this name (`order`), with the rest as parameters; raise a ConfigError."""
    values = dict(chosen)
    name = values.pop(NAME, None)
    kind = named(GROUP, name, "admission order")
    try:
        params = msgspec.convert(values, kind.Params, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.Params.__struct_fields__) or "none"
        raise ConfigError(
            f"admission order {name!r}: {_lower(str(error))}; its parameters: {known}"
        ) from None
    order: QueueOrder = kind(params)
    return order


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


_MILLISECOND = SECOND // 1000


class QueueOrder:
    """Which of the waiting requests goes next: one heap by `key`, here first come, first served.

    Every request goes through it, also one that is routed at once: `add`, `first`, `taken`. The
    class is called with its parameters, a frozen `msgspec.Struct` of type `Params`.
    """

    Params: ClassVar[type[msgspec.Struct]] = NoOrderParams
    #: Whether the order needs queues in the workers that are all but empty.
    holds_back: ClassVar[bool] = False
    #: Whether a newcomer is refused whose deadline cannot be met any more.
    refuses_late: ClassVar[bool] = False

    def __init__(self, params: msgspec.Struct | None = None) -> None:
        self.params: Any = params or self.Params()
        self._heap = Heap()

    @property
    def reserve(self) -> float:
        """Share of each worker that is closed to tenants above their part of the fleet."""
        return 0.0

    def key(self, waiting: QueuedRequest) -> Any:
        """Return what orders a request; it must not change while it waits."""
        return waiting.serial

    def add(self, waiting: QueuedRequest) -> None:
        """Add a request that waits."""
        self._heap.add(self.key(waiting), waiting)

    def remove(self, waiting: QueuedRequest) -> None:
        """Take out a request that waits no more, and was not served."""
        self._heap.remove(waiting)

    def first(self, now: int) -> QueuedRequest | None:
        """Return which goes next; it stays until it is removed or taken. None of an empty queue."""
        return self._heap.first()

    def last(self, waiting: QueuedRequest, max_count: int, own: bool) -> list[QueuedRequest]:
        """Return those that may be shed so that a newcomer can wait, the least urgent first.

        All of them, at most `max_count`, are less urgent than the newcomer; if `own`, of its tenant
        alone. An order without this method sheds none.
        """
        tenant = waiting.request.tenant if own else None
        return self._heap.last(max_count, self.key(waiting), tenant)

    def taken(self, waiting: QueuedRequest, uncached: int) -> None:
        """Record that a request was sent to a worker, which computes `uncached` tokens."""
        self._heap.remove(waiting)

    def served(self, request: Request, tokens: int) -> None:
        """Count output tokens of a routed request."""

    def underserved(self, waiting: QueuedRequest) -> bool:
        """True if its tenant had so much less than others that it counts as above no part."""
        return False

    def priority(self, waiting: QueuedRequest, above: bool) -> int | None:
        """Return the priority that workers are sent, None for the client's own."""
        return None


class Fcfs(QueueOrder):
    """First come, first served."""

    def last(self, waiting: QueuedRequest, max_count: int, own: bool) -> list[QueuedRequest]:
        """Return none: the newcomer itself is the last."""
        return []


class Priority(QueueOrder):
    """Lower `Request.priority` first, as vLLM has it; first come, first served within one.

    A stream of urgent requests keeps the others waiting until they time out: priority is strict.
    """

    def key(self, waiting: QueuedRequest) -> Any:
        """Return the priority."""
        return waiting.request.priority


class ShortestParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `Shortest`."""

    # tokens that a request is taken to be shorter by for each second that it waits.
    ageing: int = 1000

    def __post_init__(self) -> None:
        if self.ageing < 1:
            raise ConfigError(f"ageing is {self.ageing}; it must be at least 1 token a second")


class Shortest(QueueOrder):
    """Fewest uncached prompt tokens first, with ageing.

    At time t a request that waits since s with u uncached tokens ranks by u - ageing (t - s).
    Differences of ranks do not depend on t, so the key u + ageing s never changes. No request
    starves: one that comes more than (u - 1) / ageing seconds after it goes behind it.
    """

    Params: ClassVar[type[msgspec.Struct]] = ShortestParams

    def key(self, waiting: QueuedRequest) -> Any:
        """Return u + ageing s, in token nanoseconds a second."""
        return waiting.uncached * SECOND + int(self.params.ageing) * waiting.since


class EdfParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `Edf`."""

    # a request without a deadline, or that has missed it, is treated as if it wanted its first
    # token so many milliseconds after it was queued.
    patience_ms: int = 10_000

    def __post_init__(self) -> None:
        if self.patience_ms < 0:
            raise ConfigError(f"patience_ms is {self.patience_ms}; it must be at least 0")


class Edf(QueueOrder):
    """Earliest deadline of the first token first.

    Under overload, plain EDF serves late requests first, and makes all others late too. So a
    request that misses its deadline gets the one of a request without any: `patience_ms` after it
    was queued. No request starves: one that comes more than `patience_ms` after it goes behind
    it, unless the older one's deadline is further away and still ahead.
    """

    Params: ClassVar[type[msgspec.Struct]] = EdfParams
    refuses_late: ClassVar[bool] = True

    def key(self, waiting: QueuedRequest) -> Any:
        """Return the deadline, in nanoseconds."""
        deadline = waiting.request.deadline
        return self._patience(waiting) if deadline == NEVER else deadline

    def first(self, now: int) -> QueuedRequest | None:
        """Return which goes next; each request misses its deadline once at most."""
        while (waiting := self._heap.first()) is not None:
            patience = self._patience(waiting)
            if not self.key(waiting) < now < patience or waiting.late:
                return waiting
            waiting.late = True
            self._heap.remove(waiting)
            self._heap.add(patience, waiting)
        return None

    def _patience(self, waiting: QueuedRequest) -> int:
        return waiting.since + int(self.params.patience_ms) * _MILLISECOND


#: The workers that a request excludes, and those among which it must be; empty for all.
WorkerLimits: TypeAlias = tuple[frozenset[str], frozenset[str]]


class QueuedRequest(msgspec.Struct, eq=False):
    """A queued request."""

    request: Request
    since: int  # when it was queued, in nanoseconds
    uncached: int  # tokens of its prompt that the worker which holds most of them lacks
    output: int = 1  # tokens that it is expected to generate
    weight: float = 1.0
    exclude: frozenset[str] = frozenset()  # workers that just failed it
    # it ran before, and its worker failed; it goes first, and is not shed for space.
    returned: bool = False
    serial: int = 0  # rises with each request that is queued
    late: bool = False  # it missed its deadline while it waited (`edf`)
    accepted: bool = False  # with the first sequence of its group, so it is not shed any more
    aside: bool = False  # it lets others pass until a worker that it may use can take it

    @property
    def limits(self) -> WorkerLimits:
        """The workers that it may not use, and those that it must."""
        return self.exclude, self.request.eligible

    @property
    def tokens(self) -> int:
        """What it asks of the fleet: uncached prompt plus expected output tokens."""
        return self.uncached + self.output * self.request.sequences

    @property
    def held_tokens(self) -> int:
        """What the sequences of its group ask for that were not submitted yet."""
        return self.request.held_tokens + self.request.held * self.output


class Heap:
    """Waiting requests by key, the least first; those of equal keys in the order of `serial`.

    Adding and taking the first cost O(log n), removing any O(1), amortised. A removed request
    stays as a dead entry until it comes up, or until the dead outnumber the living.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, QueuedRequest]] = []
        self._live: dict[str, tuple[Any, int, QueuedRequest]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[QueuedRequest]:
        """All of them, in no order."""
        return (entry[2] for entry in self._live.values())

    def add(self, key: Any, waiting: QueuedRequest) -> None:
        """Add a request that is not there; all keys of a heap must be comparable."""
        entry = (key, waiting.serial, waiting)
        self._live[waiting.request.id] = entry
        heapq.heappush(self._heap, entry)

    def remove(self, waiting: QueuedRequest) -> None:
        """Take a request out; one that is not there is no error."""
        if self._live.pop(waiting.request.id, None) is None:
            return
        if len(self._heap) > 2 * len(self._live) + 16:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)

    def last(self, max_count: int, before: Any, tenant: str | None = None) -> list[QueuedRequest]:
        """Return requests whose keys are above `before`, the greatest and newest first, in O(n)."""
        entries = (
            entry
            for entry in self._live.values()
            if entry[0] > before
            and not entry[2].accepted
            and tenant in (None, entry[2].request.tenant)
        )
        last = heapq.nlargest(max_count, entries, key=lambda entry: entry[:2])
        return [entry[2] for entry in last]

    def first(self) -> QueuedRequest | None:
        """Return the one of the least key, which stays; None of an empty heap."""
        heap = self._heap
        while heap and self._live.get(heap[0][2].request.id) is not heap[0]:
            heapq.heappop(heap)
        return heap[0][2] if heap else None
