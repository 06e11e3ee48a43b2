"""Sender: the prefill side of a transfer."""

from __future__ import annotations

import hmac
import logging
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from pigou.background import Background
from pigou.kv import checksum
from pigou.logs import about
from pigou.request import SECOND, Ints
from pigou.runtime.stores.store import DeviceBlocks
from pigou.worker.kv_transfer.backends import SendBackend, ShmExport, StagedShmExport, TcpExport
from pigou.worker.kv_transfer.block_store import SharedMemory, checksums_in, host_id
from pigou.worker.kv_transfer.lease import LeasedBlocks, LeaseTable
from pigou.worker.kv_transfer.side_channel_protocol import (
    MAX_REQUEST,
    REQUESTS,
    ChecksumsFrame,
    Confirm,
    Decline,
    Done,
    GrantFrame,
    Hello,
    Open,
    Refuse,
    Renew,
    Request,
    SideChannelLink,
    out_of_turn,
    prove_as_sender,
)
from pigou.worker.kv_transfer.transfer_params import (
    PATH_FAILURES,
    TransferConfig,
    TransferError,
    TransferParams,
    TransferReason,
    signed,
)

log = logging.getLogger(__name__)


class Sender:
    """Offers blocks to other workers under leases, and serves them."""

    def __init__(
        self, store: DeviceBlocks, on_release: Callable[[str], None],
        config: TransferConfig | None = None, memory: SharedMemory | None = None,
        background: Background | None = None, key: bytes = b"",
    ) -> None:  # fmt: skip
        """Bind the side channel and start the threads; an empty fleet `key` serves everyone.

        `on_release` is called once per offer with the request id, from a thread, when its blocks
        are taken, declined, released or expired. Raises ConfigError without a backend's library,
        OSError if the address is unavailable, ValueError if the blocks lie outside `memory`.
        """
        checksum.warm_up()
        background = background or Background()
        self._config = config or TransferConfig()
        self._store = store
        self._key = key
        self._fingerprint = store.layout.fingerprint()
        self._host_id = host_id()
        self.engine_id = str(uuid.uuid4())
        self._exports = self._export(memory)
        self._book = LeaseTable(self._config.lease, self._config.max_hold, on_release)
        self._offers: queue.SimpleQueue[LeasedBlocks | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._links: dict[SideChannelLink, threading.Thread] = {}
        self._closed = False
        self._listener = _listen(self._config.host, self._config.port)
        self.port: int = self._listener.getsockname()[1]
        self._threads = [
            background.thread("kv-accept", self._accept),
            background.thread("kv-checksum", self._hash),
            background.thread("kv-lease", self._book.reap),
        ]
        for thread in self._threads:
            thread.start()

    def expect(self, request: str, expected: bool = True) -> None:
        """Let receivers wait for the offer of a request, 0.9 of `timeout` at most."""
        self._book.expect(request, expected)

    def offer(
        self, request: str, blocks: Ints, tokens: int, last_hash: str = "", secret: str = ""
    ) -> dict[str, Any]:
        """Hold blocks, in prompt order; return the ticket. Raises ValueError or TransferError.

        Give `secret` where the ticket is made elsewhere, from `ticket`.
        """
        size = self._store.layout.block_size
        if tokens < 1 or len(blocks) != -(-tokens // size):
            raise ValueError(
                f"{len(blocks)} blocks for {tokens} tokens; blocks of {size} tokens make it "
                f"{-(-tokens // size)}"
            )
        offer = self._book.add(request, blocks.copy(), tokens, last_hash, secret)
        self._offers.put(offer)
        return signed(self.ticket(offer), self._key).to_params()

    def release(self, request: str) -> bool:
        """Free a request's blocks; False if already free."""
        return self._book.release(request)

    @property
    def held(self) -> int:
        """Offers held."""
        return len(self._book)

    def close(self) -> None:
        """Release all offers, and end connections and threads; the store is unused afterwards."""
        self._book.close()
        self._offers.put(None)
        with self._lock:
            self._closed = True
            links = dict(self._links)
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`; `close` does not
        except OSError:
            log.debug("the listener was down already")
        self._listener.close()
        for link in links:
            link.close()
        for thread in [*links.values(), *self._threads]:
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

    def ticket(self, offer: LeasedBlocks) -> TransferParams:
        """Return the unsigned ticket of an offer."""
        return TransferParams(
            remote_engine_id=self.engine_id, remote_request_id=offer.request,
            remote_host=self._config.advertise or self._config.host, remote_port=self.port,
            remote_host_id=self._host_id, remote_num_tokens=offer.tokens,
            remote_block_size=self._store.layout.block_size, remote_layout=self._fingerprint,
            remote_tensor_parallel_size=self._config.tensor_parallel_size,
            remote_secret=offer.secret, remote_last_hash=offer.last_hash,
            remote_backends=list(self._exports), remote_lease_seconds=self._config.lease / SECOND,
        )  # fmt: skip

    def _hash(self) -> None:
        while (offer := self._offers.get()) is not None:
            try:
                offer.checksums = checksums_in(self._store, offer.blocks)
            except Exception as error:
                words = "cannot read the blocks of request %s"
                log.exception(words, offer.request, extra=about(offer.request))
                offer.error = f"cannot read the blocks: {error!r}"
            offer.ready.set()

    # --- the side channel -----------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                log.warning("cannot accept a receiver: %s", str(error))
                time.sleep(0.05)  # likely out of file descriptors: back off
                continue
            self._admit(SideChannelLink(sock, min(self._config.timeout, self._config.lease)))

    def _admit(self, link: SideChannelLink) -> None:
        thread = threading.Thread(target=self._serve, args=(link,), name="kv-serve", daemon=True)
        with self._lock:
            full = len(self._links) >= self._config.max_connections
            if not full and not self._closed:
                self._links[link] = thread
                thread.start()
                return
        try:
            link.send(Refuse(TransferReason.BUSY, "too many receivers at once"))
        except TransferError as error:
            log.debug("a receiver that was turned away left first: %s", str(error))
        link.close()

    def _serve(self, link: SideChannelLink) -> None:
        try:
            if self._key:
                prove_as_sender(link, self._key)
            while (request := self._next(link)) is not None:
                self._answer(link, request)
        except TransferError as error:
            log.info("a receiver's conversation ended: %s", str(error))
            self._refuse(link, error)
        except Exception as error:
            log.exception("a receiver's conversation failed")
            self._refuse(link, TransferError(TransferReason.STORE, repr(error)))
        finally:
            link.close()
            with self._lock:
                self._links.pop(link, None)

    def _refuse(self, link: SideChannelLink, error: TransferError) -> None:
        if error.reason in PATH_FAILURES:
            return
        try:
            link.send(Refuse(error.reason, error.detail))
        except TransferError as failure:
            log.debug("the refusal did not arrive: %s", str(failure))

    def _next(self, link: SideChannelLink) -> Request | None:
        try:
            return link.receive(REQUESTS, MAX_REQUEST)
        except TransferError as error:
            if error.reason in PATH_FAILURES:
                return None
            raise

    def _answer(self, link: SideChannelLink, request: Request) -> None:
        if isinstance(request, Hello):
            why = "this sender has no fleet secret; start it with the receiver's"
            raise TransferError(TransferReason.UNPROVEN, why)
        if not isinstance(request, Open | Decline):
            raise out_of_turn(request)
        if request.engine != self.engine_id:
            raise TransferError(TransferReason.UNKNOWN, "another engine: this sender was restarted")
        wait_s = 0.9 * self._config.timeout / SECOND
        offer = self._book.find(request.request, request.secret, wait_s)
        if isinstance(request, Decline):
            link.send(Confirm(self._book.finish(offer)))
            return
        self._give(link, request, offer)

    def _give(self, link: SideChannelLink, request: Open, offer: LeasedBlocks) -> None:
        export = self._check(request, offer)
        span = slice(request.first, request.first + request.count)
        blocks = offer.blocks[span]
        patience = min(self._config.timeout, self._config.lease) / SECOND
        details = export.details(blocks)
        try:
            link.send(GrantFrame(details, patience))
            link.send(ChecksumsFrame(self._checksums(offer)[span].astype("<u8").tobytes()))
            export.push(link, blocks, lambda: self._keep(offer))
            self._await_done(link, offer)
        finally:
            export.finish(details)
        link.send(Confirm(self._book.finish(offer)))

    def _check(self, request: Open, offer: LeasedBlocks) -> SendBackend:
        if request.layout != self._fingerprint:
            why = f"the sender's blocks are {self._store.layout}; yours are not"
            raise TransferError(TransferReason.LAYOUT, why)
        if not hmac.compare_digest(request.last_hash.encode(), offer.last_hash.encode()):
            why = "the offered blocks are of another prompt than the ticket says"
            raise TransferError(TransferReason.OTHER_PROMPT, why)
        if request.first < 0 or request.count < 0:
            raise TransferError(TransferReason.BAD_PARAMS, "first and count must be at least 0")
        if request.first + request.count > len(offer.blocks):
            raise TransferError(
                TransferReason.BAD_PARAMS,
                f"blocks {request.first} to {request.first + request.count} were asked for; "
                f"{len(offer.blocks)} are offered",
            )
        export = self._exports.get(request.backend)
        if export is None:
            known = ", ".join(self._exports)
            why = f"no backend {request.backend!r}; this sender has {known}"
            raise TransferError(TransferReason.BAD_PARAMS, why)
        return export

    def _checksums(self, offer: LeasedBlocks) -> checksum.Checksums:
        if not offer.ready.wait(self._config.timeout / SECOND):
            raise TransferError(TransferReason.TIMEOUT, "the checksums are not there yet")
        if offer.checksums is None:
            raise TransferError(TransferReason.STORE, offer.error)
        return offer.checksums

    def _await_done(self, link: SideChannelLink, offer: LeasedBlocks) -> None:
        while True:
            request = link.receive(REQUESTS, MAX_REQUEST)
            if isinstance(request, Done):
                return
            if not isinstance(request, Renew):
                raise out_of_turn(request)
            self._keep(offer)

    def _keep(self, offer: LeasedBlocks) -> None:
        if not self._book.keep(offer):
            raise TransferError(TransferReason.EXPIRED, "the lease was lost")


def _listen(host: str, port: int) -> socket.socket:
    family, kind, proto, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener
