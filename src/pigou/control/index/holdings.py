"""Holdings: the blocks of one worker by its engine's own hashes, as its events tell."""

from __future__ import annotations

import numpy as np

from pigou.control.index import entry_kernels as kernels
from pigou.control.index.entries import Change, Entries, pairs
from pigou.control.index.entry_kernels import Words


class Holdings(Entries):
    """Blocks of one worker: engine's hash, our key, tiers.

    At most `limit`; beyond it the leaf that was stored longest ago goes, and what does not fit
    even so (a chain longer than the limit) is left out. Both are counted as evicted.
    """

    @property
    def known(self) -> int:
        """Blocks whose key is known: only those are ever matched."""
        return int(self.counts[kernels.KNOWN])

    def key(self, name: int) -> int | None:
        """Return the key of a block that is held; None where it is not, or is not known."""
        entry = self._entry(name)
        return int(self.names[entry, kernels.VALUE]) or None if entry else None

    def absent(self, hashes: Words) -> int:
        """Return how many of these blocks are not there."""
        return kernels.absent(self.names, self.slots, hashes)

    def store(self, hashes: Words, keys: Words, parent: int | None, tier: int) -> Change:
        """Take in consecutive blocks.

        Args:
            hashes: of the engine, shape (blocks,).
            keys: shape (blocks,); 0 where unknown.
            parent: the engine's hash of the block before; None at the beginning.
            tier: where they are.
        """
        count = len(hashes)
        self.reserve(self.absent(hashes))
        gained, lost = pairs(count), pairs(count)
        more, less = kernels.store(
            self.links, self.names, self.slots, self.counts, self.limit,
            0 if parent is None else self._entry(parent), 1 << tier, hashes, keys, gained, lost,
        )  # fmt: skip
        return Change(gained[:more], lost[:less])

    def remove(self, hashes: Words, tier: int) -> Change:
        """Forget blocks in one tier; those that are not there are no error."""
        lost = pairs(len(hashes))
        less = kernels.remove(
            self.links, self.names, self.slots, self.counts, 1 << tier, hashes, lost
        )
        return Change(pairs(0), lost[:less])

    def evict(self, count: int) -> Change:
        """Forget `count` blocks, or all, the leaves that were stored longest ago first."""
        count = min(count, len(self))
        lost = pairs(count)
        less = kernels.evict_many(
            self.links, self.names, self.slots, self.counts, count, lost
        )  # fmt: skip
        return Change(pairs(0), lost[:less])

    def _entry(self, name: int) -> int:
        return kernels.look_up(self.names, self.slots, np.uint64(name))
