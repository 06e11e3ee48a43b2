"""The shared-memory backend: the receiver copies straight out of the sender's KV cache."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

from pigou.kv.layout import Bytes
from pigou.request import Ints
from pigou.worker.kv_transfer.backends import BackendUnavailable
from pigou.worker.kv_transfer.block_store import (
    SHARED_DIR,
    BlockStore,
    MappedMemory,
    SharedMemory,
    host_id,
)
from pigou.worker.kv_transfer.receive_buffer import Landing
from pigou.worker.kv_transfer.replies import expect_checksums
from pigou.worker.kv_transfer.result import Reason, TransferError
from pigou.worker.kv_transfer.side_channel_protocol import Grant, Link
from pigou.worker.kv_transfer.transfer_params import Ticket

#: A pull of so many bytes is worth waking a second thread.
PARALLEL_BYTES = 2 << 20


class ShmExport:
    """The sender's end: tells where the blocks are, and moves nothing."""

    name = "shm"

    def __init__(self, store: BlockStore, memory: SharedMemory) -> None:
        """Export a store whose blocks lie in `memory`.

        Raises:
            ValueError: they do not.
        """
        data = store.as_bytes()
        offset = None if data is None else memory.offset_of(data)
        if offset is None:
            raise ValueError("the store's blocks do not lie in the shared memory that was given")
        self._offset = offset
        self._memory = memory

    def details(self, blocks: Ints) -> dict[str, bytes | int]:
        """Name, key and offset of the memory; the blocks' ids (int32, little-endian)."""
        return {
            "name": self._memory.name.encode(),
            "key": self._memory.key.encode(),
            "offset": self._offset,
            "blocks": blocks.astype("<i4").tobytes(),
        }

    def push(self, link: Link, blocks: Ints, keep: Callable[[], None]) -> None:
        """Nothing: the receiver reads by itself."""

    def finish(self, details: dict[str, bytes | int]) -> None:
        """Nothing: no pull has anything of its own."""


class ShmImport:
    """The receiver's end: maps the sender's memory read-only, once, and copies out of it."""

    name = "shm"
    needs_confirmation = True

    def __init__(self, threads: int = 1) -> None:
        """Copy with up to `threads` threads a pull, that of the caller included."""
        self._lock = threading.Lock()
        self._mapped: dict[tuple[str, str], MappedMemory] = {}
        self._host = host_id()
        self._helpers = threads - 1
        self._pool = ThreadPoolExecutor(max(1, self._helpers), thread_name_prefix="kv-copy")

    def reaches(self, ticket: Ticket) -> bool:
        """Whether the sender is on this machine and shares the file system in memory."""
        return ticket.remote_host_id == self._host

    def fetch(
        self,
        link: Link,
        grant: Grant,
        landing: Landing,
        renew: Callable[[], None],
    ) -> None:
        """Copy chunk by chunk; the sender may compute its checksums at the same time."""
        rows, ids = self._source(grant, landing)
        lanes = self._helpers if len(landing) * landing.block_bytes >= PARALLEL_BYTES else 0
        chunks = deque(landing.copies())  # its methods are atomic: the lanes share it
        helpers = [self._pool.submit(_lane, rows, ids, landing, chunks) for _ in range(lanes)]
        try:
            _lane(rows, ids, landing, chunks, renew)
        finally:
            chunks.clear()
            wait(helpers)
        for helper in helpers:
            helper.result()
        landing.verify(expect_checksums(link, len(landing)))

    def sweep(self) -> None:
        """Unmap memory whose file is gone: its creator is, and the memory would stay taken."""
        with self._lock:
            gone = [key for key in self._mapped if not (SHARED_DIR / key[0]).exists()]
            for key in gone:
                del self._mapped[key]

    def close(self) -> None:
        """End the helpers, and unmap."""
        self._pool.shutdown()
        with self._lock:
            self._mapped.clear()

    def _source(self, grant: Grant, landing: Landing) -> tuple[Bytes, Ints]:
        name, key = grant.details.get("name"), grant.details.get("key")
        offset, raw = grant.details.get("offset"), grant.details.get("blocks")
        if not (isinstance(name, bytes) and isinstance(key, bytes) and isinstance(offset, int)):
            raise TransferError(Reason.PROTOCOL, "the grant names no shared memory")
        if not isinstance(raw, bytes) or len(raw) != 4 * len(landing):
            raise TransferError(Reason.PROTOCOL, "the grant does not list the blocks")
        try:
            rows = self._map(name.decode(), key.decode()).blocks(offset, landing.block_bytes)
        except (OSError, ValueError) as error:
            raise BackendUnavailable(str(error)) from error
        ids = np.frombuffer(raw, dtype="<i4").astype(np.int32)
        if ids.size and not (ids.min() >= 0 and ids.max() < len(rows)):
            raise TransferError(Reason.PROTOCOL, "a block lies outside the shared memory")
        return rows, ids

    def _map(self, name: str, key: str) -> MappedMemory:
        with self._lock:
            if (name, key) not in self._mapped:
                self._mapped[name, key] = MappedMemory(name, key)
            return self._mapped[name, key]


def _lane(
    rows: Bytes,
    ids: Ints,
    landing: Landing,
    chunks: deque[tuple[int, int]],
    renew: Callable[[], None] = lambda: None,
) -> None:
    """Move chunks until none is left."""
    while chunks:
        try:
            first, count = chunks.popleft()
        except IndexError:
            return  # another lane took the last
        landing.copy(first, rows, ids[first : first + count])
        renew()
