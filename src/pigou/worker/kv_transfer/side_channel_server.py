"""SideChannel: answers receivers, one thread a connection, every wait and every frame bounded."""

from __future__ import annotations

import hmac
import logging
import socket
import threading
import time
from collections.abc import Mapping

from pigou.background import Background
from pigou.kv import checksum
from pigou.kv.block import KVLayout
from pigou.request import SECOND
from pigou.worker.kv_transfer.backends import SendBackend
from pigou.worker.kv_transfer.lease import LeasedBlocks, LeaseTable
from pigou.worker.kv_transfer.result import TransferCounters, TransferError, TransferReason
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
    prove_as_sender,
)
from pigou.worker.kv_transfer.transfer_config import TransferConfig

log = logging.getLogger(__name__)


class SideChannel:
    """The listening end of a Sender."""

    def __init__(
        self,
        config: TransferConfig,
        *,
        engine: str,
        layout: KVLayout,
        book: LeaseTable,
        exports: Mapping[str, SendBackend],
        counters: TransferCounters,
        background: Background,
        key: bytes = b"",
    ) -> None:
        """Bind and begin to answer; where there is a `key`, those who prove that they know it.

        Raises:
            OSError: the address cannot be bound.
        """
        self._config = config
        self._engine = engine
        self._layout = layout
        self._fingerprint = layout.fingerprint()
        self._book = book
        self._exports = exports
        self._counters = counters
        self._key = key
        self._lock = threading.Lock()
        self._links: dict[SideChannelLink, threading.Thread] = {}
        self._closed = False
        self._listener = _listen(config.host, config.port)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = background.thread("kv-accept", self._accept)
        self._acceptor.start()

    def close(self) -> None:
        """End every conversation and every thread."""
        with self._lock:
            self._closed = True
            links = dict(self._links)
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`, which `close` does not
        except OSError:
            log.debug("the listener was down already")
        self._listener.close()
        for link in links:
            link.close()
        for thread in [self._acceptor, *links.values()]:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                log.warning("cannot accept a receiver: %s", str(error))
                time.sleep(0.05)  # out of file descriptors, mostly: let others end
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
        self._counters.add(0, 0, 0.0, error.reason)
        if error.reason in (TransferReason.CUT, TransferReason.TIMEOUT):
            return
        try:
            link.send(Refuse(error.reason, error.detail))
        except TransferError as failure:
            log.debug("the refusal did not arrive: %s", str(failure))

    def _next(self, link: SideChannelLink) -> Request | None:
        try:
            return link.receive(REQUESTS, MAX_REQUEST)
        except TransferError as error:
            if error.reason in (TransferReason.CUT, TransferReason.TIMEOUT):
                return None
            raise

    def _answer(self, link: SideChannelLink, request: Request) -> None:
        if isinstance(request, Hello):
            raise TransferError(
                TransferReason.UNPROVEN,
                "this sender has no fleet secret; start it with the receiver's",
            )
        if not isinstance(request, Open | Decline):
            raise TransferError(TransferReason.PROTOCOL, f"{type(request).__name__} out of turn")
        if request.engine != self._engine:
            raise TransferError(TransferReason.UNKNOWN, "another engine: this sender was restarted")
        offer = self._book.find(request.request, request.secret)
        if isinstance(request, Decline):
            link.send(Confirm(self._book.finish(offer)))
            return
        self._give(link, request, offer)

    def _give(self, link: SideChannelLink, request: Open, offer: LeasedBlocks) -> None:
        began = time.monotonic()
        export = self._check(request, offer)
        span = slice(request.first, request.first + request.count)
        blocks = offer.blocks[span]
        patience = min(self._config.timeout, self._config.lease) / SECOND
        details = export.details(blocks)
        try:
            link.send(GrantFrame(details, patience))
            link.send(ChecksumsFrame(self._checksums(offer)[span].astype("<u8").tobytes()))
            export.push(link, blocks, lambda: self._keep(offer))
            done = self._await_done(link, offer)
        finally:
            export.finish(details)
        taken = min(max(done.blocks, 0), len(blocks))
        held = self._book.finish(offer)
        self._counters.add(
            taken,
            taken * self._layout.block_bytes,
            time.monotonic() - began,
            TransferReason.OK if held else TransferReason.EXPIRED,
        )
        link.send(Confirm(held))

    def _check(self, request: Open, offer: LeasedBlocks) -> SendBackend:
        if request.layout != self._fingerprint:
            raise TransferError(
                TransferReason.LAYOUT, f"the sender's blocks are {self._layout}; yours are not"
            )
        if not hmac.compare_digest(request.last_hash.encode(), offer.last_hash.encode()):
            raise TransferError(
                TransferReason.OTHER_PROMPT,
                "the offered blocks are of another prompt than the ticket says",
            )
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
            raise TransferError(
                TransferReason.BAD_PARAMS,
                f"no backend {request.backend!r}; this sender has {known}",
            )
        return export

    def _checksums(self, offer: LeasedBlocks) -> checksum.Checksums:
        if not offer.ready.wait(self._config.timeout / SECOND):
            raise TransferError(TransferReason.TIMEOUT, "the checksums are not there yet")
        if offer.checksums is None:
            raise TransferError(TransferReason.STORE, offer.error)
        return offer.checksums

    def _await_done(self, link: SideChannelLink, offer: LeasedBlocks) -> Done:
        while True:
            request = link.receive(REQUESTS, MAX_REQUEST)
            if isinstance(request, Done):
                return request
            if not isinstance(request, Renew):
                raise TransferError(
                    TransferReason.PROTOCOL, f"{type(request).__name__} out of turn"
                )
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
