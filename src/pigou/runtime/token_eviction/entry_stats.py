"""Side data of cache entries: positions and a policy's fields, stored and moved with the blocks."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pigou.compiled import kernel
from pigou.kv.block import KVLayout
from pigou.request import Ints
from pigou.runtime.attention.batch import POSITION, ROW, SLOT, StepBatch
from pigou.runtime.attention.kv_cache import SOURCE, TARGET, KVCache, move_blocks
from pigou.runtime.simd import LANES, accumulate
from pigou.runtime.tensor_io import stored
from pigou.runtime.token_eviction.policy import (
    AFTER_MASS_LINE,
    FIRST_FIELD_LINE,
    MASS_LINE,
    POSITION_LINE,
    Floats,
    Folding,
)

_FLOAT_BYTES = 4
#: Accumulator of attention mass: `numbers`, layer, and first unshared entry by row, shape (rows,).
MassTarget: TypeAlias = tuple[Floats, int, Ints]


class EntryStats:
    """Side data by block, layer, KV head and offset, on any device.

    `numbers` is (blocks, layers, kv_heads, 1 + fields, size), float32; line 0 holds positions
    (int32 bits).
    """

    def __init__(
        self, layout: KVLayout, fields: int, blocks: int, device: torch.device, host_blocks: int = 0
    ) -> None:
        shape = (layout.layers, layout.kv_heads, 1 + fields, layout.block_size)
        self.numbers: Tensor = torch.zeros((blocks, *shape), device=device)
        self.ids: Tensor = self.numbers.view(torch.int32)
        self.host: Tensor = torch.zeros((host_blocks, *shape))

    @property
    def nbytes(self) -> int:
        """Device bytes."""
        return self.numbers.nbytes

    @property
    def block_bytes(self) -> int:
        """Side data bytes per block."""
        return self.nbytes // max(1, len(self.numbers))

    @property
    def size(self) -> int:
        """Tokens per block."""
        return self.numbers.shape[4]

    def move(self, swap_out: Ints, copies: Ints, swap_in: Ints) -> None:
        """Move blocks like `KVCache.move`."""
        move_blocks(self.numbers, self.host, swap_out, copies, swap_in)

    def enter(self, locations: Ints, tables: Ints, blank: Floats) -> None:
        """Set positions and blank fields (fields,) of new tokens; `locations` as in `StepBatch`."""
        blocks, offsets = self._addresses(locations, tables)
        self.numbers[blocks, :, :, FIRST_FIELD_LINE:, offsets] = self._upload(blank)
        positions = self._upload(locations[POSITION].copy())
        self.ids[blocks, :, :, POSITION_LINE, offsets] = positions[:, None, None]

    def put(self, locations: Ints, tables: Ints, line: int, values: Tensor) -> None:
        """Write values (tokens, n) to lines from `line` on, the same for all heads."""
        blocks, offsets = self._addresses(locations, tables)
        lines = slice(line, line + values.shape[1])
        self.numbers[blocks, :, :, lines, offsets] = values[:, None, None].float()

    def put_heads(self, table: Ints, slots: Ints, line: int, values: Tensor) -> None:
        """Write values (layers, kv_heads, n, k) to lines from `line` on of slots (n,)."""
        blocks, offsets = self._block_offsets(slots, table[slots // self.size])
        lines = slice(line, line + values.shape[3])
        device = self.numbers.device
        self.numbers[blocks, :, :, lines, offsets] = values.permute(2, 0, 1, 3).float().to(device)

    def collect(self, table: Ints, entries: int) -> Floats:
        """Gather a sequence's side data, shape (layers, kv_heads, 1 + fields, entries)."""
        blocks = self._upload(table[: -(-entries // self.size)].astype(np.int64))
        data = self.numbers[blocks].permute(1, 2, 3, 0, 4).flatten(3)[..., :entries]
        return np.ascontiguousarray(data.cpu().numpy())

    def fold(
        self, rows: Ints, tables: Ints, owns: Ints, entries: Ints, folding: Folding,
        notable: Floats, clock: int,
    ) -> None:  # fmt: skip
        """Fold all heads of batch rows (see `fold`)."""
        for row, count, mass in zip(rows, entries.tolist(), notable.tolist(), strict=True):
            for layer in range(self.numbers.shape[1]):
                where = (layer, tables[row], int(owns[row]), count)
                self.fold_layer(*where, folding, mass, clock)

    def fold_layer(
        self, layer: int, table: Ints, own: int, entries: int, folding: Folding,
        notable: float, clock: int,
    ) -> None:  # fmt: skip
        """Fold one layer's heads of a row (see `fold_lines`)."""
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
        """Add `sums` (kv_heads, slots) to the mass of a row's entries from `own` on."""
        blocks, seen = self._span(table, own, entries)
        span = len(blocks) * self.size
        sums = sums[:, :span].float()
        sums = torch.nn.functional.pad(sums, (0, span - sums.shape[1]))
        added = sums.view(len(sums), len(blocks), self.size).transpose(0, 1)
        self.numbers[blocks, layer, :, MASS_LINE] += torch.where(seen, added, 0.0)

    def add_all(self, layer: int, blocks: Tensor, sums: Tensor) -> None:
        """Add sums (rows, kv_heads, n * size) to the mass of n blocks per row."""
        rows, heads, _ = sums.shape
        parts = sums.view(rows, heads, -1, self.size).transpose(1, 2).flatten(0, 1)
        self.numbers[:, layer, :, MASS_LINE].index_add_(0, blocks, parts)

    def fill(self, cache: KVCache, table: Ints, moves: Ints, counts: Ints) -> None:
        """Compact a row of the cache (see `fill`)."""
        _, _, heads, _, size = self.numbers.shape
        some = np.arange(moves.shape[1]) < counts[:, None]
        task = np.nonzero(some)[0]
        sources, targets = moves[some].T
        layer, head = self._upload(task // heads), self._upload(task % heads)
        source = self._block_offsets(sources, table[sources // size])
        target = self._block_offsets(targets, table[targets // size])
        keys, values = cache.split(cache.data)
        scales = cache.scales(cache.data).view(torch.int16)
        if len(scales):
            scales[target[0], layer, :, head, target[1]] = scales[
                source[0], layer, :, head, source[1]
            ]
        keys[target[0], layer, head, :, target[1]] = keys[source[0], layer, head, :, source[1]]
        values[target[0], layer, head, target[1]] = values[source[0], layer, head, source[1]]
        lines = self.numbers
        lines[target[0], layer, head, :, target[1]] = lines[source[0], layer, head, :, source[1]]

    def _span(self, table: Ints, own: int, entries: int) -> tuple[Tensor, Tensor]:
        blocks = -(-entries // self.size)
        slots = np.arange(blocks * self.size).reshape(blocks, 1, self.size)
        seen = (slots >= own) & (slots < entries)
        return self._upload(table[:blocks].astype(np.int64)), self._upload(seen)

    def _addresses(self, locations: Ints, tables: Ints) -> tuple[Tensor, Tensor]:
        slots = locations[SLOT]
        return self._block_offsets(slots, tables[locations[ROW], slots // self.size])

    def _block_offsets(self, slots: Ints, blocks: Ints) -> tuple[Tensor, Tensor]:
        offsets = (slots % self.size).astype(np.int64)
        return self._upload(blocks.astype(np.int64)), self._upload(offsets)

    def _upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.numbers.device)


class CPUEntryStats(EntryStats):
    """Side data on the CPU, using compiled kernels."""

    def __init__(
        self, layout: KVLayout, fields: int, blocks: int, device: torch.device, host_blocks: int = 0
    ) -> None:
        super().__init__(layout, fields, blocks, device, host_blocks)
        self.array: Floats = self.numbers.numpy()
        self._ids: Ints = self.array.view(np.int32)

    def enter(self, locations: Ints, tables: Ints, blank: Floats) -> None:
        """Set positions and blank fields of new tokens."""
        enter(locations, tables, self._ids, self.array, blank)

    def put(self, locations: Ints, tables: Ints, line: int, values: Tensor) -> None:
        """Write values to lines from `line` on, the same for all heads."""
        put(locations, tables, self.array, line, values.float().contiguous().numpy())

    def collect(self, table: Ints, entries: int) -> Floats:
        """Gather a sequence's side data."""
        out = np.empty((*self.array.shape[1:4], entries), dtype=np.float32)
        collect(table, entries, self.array, out)
        return out

    def fold(
        self, rows: Ints, tables: Ints, owns: Ints, entries: Ints, folding: Folding,
        notable: Floats, clock: int,
    ) -> None:  # fmt: skip
        """Fold all heads of batch rows."""
        decays = np.array(folding.decays, dtype=np.float32)
        fold(rows, self.array, tables, owns, entries, decays, notable, float(clock))

    def fill(self, cache: KVCache, table: Ints, moves: Ints, counts: Ints) -> None:
        """Compact a row of the cache."""
        fill(stored(cache.data), cache.layout.head_dim, self.array, table, moves, counts)


class AttentionMassTracker:
    """Sums attention probabilities, per KV head, into a row's own unshared entries."""

    def __init__(
        self, stats: EntryStats, folding: Folding | None, max_seqs: int, group: int
    ) -> None:
        self.stats = stats
        self.folding = folding
        self.owns: Ints = np.zeros(max_seqs, dtype=np.int32)
        self.prompts: Ints = np.zeros(max_seqs, dtype=np.int32)
        self.clock = 0
        self._decays = np.array(folding.decays if folding else (), dtype=np.float32)
        even = folding.notable * folding.interval * group if folding else 0.0
        #: Notable threshold on mass * entries per interval.
        self._notable = float(even)

    def since(self, row: int, position: int) -> int:
        """Return a row's unfolded queries before `position`."""
        if self.folding is None:
            return position
        since = (position - int(self.prompts[row])) % self.folding.interval
        return min(position, since or self.folding.interval)

    def begin(self, batch: StepBatch, tables: Ints) -> None:
        """Fold due single-token rows before the step's first layer."""
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
        """Return the step's chunk tokens that need a fold before them, ascending."""
        if self.folding is None:
            return np.empty(0, dtype=np.int32)
        positions, _, rows = batch.locations[:, batch.singles :]
        due = (positions - self.prompts[rows]) % self.folding.interval == 0
        cuts: Ints = np.flatnonzero(due).astype(np.int32) + np.int32(batch.singles)
        return cuts

    # --- compiled kernels -------------------------------------------------------------------

    def target(self, layer: int) -> MassTarget:
        """Return where `decode` accumulates mass."""
        assert isinstance(self.stats, CPUEntryStats)
        return self.stats.array, layer, self.owns

    def absorb(
        self, layer: int, sums: Floats, tiles: Ints, folds: np.ndarray, tables: Ints
    ) -> None:
        """Accumulate the sums of `prefill`."""
        assert isinstance(self.stats, CPUEntryStats)
        where = (layer, self.stats.array, tables, self.owns)
        how = (self._decays, self._notable, float(self.clock))
        absorb(sums, tiles, folds, *where, *how)

    # --- torch ------------------------------------------------------------------------------

    def add(self, layer: int, row: int, table: Ints, entries: int, sums: Tensor) -> None:
        """Add `sums` (kv_heads, slots) to a row's mass."""
        self.stats.add(layer, table, int(self.owns[row]), entries, sums)

    def fold(self, layer: int, row: int, table: Ints, entries: int) -> None:
        """Fold one layer of a row."""
        assert self.folding is not None
        if entries:
            where = (layer, table, int(self.owns[row]), entries)
            self.stats.fold_layer(*where, self.folding, self._notable / entries, self.clock)


@kernel
def enter(locations: Ints, tables: Ints, ids: Ints, numbers: Floats, blank: Floats) -> None:
    """Set positions and blank fields of a step's tokens; `locations` as in `StepBatch`."""
    _, layers, heads, lines, size = numbers.shape
    for token in range(locations.shape[1]):
        slot = locations[SLOT, token]
        block, offset = tables[locations[ROW, token], slot // size], slot % size
        for layer in range(layers):
            for head in range(heads):
                ids[block, layer, head, POSITION_LINE, offset] = locations[POSITION, token]
                for line in range(FIRST_FIELD_LINE, lines):
                    numbers[block, layer, head, line, offset] = blank[line - FIRST_FIELD_LINE]


@kernel
def put(locations: Ints, tables: Ints, numbers: Floats, line: int, values: Floats) -> None:
    """Write values (tokens, n) to lines from `line` on, for all heads; others as in `enter`."""
    _, layers, heads, _, size = numbers.shape
    for token in range(locations.shape[1]):
        slot = locations[SLOT, token]
        block, offset = tables[locations[ROW, token], slot // size], slot % size
        for layer in range(layers):
            for head in range(heads):
                for n in range(values.shape[1]):
                    numbers[block, layer, head, line + n, offset] = values[token, n]


@kernel
def fold_lines(
    lines: Floats, start: int, stop: int, decays: Floats, notable: float, clock: float
) -> None:
    """Fold a head's mass and clear it: field_k = decays_k field_k + mass."""
    mass = lines[MASS_LINE]
    for k in range(len(decays)):
        field, decay = lines[AFTER_MASS_LINE + k], decays[k]
        for t in range(start, stop):
            field[t] = field[t] * decay + mass[t]
    if notable > 0:
        field = lines[AFTER_MASS_LINE]
        for t in range(start, stop):
            if mass[t] >= notable:
                field[t] = clock
    for t in range(start, stop):
        mass[t] = np.float32(0.0)


@kernel
def fold(
    rows: Ints, numbers: Floats, tables: Ints, owns: Ints, entries: Ints, decays: Floats,
    notable: Floats, clock: float,
) -> None:  # fmt: skip
    """Fold all heads of batch rows, each from its own first entry; per-row arguments are (n,)."""
    _, layers, heads, _, size = numbers.shape
    for i in range(len(rows)):
        table, own = tables[rows[i]], owns[rows[i]]
        for block in range(own // size, (entries[i] + size - 1) // size):
            start, stop = max(own - block * size, 0), min(size, entries[i] - block * size)
            for layer in range(layers):
                for head in range(heads):
                    lines = numbers[table[block], layer, head]
                    fold_lines(lines, start, stop, decays, notable[i], clock)


@kernel
def absorb(
    sums: Floats, tiles: Ints, folds: NDArray[np.bool_], layer: int, numbers: Floats,
    tables: Ints, owns: Ints, decays: Floats, notable: float, clock: float,
) -> None:  # fmt: skip
    """Add `prefill` sums (tiles, heads, slots) to mass tile by tile, folding rows where due."""
    heads, size = numbers.shape[2], numbers.shape[4]
    group, width = sums.shape[1] // heads, sums.shape[2]
    for tile in range(len(tiles)):
        _, count, slot, row = tiles[tile]
        table, own, entries = tables[row], owns[row], slot + count
        for head in range(heads):
            if folds[tile] and slot > 0:
                for block in range(own // size, (slot + size - 1) // size):
                    first, stop = max(own - block * size, 0), min(size, slot - block * size)
                    lines = numbers[table[block], layer, head]
                    fold_lines(lines, first, stop, decays, notable / slot, clock)
            start = (own + size - 1) // size
            for own_slot in range(own, min(start * size, entries)):
                target = numbers[table[own_slot // size], layer, head, MASS_LINE]
                for j in range(head * group, (head + 1) * group):
                    target[own_slot % size] += sums[tile, j, own_slot]
            source = sums.ctypes.data + tile * sums.strides[0] + head * group * sums.strides[1]
            target_lines = numbers.ctypes.data + layer * numbers.strides[1]
            target_lines += head * numbers.strides[2] + MASS_LINE * numbers.strides[3]
            for block in range(start, (entries + size - 1) // size):
                mass = target_lines + table[block] * numbers.strides[0]
                for t in range(0, size, LANES):
                    tile_sums = source + (block * size + t) * _FLOAT_BYTES
                    accumulate(mass + t * _FLOAT_BYTES, tile_sums, width, group)


@kernel
def collect(table: Ints, entries: int, numbers: Floats, out: Floats) -> None:
    """Gather a sequence's side data, shape (layers, kv_heads, 1 + fields, entries)."""
    _, layers, heads, lines, size = numbers.shape
    for block in range((entries + size - 1) // size):
        first = block * size
        count = min(size, entries - first)
        for layer in range(layers):
            for head in range(heads):
                for line in range(lines):
                    source = numbers[table[block], layer, head, line]
                    target = out[layer, head, line]
                    for t in range(count):
                        target[first + t] = source[t]


@kernel
def pair_holes(
    victims: Ints, entries: int, moves: Ints, counts: Ints, dead: NDArray[np.uint8]
) -> None:
    """Pair live tail entries with holes of `victims` (heads, drop), into (heads, drop, 2)."""
    heads, drop = victims.shape
    tail = entries - drop
    for head in range(heads):
        for i in range(drop):
            dead[victims[head, i]] = 1
        source, count = tail, 0
        for i in range(drop):
            hole = victims[head, i]
            if hole < tail:
                while dead[source]:
                    source += 1
                moves[head, count, SOURCE] = source
                moves[head, count, TARGET] = hole
                source += 1
                count += 1
        counts[head] = count
        for i in range(drop):
            dead[victims[head, i]] = 0


@kernel
def fill(
    kv: NDArray[np.generic], width: int, numbers: Floats, table: Ints, moves: Ints, counts: Ints
) -> None:
    """Apply `pair_holes` moves, (layers * kv_heads, n, 2), to keys, values and side data.

    Scales are what follows `size * width` numbers of a head, equally many per entry.
    """
    _, layers, heads, lines, size = numbers.shape
    part = kv.shape[4]
    more = part // size - width
    flat, sides = kv.reshape(-1), numbers.reshape(-1)
    #: Flat indices of each move's keys, values and side data, by `SOURCE` and `TARGET`.
    shape = (moves.shape[1], 2)
    keys, values, stats = (
        np.empty(shape, np.uint64),
        np.empty(shape, np.uint64),
        np.empty(shape, np.uint64),
    )
    for task in range(layers * heads):
        layer, head = task // heads, task % heads
        for i in range(counts[task]):
            for end in (SOURCE, TARGET):
                block, offset = table[moves[task, i, end] // size], moves[task, i, end] % size
                first = ((np.int64(block) * layers + layer) * 2 * heads + head) * part
                keys[i, end] = first + offset
                values[i, end] = first + heads * part + offset * width
                stats[i, end] = (np.int64(block) * layers * heads + task) * lines * size + offset
        for d in range(width):  # keys are stored dimension by dimension
            step = np.uint64(d * size)
            for i in range(counts[task]):
                flat[keys[i, TARGET] + step] = flat[keys[i, SOURCE] + step]
        for i in range(counts[task]):
            into, out = moves[task, i, TARGET] % size, moves[task, i, SOURCE] % size
            source = np.int64(keys[i, SOURCE]) - out + size * width + out * more
            target = np.int64(keys[i, TARGET]) - into + size * width + into * more
            for d in range(more):
                flat[target + d] = flat[source + d]
                flat[target + heads * part + d] = flat[source + heads * part + d]
            for d in range(width):
                step = np.uint64(d)
                flat[values[i, TARGET] + step] = flat[values[i, SOURCE] + step]
            for line in range(lines):
                step = np.uint64(line * size)
                sides[stats[i, TARGET] + step] = sides[stats[i, SOURCE] + step]


@kernel
def pool(mass: Floats, positions: Ints, length: int, width: int, out: Floats) -> None:
    """Average mass (layers, heads, n) over `width` neighbours by position; zero-padded."""
    layers, heads, count = mass.shape
    slots = np.empty(length, np.int32)
    order = np.empty(count, np.int32)
    for layer in range(layers):
        for head in range(heads):
            slots[:] = -1
            for slot in range(count):
                slots[positions[layer, head, slot]] = slot
            filled = 0
            for position in range(length):
                if slots[position] >= 0:
                    order[filled] = slots[position]
                    filled += 1
            for i in range(count):
                total = np.float32(0.0)
                for j in range(max(i - width // 2, 0), min(i + width // 2 + 1, count)):
                    total += mass[layer, head, order[j]]
                out[layer, head, order[i]] = total / np.float32(width)
