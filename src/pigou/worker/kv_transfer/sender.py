"""Sender: the prefill side of a transfer."""

from __future__ import annotations

import hmac
import logging
import queue
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pigou.background import Background
from pigou.kv import checksum
from pigou.kv.block import KVLayout
from pigou.kv.checksum import Checksums
from pigou.logs import about
from pigou.request import NEVER, SECOND, Ints
from pigou.worker.kv_transfer.backends import SendBackend, ShmExport, StagedShmExport, TcpExport
from pigou.worker.kv_transfer.block_store import BlockStore, SharedMemory, checksums_in, host_id
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
from pigou.worker.kv_transfer.transfer_params import (
    TransferConfig,
    TransferCounters,
    TransferError,
    TransferParams,
    TransferReason,
    TransferStats,
    signed,
)

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


@dataclass(slots=True)
class _Lease:
    expiry: int
    limit: int


class LeaseClock:
    """Who holds a lease until when, all times in integer nanoseconds.

    A lease ends exactly once: by `end`, or by appearing in the answer of `expire`. It is never
    extended beyond `max_hold` after its grant, and never revived after its expiry.
    """

    def __init__(self, term: int, max_hold: int) -> None:
        self._term = term
        self._max_hold = max_hold
        self._leases: dict[int, _Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def begin(self, key: int, now: int) -> int:
        """Begin a lease and return when it expires.

        Raises:
            ValueError: `key` holds one already.
        """
        if key in self._leases:
            raise ValueError(f"lease {key} is held already")
        expiry = now + min(self._term, self._max_hold)
        self._leases[key] = _Lease(expiry, now + self._max_hold)
        return expiry

    def renew(self, key: int, now: int) -> bool:
        """Extend a lease to a full term from `now`; False when it has ended or is past."""
        lease = self._leases.get(key)
        if lease is None or now >= lease.expiry:
            return False
        lease.expiry = max(lease.expiry, min(now + self._term, lease.limit))
        return True

    def end(self, key: int) -> bool:
        """End a lease; whether it was this call that did."""
        return self._leases.pop(key, None) is not None

    def expire(self, now: int) -> list[int]:
        """End the leases that are past, and return their keys, oldest grant first."""
        past = [key for key, lease in self._leases.items() if now >= lease.expiry]
        for key in past:
            del self._leases[key]
        return past

    def next_expiry(self) -> int:
        """When the next lease expires; NEVER when there is none."""
        return min((lease.expiry for lease in self._leases.values()), default=NEVER)


@dataclass(eq=False, slots=True)
class LeasedBlocks:
    """Blocks of one request that a receiver may take."""

    number: int
    request: str  # id of the request
    blocks: Ints  # device blocks in prompt order, shape (n,)
    tokens: int  # tokens whose KV is in them
    last_hash: str = ""  # of the prompt's block that is the last of them; empty where nobody said
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    # of the blocks, valid once `ready` is set and `error` is empty.
    checksums: Checksums | None = None
    error: str = ""  # why there are no checksums
    # set when the checksums are there, or never will be.
    ready: threading.Event = field(default_factory=threading.Event)


class LeaseTable:
    """Offers by request id; every offer is released exactly once, by one call of `on_release`."""

    def __init__(self, lease: int, max_hold: int, on_release: Callable[[str], None]) -> None:
        """Begin with no offers.

        Args:
            lease: term of a lease, in nanoseconds.
            max_hold: longest life of an offer, in nanoseconds.
            on_release: called with the request's id, from any thread, when its blocks are free.
        """
        self._leases = LeaseClock(lease, max_hold)
        self._offers: dict[str, LeasedBlocks] = {}
        self._numbers: dict[int, LeasedBlocks] = {}
        self._next = 0
        self._sleeps_until = 0
        self._on_release = on_release
        self._change = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        with self._change:
            return len(self._offers)

    def add(self, request: str, blocks: Ints, tokens: int, last_hash: str = "") -> LeasedBlocks:
        """Begin an offer.

        Raises:
            ValueError: the request has an offer already.
            TransferError: CLOSED.
        """
        with self._change:
            if self._closed:
                raise TransferError(TransferReason.CLOSED, "the sender is closed")
            if request in self._offers:
                raise ValueError(f"request {request!r} is offered already")
            offer = LeasedBlocks(self._next, request, blocks, tokens, last_hash)
            self._next += 1
            expiry = self._leases.begin(offer.number, time.monotonic_ns())
            self._offers[request] = self._numbers[offer.number] = offer
            if expiry < self._sleeps_until:
                self._change.notify()
            return offer

    def find(self, request: str, secret: str) -> LeasedBlocks:
        """Return an offer that is still held, its lease renewed.

        Raises:
            TransferError: UNKNOWN, when there is none or the secret is not its own.
        """
        with self._change:
            offer = self._offers.get(request)
        known = offer is not None and hmac.compare_digest(offer.secret.encode(), secret.encode())
        if offer is None or not known or not self.keep(offer):
            raise TransferError(
                TransferReason.UNKNOWN, "no such offer: taken, expired or never made"
            )
        return offer

    def keep(self, offer: LeasedBlocks) -> bool:
        """Renew the offer's lease; False when it was lost, and its bytes mean nothing any more."""
        with self._change:
            return self._leases.renew(offer.number, time.monotonic_ns())

    def finish(self, offer: LeasedBlocks) -> bool:
        """Release the offer's blocks; whether they were held until now."""
        with self._change:
            held = self._leases.renew(offer.number, time.monotonic_ns())
            ended = self._leases.end(offer.number)
            if ended:
                self._forget(offer)
        if ended:
            self._released(offer)
        return held

    def release(self, request: str) -> bool:
        """Release the blocks of a request, if they are held; whether it was this call that did."""
        with self._change:
            offer = self._offers.get(request)
            if offer is None or not self._leases.end(offer.number):
                return False
            self._forget(offer)
        self._released(offer)
        return True

    def reap(self) -> None:
        """Release what expires, as it expires; returns after `close`."""
        while True:
            with self._change:
                if self._closed:
                    return
                now = time.monotonic_ns()
                past = [self._numbers[number] for number in self._leases.expire(now)]
                for offer in past:
                    self._forget(offer)
                if not past:
                    self._sleeps_until = expiry = self._leases.next_expiry()
                    self._change.wait(None if expiry == NEVER else (expiry - now) / SECOND)
                    self._sleeps_until = 0  # awake: it looks before it sleeps again
            for offer in past:
                words = "blocks of request %s expired before they were taken"
                log.warning(words, offer.request, extra=about(offer.request))
                self._released(offer)

    def close(self) -> None:
        """Release every offer, take no more, and let `reap` return."""
        with self._change:
            self._closed = True
            left = [offer for offer in self._offers.values() if self._leases.end(offer.number)]
            for offer in left:
                self._forget(offer)
            self._change.notify_all()
        for offer in left:
            self._released(offer)

    def _forget(self, offer: LeasedBlocks) -> None:
        del self._offers[offer.request], self._numbers[offer.number]

    def _released(self, offer: LeasedBlocks) -> None:
        try:
            self._on_release(offer.request)
        except Exception:
            log.exception(
                "on_release failed for request %s", offer.request, extra=about(offer.request)
            )


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
