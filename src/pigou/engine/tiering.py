"""Where the engine's blocks meet the tiers beyond the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np

from pigou.engine.plan import Load
from pigou.engine.sequence import Sequence
from pigou.engine.waiting import Pending, Waiting
from pigou.kv.integrity import ensure
from pigou.kv.move import DEVICE, Move
from pigou.kv.pool import BlockPool
from pigou.kv.prefix import PrefixCache
from pigou.kv.returns import Pause, Returns
from pigou.kv.tiers import Tiers
from pigou.request import BlockHashes, Ints

#: Sequences whose blocks wait to be offered; of more, the oldest are forgotten.
_MOST_PENDING = 4096
#: Begins the names of loads that no request has asked for.
RETURN = "return:"


class Copy(NamedTuple):
    """Device blocks that are referred to while they are copied.

    Attributes:
        table: of a sequence from its beginning on, shape (n,).
        yields: whether they are to be handed out once they are copied.
    """

    table: Ints
    yields: bool


class Fetch(NamedTuple):
    """Blocks that are brought back before anybody asks for them.

    Attributes:
        table: device blocks of a session from its beginning on, shape (n,).
        hashes: of these, shape (n, 2).
        first: index of the first that is brought back.
    """

    table: Ints
    hashes: BlockHashes
    first: int


class Tiering:
    """Offers what sequences leave behind to the tiers, and keeps it while it is copied.

    Attributes:
        tiers: which decide.
        now: of the last plan, in nanoseconds since 1970.
    """

    def __init__(self, tiers: Tiers, pool: BlockPool, prefix: PrefixCache, block_size: int) -> None:
        self.tiers = tiers
        self.now = 0
        self._pool, self._prefix, self._size = pool, prefix, block_size
        self._pending: deque[Pending] = deque(maxlen=_MOST_PENDING)
        self._waiting = Waiting(pool)
        self._kept: dict[int, Copy] = {}
        self._rest: dict[int, Pending] = {}  # by move, what is still to be offered
        self._returns = Returns()
        self._fetched: dict[str, Fetch] = {}
        self._fetches: list[Load] = []
        self._number = 0
        self._room = tiers.copies
        tiers.attend(prefix.holds)

    @property
    def kept(self) -> Items[Ints]:
        """Blocks that are referred to until their copies have landed."""
        copies = (copy.table for copy in self._kept.values())
        return [*copies, *(fetch.table for fetch in self._fetched.values())]

    def leave(self, seq: Sequence, sealed: int) -> None:
        """Note that a sequence leaves its row; so many of its blocks can be hit."""
        if sealed:
            self._pending.append(Pending(seq.hashes[:sealed], seq.request.expiry))

    def begin(self, now: int) -> None:
        """Offer what was left, as far as there is room for copies under way.

        The rest stays in line. What is handed out before its turn comes is not offered then. Where
        the tiers would rather wait, what was left is offered when it is about to be handed out. To
        call it again at once changes nothing.
        """
        self.now = now
        self.tiers.expire(now)
        self._offer_left()
        due = self._waiting.due()
        if due:
            self._pending.extendleft(left._replace(last=True) for left in due)
            self._offer_left()

    @property
    def spare(self) -> int:
        """How many free blocks may be handed out before a chain is due (`Waiting.spare`)."""
        return self._waiting.spare

    def _offer_left(self) -> None:
        now = self.now
        while self._pending and self._room > 0:
            pending = self._pending.popleft()
            blocks = self._prefix.match(pending.hashes, len(pending.hashes)).blocks
            if not len(blocks) or pending.expiry <= now:
                continue
            hashes = pending.hashes[: len(blocks)]
            if not pending.used:
                self.tiers.use(hashes, pending.expiry, now)
                pending = pending._replace(used=True)
            if not pending.last and self.tiers.waits(len(blocks)):
                self._waiting.add(pending, blocks)
                continue
            move = self.tiers.offer(hashes, blocks, pending.expiry, now, self._room)
            if move is not None:
                self._keep(move, blocks, pending.last and self._room > len(move.keys))
                if not self._room:  # the rest of them follows
                    self._pending.appendleft(pending)
                    self._rest[move.number] = pending

    def _keep(self, move: Move, blocks: Ints, yields: bool) -> None:
        """Refer to what is copied, and to what that stands on: they are released together."""
        prefix = blocks[: move.blocks[-1].depth + 1]
        kept = np.empty_like(prefix)
        self._pool.take(prefix, kept)
        self._kept[move.number] = Copy(kept, yields)
        self._room -= len(move.keys)

    def landed(self, number: int, good: Items[bool]) -> Copy | None:
        """Take a move's answer in; returns the device blocks to be released, if there are any."""
        move = self.tiers.landed(number, good, self.now)
        if move.source != DEVICE:
            return None
        self._room += len(move.keys)
        rest = self._rest.pop(number, None)
        if rest is not None and not all(good):  # or it were tried for ever
            left = [pending for pending in self._pending if pending is not rest]
            self._pending = deque(left, maxlen=_MOST_PENDING)
        return self._kept.pop(number)

    # --- sessions that are away -----------------------------------------------------------------

    def away(self, seq: Sequence, sealed: int) -> None:
        """Note that a sequence has ended; its session may come back."""
        if sealed and self.tiers.recall:
            self._returns.left(seq.hashes[:sealed], seq.request.expiry, self.now)

    def back(self, hashes: BlockHashes, now: int) -> None:
        """Note that a request with these blocks has come."""
        self._returns.came(hashes, now)

    def next_return(self) -> int | None:
        """Return when the next session is due, nanoseconds since 1970; None when nobody is."""
        return self._returns.next()

    def recall(self, spare: int, now: int) -> list[BlockHashes]:
        """Begin to bring back what sessions need that are due, and what lies in tiers alone.

        At most half of the `spare` blocks are taken. Returns the hashes that had to go for it.
        """
        room = spare // 2
        removed = []
        for pause in self._returns.due(now):
            shared = self._prefix.match(pause.hashes, len(pause.hashes)).blocks
            tiers = self.tiers.restorable(pause.hashes, len(shared), now)
            taken = len(tiers) + int((self._pool.refs(shared) == 0).sum())
            if len(tiers) and taken <= room:
                room -= taken
                removed.append(self._fetch(pause, shared, tiers, now))
        return removed

    def _fetch(self, pause: Pause, shared: Ints, tiers: Ints, now: int) -> BlockHashes:
        first, last = len(shared), len(shared) + len(tiers)
        table = np.empty(last, dtype=np.int32)
        self._pool.take(shared, table[:first])
        removed = self._pool.allocate(table[first:])
        request, hashes = f"{RETURN}{self._number}", pause.hashes[first:last]
        self._number += 1
        self._fetched[request] = Fetch(table, pause.hashes[:last], first)
        self.tiers.begin(request, hashes, tiers, now)
        self._fetches.append(Load(request, -1, first, table[first:].copy(), tiers, hashes))
        return removed

    def fetches(self) -> list[Load]:
        """Return the loads that have been begun since the last call."""
        found, self._fetches = self._fetches, []
        return found

    def fetched(self, request: str) -> Fetch | None:
        """Take a fetch that has ended; None if the request is not one."""
        return self._fetched.pop(request, None)

    # --- requests -------------------------------------------------------------------------------

    def restored(self, request: str, good: int, failed: bool) -> None:
        """Note that a request's load is over; its first `good` blocks came (`Tiers.end`)."""
        self.tiers.end(request, good, self.now, failed, request not in self._fetched)

    def clear(self) -> None:
        """Forget what lies anywhere, and what was to be offered."""
        self._pending.clear()
        self._waiting.clear()
        self._returns.clear()
        self.tiers.clear(self.now)

    def check(self) -> None:
        """Check the tiers, and that no more is kept for them than may be.

        Raises:
            IntegrityError: names the first law that does not hold.
        """
        self.tiers.check()
        copies = self.tiers.copies_under()
        under = sum(copies.values())
        ensure(copies.keys() == self._kept.keys(), "what is copied is kept, and nothing else")
        ensure(
            under + self._room == self.tiers.copies and self._room >= 0,
            f"{under} blocks are under copy, {self._room} more may be, of {self.tiers.copies}",
        )

    def restorable(self, seq: Sequence, first: int) -> Ints:
        """Return from which tiers a sequence's blocks from `first` on are restored, shape (n,).

        Its last token is computed in any case, for its logits.
        """
        last = min(len(seq.hashes), (seq.length - 1) // self._size)
        return self.tiers.restorable(seq.hashes[:last], first, self.now)
