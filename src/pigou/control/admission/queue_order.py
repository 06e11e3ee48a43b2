"""The protocol of orders, and how they are found by name."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Protocol

import msgspec

from pigou.config import ConfigError, named
from pigou.request import NEVER, SECOND, Request

GROUP = "pigou.admission"
#: The key of `ControlConfig.admission` that names the order; the others are its parameters.
NAME = "order"


class NoParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of an order without parameters."""


class Order(Protocol):
    """Who of the waiting requests goes next.

    Every request goes through it, also one that finds room at once: `add`, `first`, `taken`.

    Attributes:
        Params: parameters, a frozen `msgspec.Struct`; the class is called with one.
        holds_back: whether the order is void unless next to nothing waits inside the workers.
        reserve: share of each worker that is closed to tenants above their part of the fleet.
        refuses_late: whether a newcomer is refused whose deadline cannot be met any more.
    """

    Params: ClassVar[type[msgspec.Struct]]
    holds_back: ClassVar[bool]
    refuses_late: ClassVar[bool]

    @property
    def reserve(self) -> float:
        """As the parameters have it."""
        ...

    def add(self, waiting: Waiting) -> None:
        """A request begins to wait."""
        ...

    def remove(self, waiting: Waiting) -> None:
        """A request waits no more, and was not served."""
        ...

    def first(self, now: int) -> Waiting | None:
        """Return who goes next, and stays until it is removed or taken; None when nobody waits."""
        ...

    def last(self, waiting: Waiting, most: int, own: bool) -> list[Waiting]:
        """Return those that may be shed so that a newcomer can wait, the least urgent first.

        All of them are less urgent than the newcomer. An order without this method sheds nobody.

        Args:
            waiting: the newcomer, which was not added.
            most: requests to return at most.
            own: only those of its own tenant.
        """
        ...

    def taken(self, waiting: Waiting, uncached: int) -> None:
        """A request was sent to a worker that has `uncached` tokens of its prompt to compute."""
        ...

    def served(self, request: Request, tokens: int) -> None:
        """So many output tokens of a routed request came."""
        ...

    def behind(self, waiting: Waiting) -> bool:
        """Whether its tenant had so much less than others that it is above its part in nothing."""
        ...

    def priority(self, waiting: Waiting, above: bool) -> int | None:
        """Return the priority that workers are sent, None for the client's own.

        `above`: its tenant has more than its part of the fleet.
        """
        ...


def load(chosen: Mapping[str, Any]) -> Order:
    """Return a new order, by its name in the entry point group `pigou.admission`.

    Args:
        chosen: `order` is its name, the rest its parameters.

    Raises:
        ConfigError: there is none of that name (the message lists those that there are), or it
            has no such parameter.
    """
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
    order: Order = kind(params)
    return order


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


_MILLISECOND = SECOND // 1000


class Keyed:
    """One heap; what follows says only what the key is. First come, first served by itself."""

    Params: ClassVar[type[msgspec.Struct]] = NoParams
    holds_back: ClassVar[bool] = False
    refuses_late: ClassVar[bool] = False

    def __init__(self, params: msgspec.Struct | None = None) -> None:
        self.params: Any = params or self.Params()
        self._heap = Heap()

    @property
    def reserve(self) -> float:
        """Nothing is reserved."""
        return 0.0

    def key(self, waiting: Waiting) -> Any:
        """Return what orders a request; it must not change while it waits."""
        return waiting.serial

    def add(self, waiting: Waiting) -> None:
        """A request begins to wait."""
        self._heap.add(self.key(waiting), waiting)

    def remove(self, waiting: Waiting) -> None:
        """A request waits no more."""
        self._heap.remove(waiting)

    def first(self, now: int) -> Waiting | None:  # noqa: ARG002 (protocol)
        """Return who goes next."""
        return self._heap.first()

    def last(self, waiting: Waiting, most: int, own: bool) -> list[Waiting]:
        """Return those of greater keys, the greatest first."""
        tenant = waiting.request.tenant if own else None
        return self._heap.last(most, self.key(waiting), tenant)

    def taken(self, waiting: Waiting, uncached: int) -> None:  # noqa: ARG002 (protocol)
        """A request was sent to a worker."""
        self._heap.remove(waiting)

    def served(self, request: Request, tokens: int) -> None:
        """Output tokens came, which changes nothing."""

    def behind(self, waiting: Waiting) -> bool:  # noqa: ARG002 (protocol)
        """Nobody's service is counted."""
        return False

    def priority(self, waiting: Waiting, above: bool) -> int | None:  # noqa: ARG002 (protocol)
        """Leave the client's own."""
        return None


class Fcfs(Keyed):
    """First come, first served."""

    def last(self, waiting: Waiting, most: int, own: bool) -> list[Waiting]:  # noqa: ARG002
        """Return nobody: the newcomer itself is the last."""
        return []


class Priority(Keyed):
    """Lower `Request.priority` first, as vLLM has it; first come, first served within one.

    A stream of urgent requests keeps the others waiting until they time out; that is what strict
    priority means.
    """

    def key(self, waiting: Waiting) -> Any:
        """Return the priority."""
        return waiting.request.priority


class ShortestParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `Shortest`.

    Attributes:
        ageing: tokens that a request is taken to be shorter by for each second that it waits.
    """

    ageing: int = 1000

    def __post_init__(self) -> None:
        """Refuse what would let long requests starve."""
        if self.ageing < 1:
            raise ConfigError(f"ageing is {self.ageing}; it must be at least 1 token a second")


class Shortest(Keyed):
    """Fewest uncached prompt tokens first, with ageing.

    At time t a request that waits since s with u uncached tokens ranks by u - ageing (t - s).
    Differences of ranks do not depend on t, so the key u + ageing s never changes. Nobody
    starves: whoever comes more than (u - 1) / ageing seconds after a request goes behind it.
    """

    Params: ClassVar[type[msgspec.Struct]] = ShortestParams

    def key(self, waiting: Waiting) -> Any:
        """Return u + ageing s, in token nanoseconds a second."""
        return waiting.uncached * SECOND + int(self.params.ageing) * waiting.since


class EdfParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `Edf`.

    Attributes:
        patience_ms: a request without a deadline, or that has missed it, is treated as if it
            wanted its first token so many milliseconds after it was queued.
    """

    patience_ms: int = 10_000

    def __post_init__(self) -> None:
        """Refuse negative times."""
        if self.patience_ms < 0:
            raise ConfigError(f"patience_ms is {self.patience_ms}; it must be at least 0")


class Edf(Keyed):
    """Earliest deadline of the first token first.

    Under overload, plain EDF serves those first that are late already, and makes all others late
    too; so a request that misses its deadline gets the one of a request without any: `patience_ms`
    after it was queued. Nobody starves: whoever comes more than `patience_ms` after a request
    goes behind it, unless that one's own deadline is further away and still ahead.
    """

    Params: ClassVar[type[msgspec.Struct]] = EdfParams
    refuses_late: ClassVar[bool] = True

    def key(self, waiting: Waiting) -> Any:
        """Return the deadline, in nanoseconds."""
        deadline = waiting.request.deadline
        return self._patience(waiting) if deadline == NEVER else deadline

    def first(self, now: int) -> Waiting | None:
        """Return who goes next; each request misses its deadline once at most."""
        while (waiting := self._heap.first()) is not None:
            later = self._patience(waiting)
            if not self.key(waiting) < now < later or waiting.late:
                return waiting
            waiting.late = True
            self._heap.remove(waiting)
            self._heap.add(later, waiting)
        return None

    def _patience(self, waiting: Waiting) -> int:
        return waiting.since + int(self.params.patience_ms) * _MILLISECOND


class Waiting(msgspec.Struct, eq=False):
    """A queued request.

    Attributes:
        request: the request.
        since: when it was queued, in nanoseconds.
        uncached: tokens of its prompt that the worker which holds most of them lacks.
        output: tokens that it is expected to generate.
        weight: of its tenant.
        exclude: workers that just failed it.
        returned: it ran before, and its worker failed; it goes first, and is not shed for space.
        serial: rises with each request that is queued.
        late: it missed its deadline while it waited (`edf`).
        kept: it was accepted with the first sequence of its group, so it is not shed any more.
    """

    request: Request
    since: int
    uncached: int
    output: int = 1
    weight: float = 1.0
    exclude: frozenset[str] = frozenset()
    returned: bool = False
    serial: int = 0
    late: bool = False
    kept: bool = False

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

    Adding and taking the first cost O(log n), removing any O(1), amortised: what is removed stays
    behind as a dead entry until it comes up, or until the dead outnumber the living.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Waiting]] = []
        self._live: dict[str, tuple[Any, int, Waiting]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Waiting]:
        """All of them, in no order."""
        return (entry[2] for entry in self._live.values())

    def add(self, key: Any, waiting: Waiting) -> None:
        """Add a request that is not there; all keys of a heap must be comparable."""
        entry = (key, waiting.serial, waiting)
        self._live[waiting.request.id] = entry
        heapq.heappush(self._heap, entry)

    def remove(self, waiting: Waiting) -> None:
        """Take a request out; one that is not there is no error."""
        if self._live.pop(waiting.request.id, None) is None:
            return
        if len(self._heap) > 2 * len(self._live) + 16:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)

    def last(self, most: int, before: Any, tenant: str | None = None) -> list[Waiting]:
        """Return requests whose keys are above `before`, the greatest first, at most so many.

        Of equal keys the newest come first. Requests that were accepted for good are left out.
        `tenant` picks those of one tenant. The cost is O(n).
        """
        entries = (
            entry
            for entry in self._live.values()
            if entry[0] > before and not entry[2].kept and tenant in (None, entry[2].request.tenant)
        )
        return [entry[2] for entry in heapq.nlargest(most, entries, key=lambda each: each[:2])]

    def first(self) -> Waiting | None:
        """Return the least, which stays; None when nobody waits."""
        heap = self._heap
        while heap and self._live.get(heap[0][2].request.id) is not heap[0]:
            heapq.heappop(heap)
        return heap[0][2] if heap else None
