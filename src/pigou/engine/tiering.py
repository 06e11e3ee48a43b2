"""Where the engine's blocks meet the tiers beyond the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np

from pigou.engine.sequence import Sequence
from pigou.kv.pool import BlockPool
from pigou.kv.prefix import PrefixCache
from pigou.kv.tiers import DEVICE, Move, Tiers
from pigou.request import BlockHashes, Ints

#: Sequences whose blocks wait to be offered; of more, the oldest are forgotten.
_MOST_PENDING = 4096


class Pending(NamedTuple):
    """What a sequence left on the device: hashes, shape (n, 2), and until when they hold."""

    hashes: BlockHashes
    expiry: int


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
        self._kept: dict[int, Ints] = {}
        self._room = tiers.copies

    @property
    def kept(self) -> Items[Ints]:
        """Blocks that are referred to until their copies have landed."""
        return list(self._kept.values())

    def leave(self, seq: Sequence, sealed: int) -> None:
        """Note that a sequence leaves its row; so many of its blocks can be hit."""
        if sealed:
            self._pending.append(Pending(seq.hashes[:sealed], seq.request.expiry))

    def begin(self, now: int) -> None:
        """Offer what was left, as far as there is room for copies under way.

        The rest stays in line. What is handed out before its turn comes is not offered then.
        """
        self.now = now
        self.tiers.expire(now)
        while self._pending and self._room > 0:
            pending = self._pending.popleft()
            blocks = self._prefix.match(pending.hashes, len(pending.hashes)).blocks
            if not len(blocks) or pending.expiry <= now:
                continue
            hashes = pending.hashes[: len(blocks)]
            move = self.tiers.offer(hashes, blocks, pending.expiry, now, self._room)
            if move is not None:
                self._keep(move, blocks)
                if not self._room:  # the rest of them follows
                    self._pending.appendleft(pending)

    def _keep(self, move: Move, blocks: Ints) -> None:
        """Refer to what is copied, and to what that stands on: they are released together."""
        prefix = blocks[: move.blocks[-1].depth + 1]
        kept = np.empty_like(prefix)
        self._pool.take(prefix, kept)
        self._kept[move.number] = kept
        self._room -= len(move.keys)

    def landed(self, number: int, good: Items[bool]) -> Ints:
        """Take a move's answer in; returns the device blocks to be released, shape (n,)."""
        move = self.tiers.landed(number, good, self.now)
        if move.source != DEVICE:
            return np.empty(0, dtype=np.int32)
        self._room += len(move.keys)
        return self._kept.pop(number)

    def restored(self, request: str, good: int) -> None:
        """Note that a request's load is over, and that its first `good` blocks came."""
        self.tiers.end(request, good, self.now)

    def clear(self) -> None:
        """Forget what lies anywhere, and what was to be offered."""
        self._pending.clear()
        self.tiers.clear(self.now)

    def restorable(self, seq: Sequence, first: int) -> Ints:
        """Return from which tiers a sequence's blocks from `first` on are restored, shape (n,).

        Its last token is computed in any case, for its logits.
        """
        last = min(len(seq.hashes), (seq.length - 1) // self._size)
        return self.tiers.restorable(seq.hashes[:last], first, self.now)
