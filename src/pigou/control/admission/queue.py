"""The queue of requests that no worker can take now."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator

from pigou.control.admission.queue_order import Heap, Order, Waiting
from pigou.control.admission.tenant_quota import Refusal, Shares

#: Requests that are shed at most for one newcomer.
_MOST_SHED = 8
_NOBODY: frozenset[str] = frozenset()


class WaitQueue:
    """Who waits; requests that lost their worker go first, the others in an order of choice.

    The first of them is taken as soon as it can be served, and until then nobody overtakes it:
    so no request starves for its size. Only a request that waits for want of a worker that it may
    use (`Waiting.exclude`) lets others pass.

    Each step costs O(log n), whatever the order, and O(sets of excluded workers).

    Attributes:
        order: who goes next among the new.
        shares: who may begin to wait.
    """

    def __init__(self, order: Order, shares: Shares) -> None:
        self.order = order
        self.shares = shares
        self._all: OrderedDict[str, Waiting] = OrderedDict()  # since the longest first
        self._returned: dict[frozenset[str], Heap] = {}
        self._returns = 0
        self._serial = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Waiting]:
        """Who waits, those longest that wait first; a copy, so that entries may be removed."""
        return iter(list(self._all.values()))

    def add(self, waiting: Waiting) -> int:
        """Queue a request; return how many others may go before it."""
        self._serial += 1
        waiting.serial = self._serial
        self._all[waiting.request.id] = waiting
        if waiting.returned:
            self._line(waiting.exclude).add(0, waiting)
            self._returns += 1
            return self._returns - 1
        self.shares.add(waiting)
        self.order.add(waiting)
        return len(self._all) - 1

    def remove(self, request: str) -> Waiting | None:
        """Take a request out that is not served; return it, None if it was not there."""
        waiting = self._all.pop(request, None)
        if waiting is not None and waiting.returned:
            self._leave(waiting)
        elif waiting is not None:
            self.shares.remove(waiting)
            self.order.remove(waiting)
        return waiting

    def take(self, waiting: Waiting, uncached: int) -> None:
        """A request was sent to a worker that has `uncached` tokens of its prompt to compute.

        What a tenant is charged for is the first time: that a worker failed is not its fault.
        """
        del self._all[waiting.request.id]
        if waiting.returned:
            self._leave(waiting)
        else:
            self.shares.remove(waiting)
            self.order.taken(waiting, uncached)

    def passed(self, waiting: Waiting, uncached: int) -> None:
        """A newcomer was sent to a worker at once, nobody being there: as `add`, then `take`."""
        self._serial += 1
        waiting.serial = self._serial
        self.order.add(waiting)
        self.order.taken(waiting, uncached)

    def next(self, now: int, skip: Collection[frozenset[str]] = ()) -> Waiting | None:
        """Return who goes next, but for requests that exclude just what is in `skip`."""
        firsts = [line.first() for exclude, line in self._returned.items() if exclude not in skip]
        found = [each for each in firsts if each is not None]
        if found:
            return min(found, key=lambda waiting: waiting.serial)
        return self.order.first(now)

    def refusal(self, waiting: Waiting) -> Refusal | None:
        """Return why a newcomer may not wait; None when it may."""
        return None if waiting.returned or waiting.kept else self.shares.refusal(waiting)

    def displace(self, waiting: Waiting) -> list[Waiting]:
        """Take out the least urgent so that a more urgent newcomer may wait; return them.

        Nobody is taken out where that is not enough, or where more than `_MOST_SHED` had to go.
        """
        own = (refusal := self.refusal(waiting)) is not None and refusal.tenant
        last = getattr(self.order, "last", None)  # orders of before have none
        candidates = [] if last is None else last(waiting, _MOST_SHED, own)
        for count in range(1, len(candidates) + 1):
            gone = candidates[:count]
            if self.shares.refusal(waiting, gone) is None:
                for each in gone:
                    self.remove(each.request.id)
                return gone
        return []

    def excluded(self) -> list[frozenset[str]]:
        """Return the sets of workers that some request excludes."""
        return [exclude for exclude in self._returned if exclude]

    def overdue(self, before: int, keep: bool = True) -> Iterator[Waiting]:
        """Take out those that wait since `before` or longer, and return them.

        `keep`: further sequences of a group that was accepted wait as long as they must.
        """
        late: list[Waiting] = []
        for waiting in self._all.values():
            if waiting.since > before:
                break
            if not (keep and waiting.kept):
                late.append(waiting)
        for waiting in late:
            self.remove(waiting.request.id)
            yield waiting

    def readmit(self, worker: str) -> None:
        """A worker is well again: nobody excludes it any more."""
        for exclude in self.excluded():
            if worker in exclude:
                for waiting in list(self._returned[exclude]):
                    self._reopen(waiting, exclude - {worker})

    def forgive(self, before: int) -> None:
        """Those that wait since `before` or longer exclude no worker any more."""
        for exclude in self.excluded():
            waiting = self._returned[exclude].first()
            while waiting is not None and waiting.since <= before:
                self._reopen(waiting, _NOBODY)
                line = self._returned.get(exclude)
                waiting = None if line is None else line.first()

    def _reopen(self, waiting: Waiting, exclude: frozenset[str]) -> None:
        self._leave(waiting)
        waiting.exclude = exclude
        self._line(exclude).add(0, waiting)
        self._returns += 1

    def _line(self, exclude: frozenset[str]) -> Heap:
        return self._returned.setdefault(exclude, Heap())

    def _leave(self, waiting: Waiting) -> None:
        line = self._returned[waiting.exclude]
        line.remove(waiting)
        self._returns -= 1
        if not line:
            del self._returned[waiting.exclude]
