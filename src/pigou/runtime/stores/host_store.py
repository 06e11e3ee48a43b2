"""HostStore: blocks in one array of host memory, with rows for staging."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np

from pigou.kv import checksum
from pigou.kv.block import Bytes, keys_of
from pigou.kv.checksum import Checksums
from pigou.request import BlockHashes, Ints
from pigou.runtime.stores.store import (
    BlockRecords,
    Bools,
    SlotMap,
    StoreCounts,
    StoreError,
    no_records,
)

log = logging.getLogger(__name__)


class HostStore:
    """Stores up to `capacity` blocks in arena rows, and stages copies in the others.

    Staged rows are published without copying. Checksums are verified on read.
    """

    def __init__(
        self, arena: Bytes, capacity: int, *, clock: Callable[[], int] = time.time_ns
    ) -> None:
        """Use `arena`, C-contiguous (rows, block_bytes); raises ValueError if rows < `capacity`."""
        if arena.ndim != 2 or not arena.flags.c_contiguous or not 0 <= capacity <= len(arena):
            raise ValueError(
                f"an arena of shape {arena.shape} for {capacity} blocks; give a contiguous one "
                "of at least as many rows"
            )
        self.counts = StoreCounts()
        self.arena = arena
        self.capacity = capacity
        self.block_bytes = int(arena.shape[1])
        self.cap_bytes = capacity * self.block_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._slot_map = SlotMap()
        self._free = list(range(len(arena) - 1, -1, -1))
        self._sums: Checksums = np.zeros(len(arena), dtype=np.uint64)
        self._held = no_records(len(arena))
        self._closed = False

    @property
    def used_bytes(self) -> int:
        """Bytes of the stored blocks."""
        return len(self._slot_map) * self.block_bytes

    def stage(self, count: int) -> Ints | None:
        """Allocate `count` staging rows; None if too few are free."""
        with self._lock:
            if self._closed or count > len(self._free):
                return None
            rows = [self._free.pop() for _ in range(count)]
        return np.array(rows, dtype=np.int32)

    def drop(self, rows: Ints) -> None:
        """Free staging rows."""
        with self._lock:
            self._free.extend(rows.tolist())

    def publish(self, entries: BlockRecords, rows: Ints, sums: Checksums) -> Bools:
        """Publish staged rows (n,); return which are stored, (n,). Refused rows are dropped."""
        alive = entries.alive(self._clock())
        stored: Bools = np.zeros(len(entries), dtype=np.bool_)
        with self._lock:
            self._held.write(rows, entries)
            self._sums[rows] = sums
            for i, (key, row) in enumerate(zip(keys_of(entries.keys), rows.tolist(), strict=True)):
                stored_already = key in self._slot_map
                room = alive[i] and not self._closed and len(self._slot_map) < self.capacity
                stored[i] = stored_already or room
                if stored_already or not room:
                    self._free.append(row)
                else:
                    self._slot_map.put(key, row)
                    self.counts.written += 1
            self.counts.refused += int(np.count_nonzero(alive & ~stored))
        return stored

    def pin(self, keys: BlockHashes) -> Ints:
        """Pin blocks for reading; return their rows, -1 where missing."""
        with self._lock:
            return np.array(self._slot_map.pin(keys_of(keys)), dtype=np.int32).reshape(len(keys))

    def unpin(self, rows: Ints) -> None:
        """Unpin rows returned by `pin`."""
        with self._lock:
            self._free.extend(self._slot_map.unpin(rows.tolist()))

    def sums(self, rows: Ints) -> Checksums:
        """Return checksums of pinned rows, shape (n,)."""
        return self._sums[rows]

    def put(
        self, entries: BlockRecords, data: Bytes, rows: Ints, sums: Checksums | None = None
    ) -> Bools:
        """Copy blocks into the store (see `Store.put`), computing checksums during the copy."""
        self._check_open()
        names = keys_of(entries.keys)
        with self._lock:
            stored: Bools = np.array([key in self._slot_map for key in names], dtype=np.bool_)
            new = np.flatnonzero(~stored & entries.alive(self._clock()))
            room = min(len(self._free), self.capacity - len(self._slot_map))
            self.counts.refused += max(0, len(new) - room)
            new = new[:room]
            slots = np.array([self._free.pop() for _ in new], dtype=np.int32)
        copied = checksum.copy(data, rows[new], self.arena, slots)
        if sums is not None:  # reads will detect any change since they were computed
            copied = sums[new]
        stored[new] = self.publish(entries.take(new), slots, copied)
        return stored

    def has(self, keys: BlockHashes) -> Bools:
        """Return which blocks are stored, shape (n,)."""
        with self._lock:
            return np.array([key in self._slot_map for key in keys_of(keys)], dtype=np.bool_)

    def get(self, keys: BlockHashes, out: Bytes, rows: Ints) -> Bools:
        """Copy blocks out (see `Store.get`)."""
        self._check_open()
        good: Bools = np.zeros(len(keys), dtype=np.bool_)
        slots = self.pin(keys)
        try:
            hits = np.flatnonzero(slots >= 0)
            copied = checksum.copy(self.arena, slots[hits], out, rows[hits])
            good[hits] = self.verify(slots[hits], copied)
        finally:
            self.unpin(slots)
        self.missed(len(keys) - len(hits))
        return good

    def verify(self, rows: Ints, copied: Checksums) -> Bools:
        """Return which pinned rows match `copied`; void or altered blocks are forgotten."""
        held = self._held.take(rows)
        alive = held.alive(self._clock())
        good: Bools = alive & (copied == self._sums[rows])
        altered = int(np.count_nonzero(alive & ~good))
        with self._lock:
            self.counts.count_reads(good)
            self.counts.corrupt += altered
            self.counts.expired += int(np.count_nonzero(~alive))
            self._forget(held.keys[~good])
        if altered:
            log.error("host memory altered %d blocks; they are misses", altered)
        return good

    def missed(self, count: int) -> None:
        """Count misses."""
        with self._lock:
            self.counts.misses += count

    def delete(self, keys: BlockHashes) -> int:
        """Delete blocks; return how many existed."""
        with self._lock:
            count = self._forget(keys)
            self.counts.deleted += count
        return count

    def _forget(self, keys: BlockHashes) -> int:
        count, empty = self._slot_map.remove(keys_of(keys))
        self._free.extend(empty)
        return count

    def entries(self) -> BlockRecords:
        """Return all valid blocks."""
        with self._lock:
            held = self._held.take(np.array(self._slot_map.slots(), dtype=np.int32))
        return held.take(held.alive(self._clock()))

    def probe(self) -> None:
        """Do nothing: memory is always available."""

    def close(self) -> None:
        """Drop all blocks."""
        with self._lock:
            self._closed = True
            _, empty = self._slot_map.remove(self._slot_map.keys())
            self._free.extend(empty)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the host store was closed")
