"""What attention tells of the probabilities that it finds."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from pigou.request import Ints
from pigou.runtime.batch import Batch
from pigou.runtime.eviction import kernels
from pigou.runtime.eviction.policy import Floats, Folding
from pigou.runtime.eviction.stats import CPUStats, Stats


class Watch:
    """Adds each query's probabilities to the mass of the entries that it attended to.

    They are summed over the query heads of a KV head, and count only for entries from a row's own
    first one on: those before may be shared.

    Attributes:
        stats: side data.
        owns: each row's own first entry, shape (max_seqs,).
        prompts: each row's prompt length, shape (max_seqs,).
        folding: of the mass, or None.
        clock: steps done so far.
    """

    def __init__(self, stats: Stats, folding: Folding | None, max_seqs: int, group: int) -> None:
        """Watch nothing yet.

        Args:
            stats: side data; its first field is the mass.
            folding: of the mass, or None.
            max_seqs: rows of the batch.
            group: query heads of a KV head.
        """
        self.stats = stats
        self.folding = folding
        self.owns: Ints = np.zeros(max_seqs, dtype=np.int32)
        self.prompts: Ints = np.zeros(max_seqs, dtype=np.int32)
        self.clock = 0
        self._decays = np.array(folding.decays if folding else (), dtype=np.float32)
        even = folding.notable * folding.interval * group if folding else 0.0
        #: Mass of an interval, times the entries, from which on it is notable.
        self._notable = float(even)

    def since(self, row: int, position: int) -> int:
        """Return the queries of a row before `position` that were not folded yet."""
        if self.folding is None:
            return position
        since = (position - int(self.prompts[row])) % self.folding.interval
        return min(position, since or self.folding.interval)

    def begin(self, batch: Batch, tables: Ints) -> None:
        """Fold the rows of single tokens that are due, before the step's first layer."""
        self.clock += 1
        if self.folding is None or not batch.singles:
            return
        positions, slots, rows = batch.places[:, : batch.singles]
        due = (positions - self.prompts[rows]) % self.folding.interval == 0
        due &= slots > 0
        if due.any():
            rows, slots = rows[due], slots[due]
            notable = (self._notable / slots).astype(np.float32)
            where = (rows, tables, self.owns, slots)
            self.stats.fold(*where, self.folding, notable, self.clock)

    def cuts(self, batch: Batch) -> Ints:
        """Return the tokens of the step's chunks before which their row is folded, ascending."""
        if self.folding is None:
            return np.empty(0, dtype=np.int32)
        positions, _, rows = batch.places[:, batch.singles :]
        due = (positions - self.prompts[rows]) % self.folding.interval == 0
        cuts: Ints = np.flatnonzero(due).astype(np.int32) + np.int32(batch.singles)
        return cuts

    # --- compiled kernels -------------------------------------------------------------------

    def target(self, layer: int) -> tuple[Floats, int]:
        """Return where `kernels.decode` adds to."""
        assert isinstance(self.stats, CPUStats)
        return self.stats.array, layer

    def absorb(
        self, layer: int, sums: Floats, tiles: Ints, folds: np.ndarray, tables: Ints
    ) -> None:
        """Take in what `kernels.prefill` found."""
        assert isinstance(self.stats, CPUStats)
        where = (layer, self.stats.array, tables, self.owns)
        how = (self._decays, self._notable, float(self.clock))
        kernels.absorb(sums, tiles, folds, *where, *how)

    # --- torch ------------------------------------------------------------------------------

    def add(self, layer: int, row: int, table: Ints, entries: int, sums: Tensor) -> None:
        """Add to the mass of a row; `sums` is (kv_heads, slots)."""
        self.stats.add(layer, table, int(self.owns[row]), entries, sums)

    def fold(self, layer: int, row: int, table: Ints, entries: int) -> None:
        """Fold one layer of a row that has so many entries."""
        assert self.folding is not None
        if entries:
            where = (layer, table, int(self.owns[row]), entries)
            self.stats.fold_layer(*where, self.folding, self._notable / entries, self.clock)
