"""Entries of one worker: growing arrays under names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pigou.control.prefix_index import entry_kernels as kernels
from pigou.control.prefix_index.entry_kernels import Links
from pigou.control.prefix_index.slots import HELD, Counts, Words, roomy, slots_for

_LEAST = 64
_NOTHING: Words = np.zeros((0, 2), dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Change:
    """Keys and tiers (bits) that a worker holds once more, and once less, shape (n, 2) each."""

    gained: Words
    lost: Words


class Entries:
    """Arrays of `pigou.control.prefix_index.entry_kernels`, which grow up to a limit."""

    slots: Words

    def __init__(self, limit: int, usual: int = 0) -> None:
        """Start empty, with room for `limit` entries at most, at least 1.

        `usual` are expected: the first that come make room for as many.
        """
        self.limit = limit
        self.usual = usual
        self.counts: Counts = np.zeros(4, dtype=np.int64)
        self._before = 0
        self._empty()

    def __len__(self) -> int:
        return self.counts.item(kernels.USED)

    @property
    def evicted(self) -> int:
        """Entries that were given up to stay within limits."""
        return self.counts.item(kernels.EVICTED)

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        arrays = self.links, self.names, self.values, self.slots
        return sum(each.nbytes for each in arrays)

    @property
    def keys(self) -> Words:
        """Our keys, 0 where unknown, (entries + 1,)."""
        return self.values

    def grown(self) -> int:
        """Return by how many entries it grew since the last call."""
        before, self._before = self._before, len(self)
        return self._before - before

    def reserve(self, more: int) -> None:
        """Make room for so many new entries, as far as the limit goes."""
        wanted, size = min(len(self) + more, self.limit), len(self.names) - 1
        # All of them are touched: no more than are of use.
        self.slots = roomy(self.slots, wanted, HELD)
        if wanted <= size:
            return
        wanted = max(wanted, min(self.usual, self.limit))
        while size < wanted:
            size = min(2 * size, self.limit)
        links, names, values = self.links, self.names, self.values
        self._arrays(size)
        self.links[: len(links)] = links
        self.names[: len(names)] = names
        self.values[: len(values)] = values

    def clear(self) -> Change:
        """Forget all entries; what was counted as evicted stays."""
        lost = pairs(len(self))
        less = kernels.list_all(self.links, self.keys, self.counts, lost)
        self.counts[: kernels.EVICTED] = 0
        self._empty()
        return Change(pairs(0), lost[:less])

    def _empty(self) -> None:
        entries = min(_LEAST, self.limit)
        self._arrays(entries)
        self.slots = slots_for(entries, HELD)

    def _arrays(self, entries: int) -> None:
        self.links: Links = np.zeros((entries + 1) * int(kernels.WIDTH), dtype=np.uint32)
        self.names: Words = np.zeros(entries + 1, dtype=np.uint64)
        self.values: Words = np.zeros(entries + 1, dtype=np.uint64)


def pairs(count: int) -> Words:
    """Return an uninitialised array for `count` keys and their tiers."""
    return np.empty((count, 2), dtype=np.uint64) if count else _NOTHING
