"""The shared-memory backend of a store on a GPU: each pull's blocks are staged in a file."""

from __future__ import annotations

import logging
import threading

import numpy as np

from pigou.request import Ints
from pigou.worker.kv_transfer.block_store import BlockStore, SharedMemory
from pigou.worker.kv_transfer.result import Reason, TransferError
from pigou.worker.kv_transfer.shm import ShmExport

log = logging.getLogger(__name__)

#: Bytes that are copied from the store at once.
_STEP_BYTES = 64 << 20


class StagedShmExport(ShmExport):
    """The sender's end: copies the blocks to shared memory, from which the receiver reads them.

    To the receiver it is the backend `shm`. The memory lasts until the pull has ended.
    """

    def __init__(self, store: BlockStore) -> None:
        """Export a store that is not in host memory."""
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
            raise TransferError(Reason.STORE, f"cannot read the blocks: {failure}")
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
