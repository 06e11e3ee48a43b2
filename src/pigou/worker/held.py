"""Sequences of a request that wait outside of the engine, so that others get a place in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from pigou.worker.commands import Add


class Held:
    """At most so many sequences of one reply are in the engine at once; the others wait here.

    A reply is known by a number of its own, as long as it has sequences.
    """

    def __init__(self, most: int = 0) -> None:
        """Start empty; `most` of one reply are in the engine at once, 0 for all."""
        self._most = most
        self._inside: dict[int, int] = {}
        self._held: dict[int, deque[Add]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def enters(self, reply: int, add: Add) -> bool:
        """Return whether a sequence goes to the engine now; otherwise it is kept."""
        inside = self._inside.get(reply, 0)
        if self._most and inside >= self._most:
            self._held.setdefault(reply, deque()).append(add)
            return False
        self._inside[reply] = inside + 1
        return True

    def left(self, reply: int) -> Add | None:
        """A sequence left the engine; return the one that takes its place."""
        waiting = self._held.get(reply)
        if waiting:
            add = waiting.popleft()
            if not waiting:
                del self._held[reply]
            return add
        inside = self._inside.get(reply, 0) - 1
        if inside > 0:
            self._inside[reply] = inside
        else:
            self._inside.pop(reply, None)
        return None

    def drop(self, reply: int) -> Iterator[Add]:
        """Forget what is kept of a reply, and return it."""
        return iter(self._held.pop(reply, ()))

    def clear(self) -> None:
        """Forget everything."""
        self._inside.clear()
        self._held.clear()
