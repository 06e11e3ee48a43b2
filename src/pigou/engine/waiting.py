"""What sequences left on the device, and is offered to the tiers before it is handed out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pigou.kv.pool import BlockPool
from pigou.request import BlockHashes, Ints

#: A chain is offered when its tail is so many times its own length from being handed out: the copy
#: goes from its beginning on, and must be there before the tail is.
_AHEAD = 2
#: Free blocks that are looked at for it, at most: links copy faster than prompts take blocks.
_FARTHEST = 2048
#: Free blocks that later steps of a plan may take while chains wait, at most.
_FORESEEN = 512


class Pending(NamedTuple):
    """What a sequence left on the device.

    Attributes:
        hashes: shape (n, 2).
        expiry: until when they hold.
        used: whether the tiers were told of their use.
        last: whether the device is about to hand the blocks out.
    """

    hashes: BlockHashes
    expiry: int
    used: bool = False
    last: bool = False


class Waiting:
    """Chains on the device, by the blocks that they were the last to leave."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._left: dict[int, Pending] = {}
        self._owner: Ints = np.full(pool.blocks, -1, dtype=np.int32)
        #: How near to being handed out each block makes its chain due; 0 where none waits.
        self._reach: Ints = np.zeros(pool.blocks, dtype=np.int32)
        self._farthest = 0
        self._number = 0

    def add(self, left: Pending, blocks: Ints) -> None:
        """Let a chain wait, which lies in these blocks, shape (n,).

        One that has none of its blocks to itself any more waits no longer: it is part of others.
        """
        before = self._owner[blocks]
        self._owner[blocks] = self._number
        reach = min(_AHEAD * len(blocks), _FARTHEST)
        self._reach[blocks] = reach
        self._farthest = max(self._farthest, reach)
        self._left[self._number] = left
        self._number += 1
        for number in np.unique(before).tolist():
            if number in self._left and not (self._owner == number).any():
                del self._left[number]

    @property
    def spare(self) -> int:
        """How many free blocks may be handed out before a chain is due, if nothing else happens.

        Negative where one is due by now. With it, plans of many steps end where single ones would
        offer a chain.
        """
        if not self._left:
            return len(self._owner)
        front = self._pool.peek(min(self._pool.free, self._farthest + _FORESEEN))
        reach = self._reach[front]
        far = np.arange(len(front)) - reach
        return int(far[reach > 0].min(initial=_FORESEEN))

    def due(self) -> list[Pending]:
        """Return the chains whose turn it is, and let them wait no longer."""
        found: list[Pending] = []
        if not self._left:
            return found
        front = self._pool.peek(min(self._farthest, self._pool.free))
        near = self._reach[front] > np.arange(len(front))
        for number in dict.fromkeys(self._owner[front[near]].tolist()):
            blocks = np.flatnonzero(self._owner == number)
            self._owner[blocks] = -1
            self._reach[blocks] = 0
            left = self._left.pop(number, None)
            if left is not None:
                found.append(left)
        if not self._left:
            self._farthest = 0
        return found

    def clear(self) -> None:
        """Forget all."""
        self._left.clear()
        self._owner[:] = -1
        self._reach[:] = 0
        self._farthest = 0
