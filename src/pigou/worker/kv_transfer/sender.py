"""Sender: the prefill side of a transfer."""

from __future__ import annotations

import logging
import queue
import uuid
from collections.abc import Callable
from typing import Any

from pigou.background import Background
from pigou.kv import checksum
from pigou.logs import about
from pigou.request import SECOND, Ints
from pigou.worker.kv_transfer.backends import SendBackend, ShmExport, StagedShmExport
from pigou.worker.kv_transfer.block_store import BlockStore, SharedMemory, checksums_in, host_id
from pigou.worker.kv_transfer.lease import LeasedBlocks, LeaseTable
from pigou.worker.kv_transfer.result import TransferCounters, TransferStats
from pigou.worker.kv_transfer.side_channel_server import SideChannel
from pigou.worker.kv_transfer.tcp import TcpExport
from pigou.worker.kv_transfer.transfer_config import TransferConfig
from pigou.worker.kv_transfer.transfer_params import TransferParams, signed

log = logging.getLogger(__name__)


class Sender:
    """Offers blocks to other workers, each offer under a lease, and serves them."""

    def __init__(
        self,
        store: BlockStore,
        on_release: Callable[[str], None],
        config: TransferConfig | None = None,
        memory: SharedMemory | None = None,
        background: Background | None = None,
        key: bytes = b"",
    ) -> None:
        """Bind the side channel and start the threads.

        Args:
            on_release: called from a thread of the sender, exactly once for each offer, with the
                request's id, when its blocks were taken, declined, released, or have expired.
            key: of the fleet: receivers must prove that they know it, and tickets are signed with
                it; empty serves all.

        Raises:
            ConfigError: a backend's library is not installed.
            OSError: the address cannot be bound.
            ValueError: the blocks do not lie in `memory`.
        """
        checksum.warm_up()
        background = background or Background()
        self._config = config or TransferConfig()
        self._store = store
        self._key = key
        self._fingerprint = store.layout.fingerprint()
        self._host_id = host_id()
        self._counters = TransferCounters()
        self.engine_id = str(uuid.uuid4())
        self._exports = self._export(memory)
        self._book = LeaseTable(self._config.lease, self._config.max_hold, on_release)
        self._offers: queue.SimpleQueue[LeasedBlocks | None] = queue.SimpleQueue()
        self._channel = SideChannel(
            self._config,
            engine=self.engine_id,
            layout=store.layout,
            book=self._book,
            exports=self._exports,
            counters=self._counters,
            background=background,
            key=key,
        )
        self.port = self._channel.port
        self._threads = [
            background.thread("kv-checksum", self._hash),
            background.thread("kv-lease", self._book.reap),
        ]
        for thread in self._threads:
            thread.start()

    def offer(self, request: str, blocks: Ints, tokens: int, last_hash: str = "") -> dict[str, Any]:
        """Keep blocks for another worker, and return the `kv_transfer_params` to pull them.

        Returns at once: checksums are computed by a thread of the sender.

        Args:
            blocks: device blocks in prompt order, at least one, shape (n,).

        Raises:
            ValueError: the request is offered already, or the blocks do not fit the tokens.
            TransferError: CLOSED.
        """
        size = self._store.layout.block_size
        if tokens < 1 or len(blocks) != -(-tokens // size):
            raise ValueError(
                f"{len(blocks)} blocks for {tokens} tokens; blocks of {size} tokens make it "
                f"{-(-tokens // size)}"
            )
        offer = self._book.add(request, blocks.copy(), tokens, last_hash)
        self._offers.put(offer)
        return signed(self._ticket(offer), self._key).to_params()

    def release(self, request: str) -> bool:
        """Free a request's blocks now; False when they were free already."""
        return self._book.release(request)

    @property
    def held(self) -> int:
        """Offers that are held."""
        return len(self._book)

    def stats(self) -> TransferStats:
        """Counters of what receivers took."""
        return self._counters.stats()

    def close(self) -> None:
        """Release every offer, and end every connection and thread. The store may go then."""
        self._book.close()
        self._channel.close()
        self._offers.put(None)
        for thread in self._threads:
            thread.join()
        for export in self._exports.values():
            export.close()

    def _export(self, memory: SharedMemory | None) -> dict[str, SendBackend]:
        exports: dict[str, SendBackend] = {}
        for name in self._config.backends:
            if name == "tcp":
                exports[name] = TcpExport(self._store)
            elif name == "nixl":
                from pigou.worker.kv_transfer.nixl import NixlExport

                exports[name] = NixlExport(self._store)
            elif memory is not None:
                exports[name] = ShmExport(self._store, memory)
            elif self._store.as_bytes() is None:
                exports[name] = StagedShmExport(self._store)
        if not exports:
            raise ValueError("backends is ['shm'], and no shared memory was given; also allow tcp")
        return exports

    def _ticket(self, offer: LeasedBlocks) -> TransferParams:
        return TransferParams(
            remote_engine_id=self.engine_id,
            remote_request_id=offer.request,
            remote_host=self._config.advertise or self._config.host,
            remote_port=self.port,
            remote_host_id=self._host_id,
            remote_num_tokens=offer.tokens,
            remote_block_size=self._store.layout.block_size,
            remote_layout=self._fingerprint,
            remote_secret=offer.secret,
            remote_last_hash=offer.last_hash,
            remote_backends=list(self._exports),
            remote_lease_seconds=self._config.lease / SECOND,
        )

    def _hash(self) -> None:
        while (offer := self._offers.get()) is not None:
            try:
                offer.checksums = checksums_in(self._store, offer.blocks)
            except Exception as error:
                words = "cannot read the blocks of request %s"
                log.exception(words, offer.request, extra=about(offer.request))
                offer.error = f"cannot read the blocks: {error!r}"
            offer.ready.set()
