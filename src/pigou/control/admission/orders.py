"""Orders that give each request a key: the least goes first."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from pigou.config import ConfigError
from pigou.control.admission.order import NoParams
from pigou.control.admission.waiting import Heap, Waiting
from pigou.request import NEVER, SECOND, Request

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
