"""PrefixIndex: who holds which blocks, by the workers' KV events or by prediction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pigou.control.prefix_index.block_keys import (
    KeyedCleared,
    KeyedEvent,
    KeyedRemoved,
    KeyedStored,
    chain,
)
from pigou.control.prefix_index.entries import Change, Entries
from pigou.control.prefix_index.ghosts import Ghosts
from pigou.control.prefix_index.holdings import Holdings
from pigou.control.prefix_index.predictions import Predictions
from pigou.control.prefix_index.slots import Words
from pigou.control.prefix_index.table import Overlaps, Table
from pigou.control.prefix_index.table_kernels import DEVICE, NOBODY
from pigou.control.prefix_index.wire import WORD, column, name_of, names_of, tier_of
from pigou.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from pigou.request import SECOND, BlockKeys
from pigou.wire.kv_event_decoding import Cleared, Removed, Stored, WireEvent

#: Orders of workers that are remembered; more are forgotten all at once.
_ORDERS = 64


@dataclass(frozen=True, slots=True)
class WorkerCacheStats:
    """What is known of one worker's cache.

    Attributes:
        blocks: that it holds, as its events say.
        held: those of them that can be matched; the tokens or the parent of others are unknown.
        predicted: blocks that it is expected to hold.
        events: that were taken in.
        losses: times that everything was forgotten, because events were missed.
        evicted: blocks that were forgotten to stay within limits.
    """

    blocks: int = 0
    held: int = 0
    predicted: int = 0
    events: int = 0
    losses: int = 0
    evicted: int = 0


@dataclass(slots=True)
class _Member:
    number: int
    holdings: Holdings
    predictions: Predictions
    events: int = 0
    losses: int = 0


class PrefixIndex:
    """The blocks of all workers, by 64-bit keys over token ids (`block_keys`).

    Events link blocks by the engine's own hashes, which only mean something among the events of
    one worker. A block whose tokens are hidden, or whose parent the worker does not hold, is
    counted and never matched.
    """

    def __init__(
        self, max_blocks: int = 2**20, max_total: int = 2**22, ttl: int = 120 * SECOND
    ) -> None:
        """Start empty.

        Args:
            max_blocks: most blocks that are kept of one worker's events, and as many of what is
                predicted of it; the leaf that was stored longest ago goes first.
            max_total: most blocks of all workers together; the worker with the most gives up.
            ttl: nanoseconds for which a prediction holds.

        Raises:
            ValueError: one of them is below 1.
        """
        for name, value in (("max_blocks", max_blocks), ("max_total", max_total), ("ttl", ttl)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self._limit = min(max_blocks, max_total)
        self._max_total = max_total
        self._ttl = ttl
        self._table = Table()
        self._ghosts = Ghosts()
        self._members: dict[str, _Member] = {}
        self._orders: dict[tuple[str, ...], NDArray[np.int64]] = {}
        self._asked: tuple[str, ...] = ()
        self._order: NDArray[np.int64] = self._arrange(())
        self._blocks = 0
        self._evicted = 0
        self._removed = 0
        self._foretold = False  # whether anything was predicted
        self._spare: list[int] = []
        self._next = 0

    @property
    def blocks(self) -> int:
        """Blocks that are kept, of all workers, predictions counted."""
        return self._blocks

    @property
    def keys(self) -> int:
        """Different blocks among those that can be matched."""
        return self._table.keys

    @property
    def evicted(self) -> int:
        """Blocks that were forgotten to stay within limits, since the start."""
        return self._evicted + sum(
            each.holdings.evicted + each.predictions.evicted for each in self._members.values()
        )

    @property
    def removed(self) -> int:
        """Blocks that left a device for others, as events told, since the start."""
        return self._removed

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return (
            self._ghosts.nbytes
            + self._table.nbytes
            + sum(each.holdings.nbytes + each.predictions.nbytes for each in self._members.values())
        )

    def apply(self, worker: str, events: Iterable[KVEvent | WireEvent | KeyedEvent]) -> None:
        """Take in events of a worker, in order.

        Events of the wire are keyed by token ids and parent. Core events (a simulated worker's)
        carry hashes that every worker shares; the low half is the key.
        """
        member = self._members.get(worker) or self._member(worker)
        for event in events:
            member.events += 1
            if isinstance(event, BlockStored):
                both = np.ascontiguousarray(event.hashes, dtype=WORD)  # the names are the keys
                parent = event.parent.item(-1) if event.parent.size else None
                self._store(member, both, both, parent, event.medium)
            elif isinstance(event, BlockRemoved):
                gone = np.ascontiguousarray(event.hashes, dtype=WORD)
                self._remove(member, gone, event.medium)
            elif isinstance(event, Stored):
                self._stored(member, event)
            elif isinstance(event, Removed | KeyedRemoved):
                gone = column(names_of(event.hashes))
                self._remove(member, gone, event.medium)
            elif isinstance(event, Cleared | AllBlocksCleared | KeyedCleared):
                self._clear(member, member.holdings)
            elif isinstance(event, KeyedStored):
                names, keys = column(event.hashes), column(event.keys)
                self._store(member, names, keys, event.parent, event.medium)

    def keyed(self, worker: str, event: KVEvent | WireEvent | KeyedEvent) -> KeyedEvent:
        """Return a worker's next event without tokens; `apply` takes it for the same.

        What it means depends on the events before it: those must have been applied.
        """
        if isinstance(event, Stored):
            member = self._members.get(worker)
            hashes = names_of(event.hashes)
            parent = None if event.parent is None else name_of(event.parent)
            keys = _keys(None if member is None else member.holdings, event, parent, len(hashes))
            return KeyedStored(hashes, keys, parent, event.medium)
        if isinstance(event, BlockStored):
            low, before = names_of(event.hashes[:, 1]), event.parent[:, 1]
            return KeyedStored(low, low, int(before[-1]) if len(before) else None, event.medium)
        if isinstance(event, Removed):
            return KeyedRemoved(names_of(event.hashes), event.medium)
        if isinstance(event, BlockRemoved):
            return KeyedRemoved(names_of(event.hashes[:, 1]), event.medium)
        return KeyedCleared() if isinstance(event, Cleared | AllBlocksCleared) else event

    def expect(self, worker: str, blocks: int) -> None:
        """A worker has so many blocks; 0 when it did not say. Its arrays need not grow to that."""
        self._member(worker).holdings.usual = blocks

    def predict(self, worker: str, keys: BlockKeys, now: int) -> None:
        """Expect that a worker holds a chain soon, because a request was sent there.

        For workers that publish no events. It is expected for `ttl` from `now` on, in device
        memory. Calls come in the order of `now` (nanoseconds).
        """
        self._foretold = True
        member = self._member(worker)
        self._make_room(len(keys))
        self._change(
            member,
            member.predictions,
            member.predictions.predict(np.ascontiguousarray(keys, dtype=WORD), now + self._ttl),
        )

    def expire(self, now: int) -> None:
        """Give up predictions whose time is over; call it several times a second."""
        if not self._foretold:
            return
        for member in self._members.values():
            if len(member.predictions):
                self._change(member, member.predictions, member.predictions.expire(now))

    def lost(self, worker: str) -> None:
        """Forget a worker's blocks, because events were missed; they come back one by one."""
        member = self._member(worker)
        member.losses += 1
        self._clear(member, member.holdings)

    def drop(self, worker: str) -> None:
        """Forget a worker."""
        member = self._members.pop(worker, None)
        if member is None:
            return
        self._clear(member, member.holdings)
        self._clear(member, member.predictions)
        self._evicted += member.holdings.evicted + member.predictions.evicted
        self._spare.append(member.number)
        self._forget_orders()

    def cache(self, worker: str) -> WorkerCacheStats:
        """Return what is known of a worker's cache; zeros for one that never spoke."""
        member = self._members.get(worker)
        if member is None:
            return WorkerCacheStats()
        holdings, predictions = member.holdings, member.predictions
        return WorkerCacheStats(
            blocks=len(holdings),
            held=holdings.known,
            predicted=len(predictions),
            events=member.events,
            losses=member.losses,
            evicted=holdings.evicted + predictions.evicted,
        )

    def overlap(self, worker: str, keys: BlockKeys) -> int:
        """Return how many leading blocks of this chain the worker holds, in any tier."""
        return int(self.overlaps((worker,), keys).run[0])

    def overlaps(self, workers: Sequence[str], keys: BlockKeys) -> Overlaps:
        """Return how many leading blocks of a chain each worker holds, and in which tiers.

        Args:
            workers: whom to ask about; nothing is held by a worker that never spoke.
            keys: of the chain, shape (blocks,); a key of 0 is held by nobody.

        Returns:
            Arrays in the order of `workers`.
        """
        if workers is self._asked:  # hashing many names takes longer than a short walk
            order = self._order
        else:
            ids = tuple(workers)
            found = self._orders.get(ids)
            order = self._arrange(ids) if found is None else found
            if ids is workers:
                self._asked, self._order = ids, order
        return self._table.overlaps(order, np.ascontiguousarray(keys, dtype=WORD))

    def recomputed_share(self, workers: Sequence[str]) -> NDArray[np.float64]:
        """Return blocks that had to go and were computed again, for each stored, (workers,)."""
        if workers is self._asked:
            return self._ghosts.share(self._order)
        ids = tuple(workers)
        order = self._orders.get(ids)
        return self._ghosts.share(self._arrange(ids) if order is None else order)

    def _arrange(self, ids: tuple[str, ...]) -> NDArray[np.int64]:
        """Return the numbers of workers, and remember them."""
        if len(self._orders) >= _ORDERS:
            self._orders.clear()
        known = (self._members.get(worker) for worker in ids)
        numbers = [NOBODY if each is None else each.number for each in known]
        order = self._orders[ids] = np.array(numbers, dtype=np.int64)
        return order

    def _forget_orders(self) -> None:
        self._orders.clear()
        self._asked = ()
        self._order = self._arrange(())

    def _member(self, worker: str) -> _Member:
        member = self._members.get(worker)
        if member is None:
            if self._spare:
                number = self._spare.pop()
            else:
                number, self._next = self._next, self._next + 1
            self._table.admit(number)
            self._ghosts.admit(number)
            member = _Member(number, Holdings(self._limit), Predictions(self._limit))
            self._members[worker] = member
            self._forget_orders()
        return member

    def _stored(self, member: _Member, event: Stored) -> None:
        hashes = names_of(event.hashes)
        parent = None if event.parent is None else name_of(event.parent)
        keys = _keys(member.holdings, event, parent, len(hashes))
        self._store(member, column(hashes), column(keys), parent, event.medium)

    def _store(
        self, member: _Member, hashes: Words, keys: Words, parent: int | None, medium: str | None
    ) -> None:
        """Store blocks; hashes and keys are in the last columns."""
        if self._blocks + len(hashes) > self._max_total:
            self._make_room(member.holdings.absent(hashes))
        self._blocks += member.holdings.store(
            self._table, self._ghosts, member.number, hashes, keys, parent, medium
        )
        if self._blocks > self._max_total:  # what made room may have been among what was stored
            self._make_room(0)

    def _remove(self, member: _Member, hashes: Words, medium: str | None) -> None:
        """Remove blocks from a tier; hashes are in the last column."""
        if tier_of(medium) == DEVICE:
            self._removed += len(hashes)
        self._ghosts.reserve(self._blocks)
        self._blocks += member.holdings.remove(
            self._table, self._ghosts, member.number, hashes, medium
        )

    def _clear(self, member: _Member, entries: Entries) -> None:
        self._change(member, entries, entries.clear())

    def _change(self, member: _Member, entries: Entries, change: Change) -> None:
        self._table.change(member.number, change.gained, change.lost)
        self._blocks += entries.grown()

    def _make_room(self, more: int) -> None:
        while self._blocks and self._blocks + more > self._max_total:
            member, entries = self._largest()
            change = entries.evict(self._blocks + more - self._max_total)
            self._change(member, entries, change)

    def _largest(self) -> tuple[_Member, Holdings | Predictions]:
        return max(
            (
                (member, entries)
                for member in self._members.values()
                for entries in (member.holdings, member.predictions)
            ),
            key=lambda each: len(each[1]),
        )


def _keys(holdings: Holdings | None, event: Stored, parent: int | None, blocks: int) -> Words:
    """Return the key of each stored block; zeros where they are not known."""
    before = None
    if parent is not None and holdings is not None:
        before = holdings.key(parent)
    if len(event.token_ids) == blocks * event.block_size and (parent is None or before is not None):
        try:
            return chain(event.token_ids, event.block_size, event.salt or "", before)
        except (OverflowError, TypeError):
            pass  # ids that are no tokens: what they stand for is hidden from us
    return np.zeros(blocks, dtype=np.uint64)
