"""KV offload connector: offers the engine's blocks to the tiers, and loads them back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np

from pigou.engine.plan import Load
from pigou.engine.sequence import Sequence
from pigou.kv.block import ensure
from pigou.kv.block_pool import BlockPool
from pigou.kv.offload import DEVICE, Move
from pigou.kv.prefix_cache import PrefixCache
from pigou.kv.session_returns import SessionPause, SessionReturns
from pigou.kv.tiers import Tiers
from pigou.request import BlockHashes, Ints

#: Maximum of sequences with pending offers; beyond it the oldest are dropped.
_MAX_PENDING = 4096
#: Prefix of the ids of prefetches.
RETURN = "return:"
#: A chain is due when its tail is within this many times its length of being reused: the copy
#: begins at the head, and must end before the tail is reused.
_AHEAD = 2
#: Maximum of free blocks inspected for due chains: links copy faster than prompts take blocks.
_MAX_DISTANCE = 2048
#: Maximum lookahead, in blocks, while chains are deferred.
_MAX_LOOKAHEAD = 512


class OffloadCandidate(NamedTuple):
    """Cached blocks of a chain that a sequence left on the device."""

    hashes: BlockHashes  # shape (n, 2)
    expiry: int  # nanoseconds since 1970
    tenant: str = ""
    use_noted: bool = False  # True once the tiers recorded their use
    last: bool = False  # True if the device is about to evict the blocks


class DeferredOffload:
    """Chains to offer when the device is about to evict their blocks."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._left: dict[int, OffloadCandidate] = {}
        self._owner: Ints = np.full(pool.blocks, -1, dtype=np.int32)
        #: Distance from being handed out at which a block's chain is due; 0: none is deferred.
        self._distance: Ints = np.zeros(pool.blocks, dtype=np.int32)
        self._max_distance = 0
        self._number = 0

    def add(self, left: OffloadCandidate, blocks: Ints) -> None:
        """Defer a chain in these blocks, shape (n,); chains covered by later ones are dropped."""
        before = self._owner[blocks]
        self._owner[blocks] = self._number
        distance = min(_AHEAD * len(blocks), _MAX_DISTANCE)
        self._distance[blocks] = distance
        self._max_distance = max(self._max_distance, distance)
        self._left[self._number] = left
        self._number += 1
        for number in np.unique(before).tolist():
            if number in self._left and not (self._owner == number).any():
                del self._left[number]

    @property
    def spare(self) -> int:
        """Free blocks that can be taken before a chain is due; negative if one is."""
        if not self._left:
            return len(self._owner)
        front = self._pool.peek(min(self._pool.free, self._max_distance + _MAX_LOOKAHEAD))
        distance = self._distance[front]
        far = np.arange(len(front)) - distance
        return int(far[distance > 0].min(initial=_MAX_LOOKAHEAD))

    def due(self) -> list[OffloadCandidate]:
        """Remove and return the chains that are due."""
        candidates: list[OffloadCandidate] = []
        if not self._left:
            return candidates
        front = self._pool.peek(min(self._max_distance, self._pool.free))
        near = self._distance[front] > np.arange(len(front))
        for number in dict.fromkeys(self._owner[front[near]].tolist()):
            blocks = np.flatnonzero(self._owner == number)
            self._owner[blocks] = -1
            self._distance[blocks] = 0
            left = self._left.pop(number, None)
            if left is not None:
                candidates.append(left)
        if not self._left:
            self._max_distance = 0
        return candidates

    def clear(self) -> None:
        """Forget all chains."""
        self._left.clear()
        self._owner[:] = -1
        self._distance[:] = 0
        self._max_distance = 0


class PinnedCopy(NamedTuple):
    """Device blocks pinned while they are copied."""

    table: Ints  # leading blocks of a sequence, shape (n,)
    evict_next: bool  # True to free them for reuse first


class Prefetch(NamedTuple):
    """Blocks loaded from tiers before a request needs them."""

    table: Ints  # device blocks of a session from its beginning on, shape (n,)
    hashes: BlockHashes
    first: int  # index of the first block to load


class KVOffloadConnector:
    """Offers blocks of finished sequences to the tiers, and pins them during copies."""

    def __init__(self, tiers: Tiers, pool: BlockPool, prefix: PrefixCache, block_size: int) -> None:
        self.tiers = tiers
        self.now = 0  # time of the last plan, nanoseconds since 1970
        self._pool, self._prefix, self._size = pool, prefix, block_size
        self._pending: deque[OffloadCandidate] = deque(maxlen=_MAX_PENDING)
        self.deferred = DeferredOffload(pool)
        self._pinned: dict[int, PinnedCopy] = {}
        #: By move, the chain of which blocks are still to be offered.
        self._rest: dict[int, OffloadCandidate] = {}
        self.returns = SessionReturns()
        self.prefetches: dict[str, Prefetch] = {}
        self._loads: list[Load] = []
        self._number = 0
        self._room = tiers.copies
        tiers.set_device_probe(prefix.holds)

    @property
    def pinned(self) -> Items[Ints]:
        """Tables of blocks pinned until their copies or loads are done."""
        copies = (copy.table for copy in self._pinned.values())
        return [*copies, *(fetch.table for fetch in self.prefetches.values())]

    def sequence_left(self, seq: Sequence, cached: int) -> None:
        """Record that a sequence left its row with `cached` blocks in the prefix cache."""
        if cached:
            request = seq.request
            left = OffloadCandidate(seq.hashes[:cached], request.expiry, request.tenant)
            self._pending.append(left)

    def offer_pending(self, now: int) -> None:
        """Offer pending chains within the limit of copies; deferred ones when due."""
        self.now = now
        self.tiers.expire(now)
        self._offer_candidates()
        due = self.deferred.due()
        if due:
            self._pending.extendleft(left._replace(last=True) for left in due)
            self._offer_candidates()

    def _offer_candidates(self) -> None:
        now = self.now
        while self._pending and self._room > 0:
            pending = self._pending.popleft()
            blocks = self._prefix.match(pending.hashes, len(pending.hashes)).blocks
            if not len(blocks) or pending.expiry <= now:
                continue
            hashes = pending.hashes[: len(blocks)]
            if not pending.use_noted:
                self.tiers.use(hashes, pending.expiry, now)
                pending = pending._replace(use_noted=True)
            if not pending.last and self.tiers.defers(len(blocks)):
                self.deferred.add(pending, blocks)
                continue
            expiry, tenant = pending.expiry, pending.tenant
            move = self.tiers.offer(hashes, blocks, expiry, now, self._room, tenant)
            if move is not None:
                self._pin(move, blocks, pending.last and self._room > len(move.keys))
                if not self._room:  # the rest of them follows
                    self._pending.appendleft(pending)
                    self._rest[move.number] = pending

    def _pin(self, move: Move, blocks: Ints, evict_next: bool) -> None:
        prefix = blocks[: move.blocks[-1].depth + 1]
        pinned = np.empty_like(prefix)
        self._pool.take(prefix, pinned)
        self._pinned[move.number] = PinnedCopy(pinned, evict_next)
        self._room -= len(move.keys)

    def on_transfer_done(self, number: int, good: Items[bool]) -> PinnedCopy | None:
        """Complete a move; return the device blocks to release, if any."""
        move = self.tiers.on_transfer_done(number, good, self.now)
        if move.source != DEVICE:
            return None
        self._room += len(move.keys)
        rest = self._rest.pop(number, None)
        if rest is not None and not all(good):  # or it were tried for ever
            left = [pending for pending in self._pending if pending is not rest]
            self._pending = deque(left, maxlen=_MAX_PENDING)
        return self._pinned.pop(number)

    # --- sessions that may return ---------------------------------------------------------------

    def session_left(self, seq: Sequence, cached: int) -> None:
        """Record the end of a session's turn."""
        if cached and self.tiers.recall:
            request = seq.request
            self.returns.on_turn_end(seq.hashes[:cached], request.expiry, self.now, request.tenant)

    def prefetch_returning(
        self, spare: int, now: int, account: Callable[[str], int]
    ) -> list[BlockHashes]:
        """Prefetch due sessions from tiers to their tenants' accounts; return evicted hashes."""
        room = spare // 2
        removed = []
        for pause in self.returns.due(now):
            shared = self._prefix.match(pause.hashes, len(pause.hashes)).blocks
            tiers = self.tiers.restorable(pause.hashes, len(shared), now)
            taken = len(tiers) + int((self._pool.refs(shared) == 0).sum())
            own = account(pause.tenant)
            if len(tiers) and taken <= min(room, self._pool.available(own)):
                room -= taken
                removed.append(self._prefetch(pause, shared, tiers, now, own))
        return removed

    def _prefetch(
        self, pause: SessionPause, shared: Ints, tiers: Ints, now: int, account: int
    ) -> BlockHashes:
        first, last = len(shared), len(shared) + len(tiers)
        table = np.empty(last, dtype=np.int32)
        self._pool.take(shared, table[:first])
        removed = self._pool.allocate(table[first:], account)
        request, hashes = f"{RETURN}{self._number}", pause.hashes[first:last]
        self._number += 1
        self.prefetches[request] = Prefetch(table, pause.hashes[:last], first)
        self.tiers.begin_load(request, hashes, tiers, now)
        self._loads.append(Load(request, -1, first, table[first:].copy(), tiers, hashes))
        return removed

    def take_loads(self) -> list[Load]:
        """Return the prefetches started since the last call."""
        loads, self._loads = self._loads, []
        return loads

    # --- requests -------------------------------------------------------------------------------

    def on_load_done(self, request: str, good: int, failed: bool) -> None:
        """Record the end of a load; its first `good` blocks arrived."""
        self.tiers.end_load(request, good, self.now, failed, request not in self.prefetches)

    def clear(self) -> None:
        """Clear the tiers and all pending offers."""
        self._pending.clear()
        self.deferred.clear()
        self.returns.clear()
        self.tiers.clear(self.now)

    def check(self) -> None:
        """Raise an IntegrityError unless exactly the blocks under copy are pinned."""
        self.tiers.check()
        copies = self.tiers.copies_under()
        under = sum(copies.values())
        ensure(copies.keys() == self._pinned.keys(), "what is copied is kept, and nothing else")
        ensure(
            under + self._room == self.tiers.copies and self._room >= 0,
            f"{under} blocks are under copy, {self._room} more may be, of {self.tiers.copies}",
        )

    def restorable(self, seq: Sequence, first: int) -> Ints:
        """Return the tiers to load a sequence's blocks from `first` on from, shape (n,)."""
        last = min(len(seq.hashes), (seq.length - 1) // self._size)
        return self.tiers.restorable(seq.hashes[:last], first, self.now)
