"""Compiled kernels on the side data of cache entries, for the CPU.

`numbers` is `EntryStats.numbers`, shape (blocks, layers, kv_heads, 1 + fields, block_size). `ids`
is the same memory as int32, whose first line of a head holds positions.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import kernel
from pigou.request import Ints
from pigou.runtime.batch import POSITION, ROW, SLOT
from pigou.runtime.kv_cache import SOURCE, TARGET
from pigou.runtime.simd import LANES, accumulate

Floats = NDArray[np.float32]

#: Lines of a head's side data: positions (as int32 bits), the policy's fields from the first on,
#: which is the mass where attention is watched, and the field behind it.
POSITION_LINE = 0
FIRST_FIELD_LINE = MASS_LINE = 1
AFTER_MASS_LINE = 2
#: Bytes of a float32.
_FLOAT_BYTES = 4


#: Where the probabilities that entries receive are added up: `numbers`, the layer of the model,
#: and the first entry that is not shared, by row of the batch, shape (rows,).
MassTarget: TypeAlias = tuple[Floats, int, Ints]


@kernel
def enter(locations: Ints, tables: Ints, ids: Ints, numbers: Floats, blank: Floats) -> None:
    """Give the entries of a step's tokens their positions, and blank fields.

    Args:
        locations: position, slot and row of the batch of each token, shape (3, tokens).
        tables: block ids by row of the batch.
        ids: see above.
        numbers: see above.
        blank: what a field is at first, shape (fields,).
    """
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
    """Put the same values, shape (tokens, n), in lines `line` on of all heads of tokens' entries.

    The other arguments are those of `enter`.
    """
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
    """Take the mass of some entries of a head's block into the fields behind it, and clear it.

    Args:
        lines: of the block, shape (1 + fields, size).
        start: first offset.
        stop: last offset, not included.
        decays: field k becomes `decays[k]` times itself, plus the mass, shape (k,).
        notable: where above 0, the first field becomes `clock` if the mass is at least this.
        clock: see `notable`.
    """
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
    """Fold all heads of some rows of the batch, each from its own first entry on.

    Args:
        rows: of the batch, shape (n,).
        numbers: see above.
        tables: block ids by row of the batch.
        owns: first entry that is not shared, by row of the batch.
        entries: of each of `rows`, shape (n,).
        decays: see `fold_lines`.
        notable: of each of `rows`, shape (n,).
        clock: see `fold_lines`.
    """
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
    """Add what tiles' queries gave to entries to their mass, tile after tile.

    Args:
        sums: as `attention_kernels.prefill` set them, shape (tiles, heads, slots).
        folds: whether a tile's row is folded before it, shape (tiles,).
        numbers: see above.
        tables: block ids by row of the batch.
        owns: by row of the batch, see `fold`.
        decays: see `fold_lines`.
        notable: mass of an interval, times the entries, that counts as use (see `Folding`).
        clock: see `fold_lines`.
    """
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
    """Copy a sequence's side data together, shape (layers, kv_heads, 1 + fields, entries)."""
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
    """Find, for each head, which live entries of the tail move into which holes.

    Args:
        victims: slots of the entries that go, shape (heads, drop).
        entries: of the sequence; the last `drop` slots are the tail.
        moves: from and to, written to, shape (heads, drop, 2).
        counts: how many moves each head has, written to, shape (heads,).
        dead: scratch, all zero, shape (at least entries,); left all zero.
    """
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
def fill(kv: NDArray[np.generic], numbers: Floats, table: Ints, moves: Ints, counts: Ints) -> None:
    """Do the moves of `pair_holes` on keys, values and side data.

    Args:
        kv: the cache, shape (blocks, layers, 2, kv_heads, head_dim * size), contiguous.
        numbers: see above, contiguous.
        table: block ids of the sequence.
        moves: of layer * kv_heads + KV head, shape (layers * kv_heads, n, 2).
        counts: shape (layers * kv_heads,).
    """
    _, layers, heads, lines, size = numbers.shape
    part = kv.shape[4]
    width = part // size
    flat, sides = kv.reshape(-1), numbers.reshape(-1)
    #: Flat index of each move's keys, values and side data; `SOURCE` and `TARGET` of each.
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
        for d in range(width):  # a dimension of keys is side by side for a block's entries
            step = np.uint64(d * size)
            for i in range(counts[task]):
                flat[keys[i, TARGET] + step] = flat[keys[i, SOURCE] + step]
        for i in range(counts[task]):
            for d in range(width):
                step = np.uint64(d)
                flat[values[i, TARGET] + step] = flat[values[i, SOURCE] + step]
            for line in range(lines):
                step = np.uint64(line * size)
                sides[stats[i, TARGET] + step] = sides[stats[i, SOURCE] + step]


@kernel
def pool(mass: Floats, positions: Ints, length: int, width: int, out: Floats) -> None:
    """Average over `width` neighbouring entries, by position; zeros lie beyond the ends.

    Args:
        mass: shape (layers, heads, n).
        positions: shape (layers, heads, n).
        length: above all positions.
        out: shape of `mass`.
    """
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
