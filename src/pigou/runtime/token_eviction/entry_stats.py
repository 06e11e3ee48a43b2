"""Side data of cache entries: their positions, and a policy's numbers. It moves with the blocks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pigou.kv.block import KVLayout
from pigou.request import Ints
from pigou.runtime.batch import POSITION, ROW, SLOT, StepBatch
from pigou.runtime.kv_cache import KEYS, VALUES, move_blocks
from pigou.runtime.tensor_io import stored
from pigou.runtime.token_eviction import entry_stats_kernels
from pigou.runtime.token_eviction.entry_stats_kernels import (
    AFTER_MASS_LINE,
    FIRST_FIELD_LINE,
    MASS_LINE,
    POSITION_LINE,
    MassTarget,
)
from pigou.runtime.token_eviction.policy import Floats, Folding


class EntryStats:
    """Side data by block, layer, KV head and offset, on any device.

    Attributes:
        numbers: shape (blocks, layers, kv_heads, 1 + fields, size), float32; the first of a head's
            lines holds positions, as bits of int32.
        ids: the same memory as int32.
        host: that of blocks of host memory, the same shape but for the blocks.
    """

    def __init__(
        self, layout: KVLayout, fields: int, blocks: int, device: torch.device, host_blocks: int = 0
    ) -> None:
        """Make side data of nothing.

        Args:
            fields: float32 numbers kept for each entry.
            host_blocks: blocks of host memory.
        """
        shape = (layout.layers, layout.kv_heads, 1 + fields, layout.block_size)
        self.numbers: Tensor = torch.zeros((blocks, *shape), device=device)
        self.ids: Tensor = self.numbers.view(torch.int32)
        self.host: Tensor = torch.zeros((host_blocks, *shape))

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.numbers.nbytes

    @property
    def block_bytes(self) -> int:
        """Bytes that come to those of each block."""
        return self.nbytes // max(1, len(self.numbers))

    @property
    def size(self) -> int:
        """Tokens in a block."""
        return self.numbers.shape[4]

    def move(self, swap_out: Ints, copies: Ints, swap_in: Ints) -> None:
        """Move as `KVCache.move` does."""
        move_blocks(self.numbers, self.host, swap_out, copies, swap_in)

    def enter(self, locations: Ints, tables: Ints, blank: Floats) -> None:
        """Give the entries of a step's tokens positions and blank fields.

        Args:
            locations: of the tokens, as in `StepBatch`, shape (3, tokens).
            tables: block ids by row of the batch.
            blank: first value of each field, shape (fields,).
        """
        blocks, offsets = self._addresses(locations, tables)
        self.numbers[blocks, :, :, FIRST_FIELD_LINE:, offsets] = self._upload(blank)
        positions = self._upload(locations[POSITION].copy())
        self.ids[blocks, :, :, POSITION_LINE, offsets] = positions[:, None, None]

    def put(self, locations: Ints, tables: Ints, line: int, values: Tensor) -> None:
        """Put values, shape (tokens, n), in lines from `line` on, of all heads alike."""
        blocks, offsets = self._addresses(locations, tables)
        lines = slice(line, line + values.shape[1])
        self.numbers[blocks, :, :, lines, offsets] = values[:, None, None].float()

    def put_heads(self, table: Ints, slots: Ints, line: int, values: Tensor) -> None:
        """Put values, shape (layers, kv_heads, n, k), in lines from `line` on of slots (n,)."""
        blocks, offsets = self._block_offsets(slots, table[slots // self.size])
        lines = slice(line, line + values.shape[3])
        device = self.numbers.device
        self.numbers[blocks, :, :, lines, offsets] = values.permute(2, 0, 1, 3).float().to(device)

    def collect(self, table: Ints, entries: int) -> Floats:
        """Copy a sequence's side data, shape (layers, kv_heads, 1 + fields, entries)."""
        blocks = self._upload(table[: -(-entries // self.size)].astype(np.int64))
        data = self.numbers[blocks].permute(1, 2, 3, 0, 4).flatten(3)[..., :entries]
        return np.ascontiguousarray(data.cpu().numpy())

    def fold(
        self, rows: Ints, tables: Ints, owns: Ints, entries: Ints, folding: Folding,
        notable: Floats, clock: int,
    ) -> None:  # fmt: skip
        """Fold all heads of some rows of the batch (`entry_stats_kernels.fold`)."""
        for row, count, mass in zip(rows, entries.tolist(), notable.tolist(), strict=True):
            for layer in range(self.numbers.shape[1]):
                where = (layer, tables[row], int(owns[row]), count)
                self.fold_layer(*where, folding, mass, clock)

    def fold_layer(
        self, layer: int, table: Ints, own: int, entries: int, folding: Folding,
        notable: float, clock: int,
    ) -> None:  # fmt: skip
        """Fold one layer's heads of a row (`entry_stats_kernels.fold_lines`)."""
        blocks, seen = self._span(table, own, entries)
        lines = self.numbers[blocks, layer]
        mass = lines[:, :, MASS_LINE].clone()
        for k, decay in enumerate(folding.decays):
            field = lines[:, :, AFTER_MASS_LINE + k]
            field.copy_(torch.where(seen, field * decay + mass, field))
        if folding.notable > 0:
            field = lines[:, :, AFTER_MASS_LINE]
            field.masked_fill_(seen & (mass >= notable), float(clock))
        lines[:, :, MASS_LINE].masked_fill_(seen, 0.0)
        self.numbers[blocks, layer] = lines

    def add(self, layer: int, table: Ints, own: int, entries: int, sums: Tensor) -> None:
        """Add to the mass of a row's entries from `own` on; `sums` is (kv_heads, slots)."""
        blocks, seen = self._span(table, own, entries)
        span = len(blocks) * self.size
        sums = sums[:, :span].float()
        sums = torch.nn.functional.pad(sums, (0, span - sums.shape[1]))
        added = sums.view(len(sums), len(blocks), self.size).transpose(0, 1)
        self.numbers[blocks, layer, :, MASS_LINE] += torch.where(seen, added, 0.0)

    def add_all(self, layer: int, blocks: Tensor, sums: Tensor) -> None:
        """Add to the mass of several rows' entries.

        Args:
            blocks: ids of as many blocks of each row, shape (rows * n,), int64.
            sums: what is added, shape (rows, kv_heads, n * size).
        """
        rows, heads, _ = sums.shape
        parts = sums.view(rows, heads, -1, self.size).transpose(1, 2).flatten(0, 1)
        self.numbers[:, layer, :, MASS_LINE].index_add_(0, blocks, parts)

    def fill(self, data: Tensor, table: Ints, moves: Ints, counts: Ints) -> None:
        """Move entries of a row into holes (`entry_stats_kernels.fill`); `data` is the cache's."""
        _, layers, heads, _, size = self.numbers.shape
        some = np.arange(moves.shape[1]) < counts[:, None]
        task = np.nonzero(some)[0]
        sources, targets = moves[some].T
        layer, head = self._upload(task // heads), self._upload(task % heads)
        source = self._block_offsets(sources, table[sources // size])
        target = self._block_offsets(targets, table[targets // size])
        keys = data[:, :, KEYS].view(len(data), layers, heads, -1, size)
        values = data[:, :, VALUES].view(len(data), layers, heads, size, -1)
        keys[target[0], layer, head, :, target[1]] = keys[source[0], layer, head, :, source[1]]
        values[target[0], layer, head, target[1]] = values[source[0], layer, head, source[1]]
        lines = self.numbers
        lines[target[0], layer, head, :, target[1]] = lines[source[0], layer, head, :, source[1]]

    def _span(self, table: Ints, own: int, entries: int) -> tuple[Tensor, Tensor]:
        """Return a row's blocks, and which slots are its own, shape (blocks, 1, size)."""
        blocks = -(-entries // self.size)
        slots = np.arange(blocks * self.size).reshape(blocks, 1, self.size)
        seen = (slots >= own) & (slots < entries)
        return self._upload(table[:blocks].astype(np.int64)), self._upload(seen)

    def _addresses(self, locations: Ints, tables: Ints) -> tuple[Tensor, Tensor]:
        """Return blocks and offsets of a step's tokens, each of shape (tokens,)."""
        slots = locations[SLOT]
        return self._block_offsets(slots, tables[locations[ROW], slots // self.size])

    def _block_offsets(self, slots: Ints, blocks: Ints) -> tuple[Tensor, Tensor]:
        offsets = (slots % self.size).astype(np.int64)
        return self._upload(blocks.astype(np.int64)), self._upload(offsets)

    def _upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.numbers.device)


class CPUEntryStats(EntryStats):
    """Side data on a CPU, by compiled kernels."""

    def __init__(
        self, layout: KVLayout, fields: int, blocks: int, device: torch.device, host_blocks: int = 0
    ) -> None:
        """Make side data of nothing; the arguments are those of `EntryStats`."""
        super().__init__(layout, fields, blocks, device, host_blocks)
        self.array: Floats = self.numbers.numpy()
        self._ids: Ints = self.array.view(np.int32)

    def enter(self, locations: Ints, tables: Ints, blank: Floats) -> None:
        """Give the entries of a step's tokens positions and blank fields."""
        entry_stats_kernels.enter(locations, tables, self._ids, self.array, blank)

    def put(self, locations: Ints, tables: Ints, line: int, values: Tensor) -> None:
        """Put values in lines from `line` on, of all heads alike."""
        entry_stats_kernels.put(
            locations, tables, self.array, line, values.float().contiguous().numpy()
        )

    def collect(self, table: Ints, entries: int) -> Floats:
        """Copy a sequence's side data."""
        out = np.empty((*self.array.shape[1:4], entries), dtype=np.float32)
        entry_stats_kernels.collect(table, entries, self.array, out)
        return out

    def fold(
        self, rows: Ints, tables: Ints, owns: Ints, entries: Ints, folding: Folding,
        notable: Floats, clock: int,
    ) -> None:  # fmt: skip
        """Fold all heads of some rows of the batch."""
        decays = np.array(folding.decays, dtype=np.float32)
        entry_stats_kernels.fold(
            rows, self.array, tables, owns, entries, decays, notable, float(clock)
        )

    def fill(self, data: Tensor, table: Ints, moves: Ints, counts: Ints) -> None:
        """Move entries of a row into holes."""
        entry_stats_kernels.fill(stored(data), self.array, table, moves, counts)


class AttentionMassTracker:
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

    def __init__(
        self, stats: EntryStats, folding: Folding | None, max_seqs: int, group: int
    ) -> None:
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

    def begin(self, batch: StepBatch, tables: Ints) -> None:
        """Fold the rows of single tokens that are due, before the step's first layer."""
        self.clock += 1
        if self.folding is None or not batch.singles:
            return
        positions, slots, rows = batch.locations[:, : batch.singles]
        due = (positions - self.prompts[rows]) % self.folding.interval == 0
        due &= slots > 0
        if due.any():
            rows, slots = rows[due], slots[due]
            notable = (self._notable / slots).astype(np.float32)
            where = (rows, tables, self.owns, slots)
            self.stats.fold(*where, self.folding, notable, self.clock)

    def cuts(self, batch: StepBatch) -> Ints:
        """Return the tokens of the step's chunks before which their row is folded, ascending."""
        if self.folding is None:
            return np.empty(0, dtype=np.int32)
        positions, _, rows = batch.locations[:, batch.singles :]
        due = (positions - self.prompts[rows]) % self.folding.interval == 0
        cuts: Ints = np.flatnonzero(due).astype(np.int32) + np.int32(batch.singles)
        return cuts

    # --- compiled kernels -------------------------------------------------------------------

    def target(self, layer: int) -> MassTarget:
        """Return where `attention_kernels.decode` adds to."""
        assert isinstance(self.stats, CPUEntryStats)
        return self.stats.array, layer, self.owns

    def absorb(
        self, layer: int, sums: Floats, tiles: Ints, folds: np.ndarray, tables: Ints
    ) -> None:
        """Take in the probabilities that `attention_kernels.prefill` summed up."""
        assert isinstance(self.stats, CPUEntryStats)
        where = (layer, self.stats.array, tables, self.owns)
        how = (self._decays, self._notable, float(self.clock))
        entry_stats_kernels.absorb(sums, tiles, folds, *where, *how)

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
