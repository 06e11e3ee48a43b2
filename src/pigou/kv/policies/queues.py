"""Policies of queues, that a block waits in until it comes up: SIEVE and S3-FIFO."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from pigou.kv.block import Block, Entry
from pigou.kv.policies.base import Base
from pigou.kv.policies.ghosts import Ghosts
from pigou.kv.policies.policy import Setting

Queue = OrderedDict[bytes, Entry]


def oldest(queue: Queue) -> Entry:
    """Return the block at a queue's end, where it is left."""
    return next(iter(queue.values()))


class Sieve(Base):
    """SIEVE (Zhang et al., NSDI '24): a queue, and a hand that evicts what was not visited.

    The hand moves from the oldest block to the youngest. Of a visited one it takes the mark; one
    that is not free it passes.
    """

    paths = True

    def __init__(self, setting: Setting, params: msgspec.Struct | None = None) -> None:
        super().__init__(setting, params)
        #: From the oldest to the hand, and from the hand to the youngest.
        self._behind: Queue = OrderedDict()
        self._ahead: Queue = OrderedDict()

    def victim(self, newcomer: Block, now: int) -> Entry | None:
        """Move the hand to the first free block that is not marked."""
        for _ in range(2 * (len(self._behind) + len(self._ahead)) + 1):
            if not self._ahead:
                self._ahead, self._behind = self._behind, self._ahead
            if not self._ahead:
                return None
            entry = oldest(self._ahead)
            if entry.free and not entry.mark:
                return entry
            if entry.free:
                entry.mark = 0
            del self._ahead[entry.block.key]
            self._behind[entry.block.key] = entry
        return None

    def insert(self, entry: Entry, now: int) -> None:
        """Put it at the queue's young end; a hand that had come there begins anew."""
        if not self._ahead:
            self._ahead, self._behind = self._behind, self._ahead
        self._ahead[entry.block.key] = entry

    def hit(self, entry: Entry, now: int) -> None:
        """Mark it as visited."""
        entry.mark = 1

    def remove(self, entry: Entry, evicted: bool, now: int) -> None:
        """Take it out of the queue."""
        key = entry.block.key
        (self._ahead if key in self._ahead else self._behind).pop(key)


class S3FifoParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of `S3Fifo`.

    Attributes:
        small: part of the tier for blocks on probation.
        ghost: bytes of forgotten blocks that are remembered, as a part of the tier.
        promote: uses on probation that lead to the main queue.
    """

    small: float = 0.1
    ghost: float = 0.9
    promote: int = 2


class S3Fifo(Base):
    """S3-FIFO (Yang et al., SOSP '23): a small queue on probation, a main queue, and ghosts.

    What leaves the small queue with `promote` uses goes to the main one, otherwise it is evicted
    and remembered; what is remembered comes back to the main queue. That evicts what was not used
    since it came up last; uses count to 3. A block that others stand on counts as used.
    """

    Params = S3FifoParams
    paths = True
    _MOST = 3

    def __init__(self, setting: Setting, params: S3FifoParams) -> None:
        super().__init__(setting, params)
        if not (0 <= params.small <= 1 and params.ghost >= 0 and params.promote >= 1):
            raise ValueError(f"{params}: small is in 0 to 1, ghost at least 0, promote at least 1")
        self._promote = params.promote
        self._small_cap = int(setting.cap_bytes * params.small)
        self._main_cap = setting.cap_bytes - self._small_cap
        self._ghosts = Ghosts(int(setting.cap_bytes * params.ghost))
        self._small: Queue = OrderedDict()
        self._main: Queue = OrderedDict()
        self._small_bytes = self._main_bytes = 0
        self._back: set[bytes] = set()
        self._evicted = False

    def admits(self, blocks: Sequence[Block], now: int) -> list[bool]:
        """Return True for each, and remember which were ghosts."""
        self._back = {block.key for block in blocks if self._ghosts.pop(block.key)}
        return [True] * len(blocks)

    def victim(self, newcomer: Block, now: int) -> Entry | None:
        """Let blocks of the queue that is over its part come up until one may go."""
        if self._main_bytes <= self._main_cap:
            entry = self._of_small()
            if entry is not None:
                return entry
        return self._of_main() or self._of_small()

    def _of_small(self) -> Entry | None:
        """Move used ones to the main queue, up to the first that was not."""
        while self._small:
            entry = oldest(self._small)
            if entry.free and entry.mark < self._promote:
                return entry
            self._leave_small(entry)
            entry.mark = 0
            self._enter_main(entry)
        return None

    def _of_main(self) -> Entry | None:
        """Give used ones another round, up to the first that was not."""
        for _ in range((self._MOST + 1) * len(self._main)):
            entry = oldest(self._main)
            if entry.free and entry.mark == 0:
                return entry
            entry.mark = max(entry.mark - 1, 0)
            self._main.move_to_end(entry.block.key)
        return None

    def insert(self, entry: Entry, now: int) -> None:
        """Put it on probation, or among the main ones if it was a ghost."""
        entry.mark = 0
        key = entry.block.key
        full = not self._evicted and self._small_bytes >= self._small_cap
        if key in self._back or full:
            self._back.discard(key)
            self._enter_main(entry)
        else:
            self._small[key] = entry
            self._small_bytes += entry.block.size

    def hit(self, entry: Entry, now: int) -> None:
        """Count the use."""
        entry.mark = min(entry.mark + 1, self._MOST)

    def remove(self, entry: Entry, evicted: bool, now: int) -> None:
        """Take it out of its queue; what goes on probation is remembered."""
        self._evicted |= evicted
        if entry.block.key in self._main:
            del self._main[entry.block.key]
            self._main_bytes -= entry.block.size
            return
        self._leave_small(entry)
        if evicted:
            self._ghosts.add(entry.block.key, entry.block.size)

    def _leave_small(self, entry: Entry) -> None:
        del self._small[entry.block.key]
        self._small_bytes -= entry.block.size

    def _enter_main(self, entry: Entry) -> None:
        self._main[entry.block.key] = entry
        self._main_bytes += entry.block.size
