"""The queue of requests that no worker can take now: bounded, first come first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from pigou.request import SECOND, Request

#: Ends that the drain rate is measured over.
_ENDS = 64
_LEAST_RETRY = SECOND
_MOST_RETRY = 60 * SECOND


@dataclass(slots=True)
class Waiting:
    """A queued request.

    Attributes:
        request: the request.
        since: when it was queued, in nanoseconds.
        exclude: workers that just failed it.
        returned: it ran before, and its worker failed; it goes first, and is not shed for space.
    """

    request: Request
    since: int
    exclude: frozenset[str]
    returned: bool


class WaitQueue:
    """First come, first served; requests that lost their worker go before new ones."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._returned: dict[str, Waiting] = {}
        self._fresh: dict[str, Waiting] = {}

    def __len__(self) -> int:
        return len(self._returned) + len(self._fresh)

    def __iter__(self) -> Iterator[Waiting]:
        """Who waits, in the order of service; a copy, so that entries may be removed meanwhile."""
        return iter([*self._returned.values(), *self._fresh.values()])

    @property
    def full(self) -> bool:
        """Whether a new request must be refused."""
        return len(self._fresh) >= self.most

    def add(self, waiting: Waiting) -> int:
        """Queue a request; return how many wait before it."""
        line = self._returned if waiting.returned else self._fresh
        line[waiting.request.id] = waiting
        return len(self._returned) - 1 if waiting.returned else len(self) - 1

    def remove(self, request: str) -> bool:
        """Take a request out; return whether it was there."""
        found = self._returned.pop(request, None) or self._fresh.pop(request, None)
        return found is not None


class DrainRate:
    """How fast requests leave the fleet, which is how fast the queue moves."""

    def __init__(self) -> None:
        self._ends: deque[int] = deque(maxlen=_ENDS)

    def ended(self, now: int) -> None:
        """Note that a request left."""
        self._ends.append(now)

    def retry_after(self, ahead: int, now: int) -> int:
        """Return nanoseconds until `ahead` requests will have left, between 1 and 60 seconds.

        The rate is that of the last ends up to now, so that it falls while nothing ends. With
        none measured, 1 second.
        """
        if not self._ends:
            return _LEAST_RETRY
        span = max(1, now - self._ends[0])
        return min(_MOST_RETRY, max(_LEAST_RETRY, (ahead + 1) * span // len(self._ends)))
