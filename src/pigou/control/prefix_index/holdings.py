"""Holdings: the blocks of one worker by its engine's own hashes, as its events tell."""

from __future__ import annotations

import numpy as np

from pigou.control.prefix_index import entry_kernels, holding_kernels
from pigou.control.prefix_index import event_kernels as kernels
from pigou.control.prefix_index.entries import Change, Entries, pairs
from pigou.control.prefix_index.ghosts import Ghosts
from pigou.control.prefix_index.slots import Words
from pigou.control.prefix_index.table import Table
from pigou.control.prefix_index.wire import tier_of

_NO_NAME = np.uint64(0)


class Holdings(Entries):
    """Blocks of one worker: engine's hash, our key, tiers.

    At most `limit`; beyond it the leaf that was stored longest ago goes, and what does not fit
    even so (a chain longer than the limit) is left out. Both are counted as evicted.
    """

    @property
    def known(self) -> int:
        """Blocks whose key is known: only those are ever matched."""
        return int(self.counts[entry_kernels.KNOWN])

    def key(self, name: int) -> int | None:
        """Return the key of a block that is held; None where it is not, or is not known."""
        entry = holding_kernels.look_up(self.names, self.slots, np.uint64(name))
        return int(self.values[entry]) or None if entry else None

    def absent(self, hashes: Words) -> int:
        """Return how many of these blocks are not there."""
        return holding_kernels.absent(self.names, self.slots, hashes)

    def store(
        self,
        table: Table,
        ghosts: Ghosts,
        worker: int,
        hashes: Words,
        keys: Words,
        parent: int | None,
        medium: str | None,
    ) -> int:
        """Take in consecutive blocks, here and in the table; return how many entries are new.

        Args:
            table: of all workers.
            ghosts: of all workers.
            worker: this one's number there.
            hashes: of the engine, in the last column, shape (blocks, any).
            keys: in the last column, 0 where unknown, shape (blocks, any).
            parent: the engine's hash of the block before; None at the beginning.
            medium: where they are.
        """
        follows = parent is not None
        name = _NO_NAME if parent is None else np.uint64(parent)
        media, sure = 1 << tier_of(medium), False
        while True:
            grown = kernels.store(
                self.links, self.names, self.values, self.slots, self.counts,
                table.rows, table.slots, table.twins, table.totals, ghosts.graves, ghosts.tally,
                worker, self.limit, follows, name, media, hashes, keys, sure,
            )  # fmt: skip
            if grown != kernels.NO_ROOM:
                self._before += grown
                return grown
            self.reserve(self.absent(hashes))
            table.reserve(len(hashes), media)
            sure = True

    def remove(
        self, table: Table, ghosts: Ghosts, worker: int, hashes: Words, medium: str | None
    ) -> int:
        """Forget blocks in one tier, here and in the table.

        Blocks that are not there are no error.

        Returns:
            How many entries are new: 0 or less.
        """
        grown = kernels.remove(
            self.links, self.names, self.values, self.slots, self.counts,
            table.rows, table.slots, table.twins, table.totals, ghosts.graves,
            worker, 1 << tier_of(medium), hashes,
        )  # fmt: skip
        self._before += grown
        return grown

    def evict(self, count: int) -> Change:
        """Forget `count` blocks, or all, the leaves that were stored longest ago first."""
        count = min(count, len(self))
        lost = pairs(count)
        less = holding_kernels.evict(
            self.links, self.names, self.values, self.slots, self.counts, count, lost
        )  # fmt: skip
        return Change(pairs(0), lost[:less])
