"""Transport: what a backend must do to move blocks, and `shm`; `tcp` and `nixl` have own files.

A backend has two ends. The sender's end says in `details` what its receiving end needs to know
(a file's name, a memory registration), and in `push` moves bytes itself or leaves that to the
receiver. The receiver's end writes into a `ReceiveBuffer`, which verifies.
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


class BackendUnavailable(Exception):
    """This backend cannot reach the sender after all; another may."""


class SendBackend:
    """The sender's end of a backend."""

    name: str  # the same at both ends

    def details(self, blocks: Ints) -> dict[str, bytes | int]:
        """What the receiver's end needs to know to have these blocks."""
        raise NotImplementedError

    def push(self, link: SideChannelLink, blocks: Ints, keep: Callable[[], None]) -> None:
        """Send the blocks, if it is this end that moves them; `keep` renews the lease, or raises.

        `keep` is called at least once a chunk.
        """

    def finish(self, details: dict[str, bytes | int]) -> None:
        """Let go of what `details` made for one pull; that has ended, well or not."""

    def close(self) -> None:
        """Let go of everything; no pull runs any more."""


class ReceiveBackend:
    """The receiver's end of a backend."""

    name: str  # the same at both ends
    needs_confirmation: bool  # blocks count only if the lease is confirmed after them

    def reaches(self, ticket: TransferParams) -> bool:  # noqa: ARG002
        """Whether the sender's memory may be within reach."""
        return True

    def fetch(
        self,
        link: SideChannelLink,
        granted: GrantFrame,
        landing: ReceiveBuffer,
        renew: Callable[[], None],
    ) -> None:
        """Fill the landing; call `renew` at least once a chunk where the sender does not push.

        Raises:
            BackendUnavailable: nothing was moved; try another.
            TransferError: it ended early; `landing.good` blocks are there.
        """

    def sweep(self) -> None:
        """Let go of what belongs to senders that are gone; called now and then."""

    def close(self) -> None:
        """Let go of everything; no pull runs any more."""


def granted_blocks(granted: GrantFrame, landing: ReceiveBuffer) -> Ints:
    """Return the sender's ids of the blocks that a grant lists, int32.

    Raises TransferError: PROTOCOL; they are not as many as the blocks of the landing.
    """
    raw = granted.details.get("blocks")
    if not isinstance(raw, bytes) or len(raw) != 4 * len(landing):
        raise TransferError(TransferReason.PROTOCOL, "the grant does not list the blocks")
    return np.frombuffer(raw, dtype="<i4").astype(np.int32)


def check_within(ids: Ints, rows: int) -> None:
    """Check that blocks lie within a sender's memory of `rows` rows.

    Raises TransferError: PROTOCOL; one does not.
    """
    if ids.size and not (ids.min() >= 0 and ids.max() < rows):
        raise TransferError(TransferReason.PROTOCOL, "a block lies outside the sender's memory")


#: A pull of so many bytes is worth waking a second thread.
PARALLEL_BYTES = 2 << 20


class ShmExport(SendBackend):
    """The sender's end: tells where the blocks are, and moves nothing."""

    name = "shm"

    def __init__(self, store: DeviceBlocks, memory: SharedMemory) -> None:
        """Export a store whose blocks lie in `memory`. Raises ValueError: they do not."""
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


class ShmImport(ReceiveBackend):
    """The receiver's end: maps the sender's memory read-only, once, and copies out of it."""

    name = "shm"
    needs_confirmation = True

    def __init__(self, threads: int = 1) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[tuple[str, str], MappedMemory] = {}
        self._host = host_id()
        self._helpers = threads - 1
        self._pool = ThreadPoolExecutor(max(1, self._helpers), thread_name_prefix="kv-copy")

    def reaches(self, ticket: TransferParams) -> bool:
        """Whether the sender is on this machine and shares the file system in memory."""
        return ticket.remote_host_id == self._host

    def fetch(
        self,
        link: SideChannelLink,
        granted: GrantFrame,
        landing: ReceiveBuffer,
        renew: Callable[[], None],
    ) -> None:
        """Copy chunk by chunk; the sender may compute its checksums at the same time."""
        rows, ids = self._source(granted, landing)
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
    rows: Bytes,
    ids: Ints,
    landing: ReceiveBuffer,
    chunks: deque[tuple[int, int]],
    renew: Callable[[], None] = lambda: None,
) -> None:
    while chunks:
        try:
            first, count = chunks.popleft()
        except IndexError:
            return  # another lane took the last
        landing.copy(first, rows, ids[first : first + count])
        renew()


log = logging.getLogger(__name__)

#: Bytes that are copied from the store at once.
_STEP_BYTES = 64 << 20


class StagedShmExport(ShmExport):
    """The sender's end: copies the blocks to shared memory, from which the receiver reads them.

    To the receiver it is the backend `shm`. The memory lasts until the pull has ended.
    """

    def __init__(self, store: DeviceBlocks) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._staged: dict[bytes, SharedMemory] = {}

    def details(self, blocks: Ints) -> dict[str, bytes | int]:
        """Stage the blocks; name, key and offset of the memory, and the blocks' places in it.

        Without room for them the name is empty, and the receiver tries another backend.
        """
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
        return {
            "name": name,
            "key": key,
            "offset": 0,
            "blocks": np.arange(len(blocks), dtype="<i4").tobytes(),
        }

    def finish(self, details: dict[str, bytes | int]) -> None:
        """Remove the memory of a pull that has ended."""
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


#: Bytes that follow one Data frame, when blocks are smaller than that.
MESSAGE_BYTES = 1 << 20


class TcpExport(SendBackend):
    """The sender's end: streams blocks straight out of the cache where it is host memory."""

    name = "tcp"

    def __init__(self, store: DeviceBlocks) -> None:
        self._store = store
        self._step = max(1, MESSAGE_BYTES // store.layout.block_bytes)

    def details(self, blocks: Ints) -> dict[str, bytes | int]:  # noqa: ARG002
        """Nothing: the blocks come by themselves."""
        return {}

    def push(self, link: SideChannelLink, blocks: Ints, keep: Callable[[], None]) -> None:
        """Send every block; each message's bytes are valid as the lease held after it."""
        rows = self._store.as_bytes()
        for i in range(0, len(blocks), self._step):
            ids = blocks[i : i + self._step]
            runs = [self._store.read(ids)] if rows is None else runs_of(rows, ids)
            keep()
            link.send(Data(len(ids)), [_flat(run) for run in runs])


class TcpImport(ReceiveBackend):
    """The receiver's end: receives straight into the cache where it is host memory."""

    name = "tcp"
    needs_confirmation = False

    def fetch(
        self,
        link: SideChannelLink,
        granted: GrantFrame,  # noqa: ARG002
        landing: ReceiveBuffer,
        renew: Callable[[], None],  # noqa: ARG002
    ) -> None:
        """Receive until every block is there."""
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
