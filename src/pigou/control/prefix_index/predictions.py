"""Predictions: what a worker without KV events is expected to hold, by what was sent to it."""

from __future__ import annotations

import numpy as np

from pigou.control.prefix_index import entry_kernels
from pigou.control.prefix_index import prediction_kernels as kernels
from pigou.control.prefix_index.entries import Change, Entries, pairs
from pigou.control.prefix_index.slots import Words
from pigou.control.prefix_index.table_kernels import DEVICE
from pigou.request import BlockKeys

#: Predictions that one call of `expire` gives up, so that a call stays short.
_AT_ONCE = 16384
_FOREVER = 2**64 - 1


class Predictions(Entries):
    """Keys that a worker is expected to hold in device memory, each until a time.

    At most `limit`; beyond it the one that was predicted longest ago goes, a chain's tail
    before its root, and is counted as evicted.
    """

    @property
    def keys(self) -> Words:
        """Our keys, (entries + 1,)."""
        return self.names

    def predict(self, keys: BlockKeys, until: int) -> Change:
        """Expect a chain to be held until a time, in nanoseconds, that never falls."""
        self.reserve(len(keys))
        gained, lost = pairs(len(keys)), pairs(len(keys))
        more, less = kernels.predict(
            self.links, self.names, self.values, self.slots, self.counts, self.limit,
            1 << DEVICE, keys, np.uint64(until), gained, lost,
        )  # fmt: skip
        return Change(gained[:more], lost[:less])

    def expire(self, now: int) -> Change:
        """Give up what was expected until `now` (nanoseconds) or before, 16,384 at a time."""
        return self._give_up(now, _AT_ONCE)

    def evict(self, count: int) -> Change:
        """Give up `count` of them, or all, those that were predicted longest ago first."""
        change = self._give_up(_FOREVER, count)
        self.counts[entry_kernels.EVICTED] += len(change.lost)
        return change

    def _give_up(self, now: int, most: int) -> Change:
        lost = pairs(min(len(self), most))
        less = kernels.expire(
            self.links, self.names, self.values, self.slots, self.counts, np.uint64(now), lost
        )
        return Change(pairs(0), lost[:less])
