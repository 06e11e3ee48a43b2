"""Interfaces of transfer backends, and the backends `shm` and `tcp`.

The sender's `details` tell the receiving end where the blocks are; `push` sends them if the sender
moves them. The receiving end fills a `ReceiveBuffer`, which verifies.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

from pigou.kv.block import Bytes
from pigou.request import Ints
from pigou.runtime.stores.store import DeviceBlocks
from pigou.worker.kv_transfer.block_store import (
    SHARED_DIR,
    MappedMemory,
    ReceiveBuffer,
    SharedMemory,
    host_id,
    runs_of,
)
from pigou.worker.kv_transfer.side_channel_protocol import (
    Data,
    GrantFrame,
    SideChannelLink,
    expect,
    expect_checksums,
)
from pigou.worker.kv_transfer.transfer_params import TransferError, TransferParams, TransferReason

#: Min bytes of a pull to use a second thread.
PARALLEL_BYTES = 2 << 20
log = logging.getLogger(__name__)
#: Bytes copied from the store at once.
_STEP_BYTES = 64 << 20
#: Bytes per Data frame, if blocks are smaller.
MESSAGE_BYTES = 1 << 20


class BackendUnavailable(Exception):
    """Raised if this backend cannot reach the sender; try another."""


class SendBackend:
    """The sender's end of a backend."""

    name: str  # the same at both ends

    def details(self, blocks: Ints) -> dict[str, bytes | int]:
        """Return the details that the receiver needs to fetch these blocks."""
        raise NotImplementedError

    def push(self, link: SideChannelLink, blocks: Ints, keep: Callable[[], None]) -> None:
        """Send the blocks, if this end moves them; call `keep` each chunk to renew the lease."""

    def finish(self, details: dict[str, bytes | int]) -> None:
        """Free memory that `details` allocated for a pull that has ended."""

    def close(self) -> None:
        """Free everything; no pull is running."""


class ReceiveBackend:
    """The receiver's end of a backend."""

    name: str  # the same at both ends
    needs_confirmation: bool  # blocks are valid only once the lease is confirmed

    def reaches(self, ticket: TransferParams) -> bool:  # noqa: ARG002
        """True if the sender's memory may be reachable."""
        return True

    def fetch(
        self, link: SideChannelLink, granted: GrantFrame, landing: ReceiveBuffer,
        renew: Callable[[], None],
    ) -> None:  # fmt: skip
        """Fill the buffer, calling `renew`; raises BackendUnavailable or TransferError."""

    def sweep(self) -> None:
        """Free resources of dead senders; called periodically."""

    def close(self) -> None:
        """Free everything; no pull is running."""


def granted_blocks(granted: GrantFrame, landing: ReceiveBuffer) -> Ints:
    """Return the sender's block ids of a grant, int32; raises TransferError on a wrong count."""
    raw = granted.details.get("blocks")
    if not isinstance(raw, bytes) or len(raw) != 4 * len(landing):
        raise TransferError(TransferReason.PROTOCOL, "the grant does not list the blocks")
    return np.frombuffer(raw, dtype="<i4").astype(np.int32)


def check_within(ids: Ints, rows: int) -> None:
    """Check block ids against a sender's `rows`; raises TransferError if out of range."""
    if ids.size and not (ids.min() >= 0 and ids.max() < rows):
        raise TransferError(TransferReason.PROTOCOL, "a block lies outside the sender's memory")


class ShmExport(SendBackend):
    """Sender of `shm`: tells where the blocks are, and moves nothing."""

    name = "shm"

    def __init__(self, store: DeviceBlocks, memory: SharedMemory) -> None:
        """Export blocks that lie in `memory`; raises ValueError if they do not."""
        data = store.as_bytes()
        offset = None if data is None else memory.offset_of(data)
        if offset is None:
            raise ValueError("the store's blocks do not lie in the shared memory that was given")
        self._offset = offset
        self._memory = memory

    def details(self, blocks: Ints) -> dict[str, bytes | int]:
        """Return name, key and offset of the memory, and the block ids (int32, little-endian)."""
        return {
            "name": self._memory.name.encode(),
            "key": self._memory.key.encode(),
            "offset": self._offset,
            "blocks": blocks.astype("<i4").tobytes(),
        }


class ShmImport(ReceiveBackend):
    """Receiver of `shm`: maps the sender's memory read-only, once, and copies from it."""

    name = "shm"
    needs_confirmation = True

    def __init__(self, threads: int = 1) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[tuple[str, str], MappedMemory] = {}
        self._host = host_id()
        self._helpers = threads - 1
        self._pool = ThreadPoolExecutor(max(1, self._helpers), thread_name_prefix="kv-copy")

    def reaches(self, ticket: TransferParams) -> bool:
        """True if the sender shares this machine and its shared-memory file system."""
        return ticket.remote_host_id == self._host

    def fetch(
        self, link: SideChannelLink, granted: GrantFrame, landing: ReceiveBuffer,
        renew: Callable[[], None],
    ) -> None:  # fmt: skip
        """Copy chunk by chunk, while the sender may still compute checksums."""
        rows, ids = self._source(granted, landing)
        lanes = self._helpers if len(landing) * landing.block_bytes >= PARALLEL_BYTES else 0
        chunks = deque(landing.copies())  # atomic, and shared by the lanes
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
        """Unmap memory whose creator is gone, which would otherwise stay allocated."""
        with self._lock:
            gone = [key for key in self._mapped if not (SHARED_DIR / key[0]).exists()]
            for key in gone:
                del self._mapped[key]

    def close(self) -> None:
        """Stop the helper threads, and unmap."""
        self._pool.shutdown()
        with self._lock:
            self._mapped.clear()

    def _source(self, granted: GrantFrame, landing: ReceiveBuffer) -> tuple[Bytes, Ints]:
        name, key = granted.details.get("name"), granted.details.get("key")
        offset = granted.details.get("offset")
        if not (isinstance(name, bytes) and isinstance(key, bytes) and isinstance(offset, int)):
            raise TransferError(TransferReason.PROTOCOL, "the grant names no shared memory")
        ids = granted_blocks(granted, landing)
        try:
            rows = self._map(name.decode(), key.decode()).blocks(offset, landing.block_bytes)
        except (OSError, ValueError) as error:
            raise BackendUnavailable(str(error)) from error
        check_within(ids, len(rows))
        return rows, ids

    def _map(self, name: str, key: str) -> MappedMemory:
        with self._lock:
            if (name, key) not in self._mapped:
                self._mapped[name, key] = MappedMemory(name, key)
            return self._mapped[name, key]


def _lane(
    rows: Bytes, ids: Ints, landing: ReceiveBuffer, chunks: deque[tuple[int, int]],
    renew: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    while chunks:
        try:
            first, count = chunks.popleft()
        except IndexError:
            return  # another lane took the last chunk
        landing.copy(first, rows, ids[first : first + count])
        renew()


class StagedShmExport(ShmExport):
    """Sender of `shm` for device blocks: stages them in shared memory for each pull."""

    def __init__(self, store: DeviceBlocks) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._staged: dict[bytes, SharedMemory] = {}

    def details(self, blocks: Ints) -> dict[str, bytes | int]:
        """Stage the blocks; an empty name, for lack of memory, makes the receiver move on."""
        size = self._store.layout.block_bytes
        try:
            memory = SharedMemory(max(1, len(blocks) * size))
        except OSError as error:
            log.warning("KV blocks will move by TCP: %s", error)
            return {"name": b"", "key": b"", "offset": 0, "blocks": bytes(4 * len(blocks))}
        name = memory.name.encode()
        with self._lock:
            self._staged[name] = memory
        key, failure = memory.key.encode(), ""
        try:
            self._fill(memory, blocks)
        except Exception as error:
            failure = repr(error)
        del memory  # a traceback would keep it mapped
        if failure:
            self.finish({"name": name})
            raise TransferError(TransferReason.STORE, f"cannot read the blocks: {failure}")
        ids = np.arange(len(blocks), dtype="<i4").tobytes()
        return {"name": name, "key": key, "offset": 0, "blocks": ids}

    def finish(self, details: dict[str, bytes | int]) -> None:
        """Remove the memory of a finished pull."""
        name = details["name"]
        with self._lock:
            memory = self._staged.pop(name, None) if isinstance(name, bytes) else None
        if memory is not None:
            memory.close()

    def _fill(self, memory: SharedMemory, blocks: Ints) -> None:
        size = self._store.layout.block_bytes
        rows = memory.buffer[: len(blocks) * size].reshape(len(blocks), size)
        step = max(1, _STEP_BYTES // size)
        for first in range(0, len(blocks), step):
            ids = blocks[first : first + step]
            rows[first : first + len(ids)] = self._store.read(ids)


class TcpExport(SendBackend):
    """Sender of `tcp`: streams blocks directly from a cache in host memory."""

    name = "tcp"

    def __init__(self, store: DeviceBlocks) -> None:
        self._store = store
        self._step = max(1, MESSAGE_BYTES // store.layout.block_bytes)

    def details(self, blocks: Ints) -> dict[str, bytes | int]:  # noqa: ARG002
        """Return nothing: the blocks are pushed."""
        return {}

    def push(self, link: SideChannelLink, blocks: Ints, keep: Callable[[], None]) -> None:
        """Send every block; renew the lease after each message."""
        rows = self._store.as_bytes()
        for i in range(0, len(blocks), self._step):
            ids = blocks[i : i + self._step]
            runs = [self._store.read(ids)] if rows is None else runs_of(rows, ids)
            keep()
            link.send(Data(len(ids)), [_flat(run) for run in runs])


class TcpImport(ReceiveBackend):
    """Receiver of `tcp`: receives directly into a cache in host memory."""

    name = "tcp"
    needs_confirmation = False

    def fetch(
        self,
        link: SideChannelLink,
        granted: GrantFrame,  # noqa: ARG002
        landing: ReceiveBuffer,
        renew: Callable[[], None],  # noqa: ARG002
    ) -> None:
        """Receive until all blocks have arrived."""
        landing.verify(expect_checksums(link, len(landing)))
        arrived = 0
        while arrived < len(landing):
            count = expect(link, Data).blocks
            if not 0 < count <= len(landing) - arrived:
                raise TransferError(TransferReason.PROTOCOL, f"{count} blocks after {arrived}")
            for first, size in landing.chunks(arrived, arrived + count):
                targets = landing.targets(first, size)
                link.receive_into([_flat(run) for run in targets])
                landing.accept(first, targets)
            arrived += count


def _flat(run: Bytes) -> memoryview:
    return run.reshape(-1).data
