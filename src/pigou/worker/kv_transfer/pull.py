"""Puller: one pull from its ticket to its outcome."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from pigou.logs import about
from pigou.request import SECOND, Ints
from pigou.worker.kv_transfer.backends import BackendUnavailable, ReceiveBackend
from pigou.worker.kv_transfer.block_store import BlockStore
from pigou.worker.kv_transfer.path_times import PathTimes
from pigou.worker.kv_transfer.receive_buffer import ReceiveBuffer
from pigou.worker.kv_transfer.result import TransferError, TransferReason, TransferResult
from pigou.worker.kv_transfer.side_channel_protocol import (
    Confirm,
    Decline,
    Done,
    GrantFrame,
    Open,
    Renew,
    SideChannelLink,
    expect,
    prove_as_receiver,
)
from pigou.worker.kv_transfer.transfer_config import TransferConfig
from pigou.worker.kv_transfer.transfer_params import TransferParams

log = logging.getLogger(__name__)

#: Bytes of a grant besides its blocks: NIXL's metadata grow with the network devices.
_MAX_GRANT = 32 << 10
#: Failures of a path, not of what was asked for.
_PATH_FAILURES = {TransferReason.CUT, TransferReason.TIMEOUT}
#: Failures after which the sender is there, and is told to free the blocks.
_TELL = {
    TransferReason.LAYOUT,
    TransferReason.BAD_PARAMS,
    TransferReason.CORRUPT,
    TransferReason.CANCELLED,
    TransferReason.STORE,
    TransferReason.PROTOCOL,
}


class Puller:
    """Runs pulls for the threads of a Receiver; keeps the open connections, to cut at `close`."""

    def __init__(
        self,
        store: BlockStore,
        imports: Sequence[ReceiveBackend],
        config: TransferConfig,
        key: bytes = b"",
    ) -> None:
        self._store = store
        self._imports = imports
        self._links = ConnectionPool(config.timeout, key)
        self._fingerprint = store.layout.fingerprint()
        self._paths, self._lock = PathTimes(), threading.Lock()

    def pull(
        self, ticket: TransferParams, first: int, dest: Ints, cancelled: Callable[[], bool]
    ) -> TransferResult:
        """Pull blocks `first` to `first + len(dest)`, and say how it ended; raises nothing."""
        began = time.monotonic()
        run = _Run(ticket, first, dest, cancelled)
        try:
            self._check(run)
            self._by_any_backend(run)
            reason, detail = TransferReason.OK, ""
        except TransferError as error:
            reason, detail = self._early(run, error)
        except Exception as error:
            request = ticket.remote_request_id
            log.exception("pull of request %s failed", request, extra=about(request))
            reason, detail = self._early(run, TransferError(TransferReason.STORE, repr(error)))
        blocks = run.blocks
        tokens = min(ticket.remote_num_tokens, (first + blocks) * ticket.remote_block_size)
        return TransferResult(
            request=ticket.remote_request_id,
            blocks=blocks,
            tokens=max(0, tokens - first * ticket.remote_block_size) if blocks else 0,
            reason=TransferReason.CLOSED
            if self._links.closed and reason is not TransferReason.OK
            else reason,
            detail=detail,
            backend=run.backend,
            bytes=blocks * self._store.layout.block_bytes,
            seconds=time.monotonic() - began,
        )

    def decline(self, ticket: TransferParams) -> bool:
        """Tell the sender to free the blocks; whether they were held until then.

        Raises:
            TransferError: it could not be told, or holds them no more.
        """
        with self._links.link(ticket.address, fresh=True) as (link, _):
            link.send(
                Decline(ticket.remote_engine_id, ticket.remote_request_id, ticket.remote_secret)
            )
            return expect(link, Confirm).held

    def close(self) -> None:
        """Cut every connection, and open no more."""
        self._links.close()

    def sweep(self) -> None:
        """Let go of what is not used any more; called now and then."""
        self._links.sweep()
        for backend in self._imports:
            backend.sweep()

    def _check(self, run: _Run) -> None:
        layout, ticket = self._store.layout, run.ticket
        if ticket.remote_layout != self._fingerprint:
            raise TransferError(
                TransferReason.LAYOUT,
                f"the offered blocks have the layout {ticket.remote_layout}; here it is "
                f"{self._fingerprint} ({layout}): both workers must serve the same model "
                "with the same dtype and block size",
            )
        if run.first + len(run.dest) > ticket.blocks:
            raise TransferError(
                TransferReason.BAD_PARAMS,
                f"blocks {run.first} to {run.first + len(run.dest)} are wanted; "
                f"{ticket.blocks} are offered",
            )

    def _by_any_backend(self, run: _Run) -> None:
        ticket, host = run.ticket, run.ticket.remote_host_id
        detail = f"the sender offers {ticket.remote_backends}"
        backends = {
            backend.name: backend
            for backend in self._imports
            if backend.name in ticket.remote_backends and backend.reaches(ticket)
        }
        size = len(run.dest) * self._store.layout.block_bytes
        with self._lock:
            order = self._paths.order(host, list(backends), size)
        for name in order:
            began = time.monotonic()
            try:
                self._by(backends[name], run)
            except BackendUnavailable as error:
                detail = f"{name}: {error}"
                log.warning("pull by %s is not possible: %s", name, str(error))
                with self._lock:
                    self._paths.fail(host, name)
                continue
            except TransferError as error:
                if error.reason in _PATH_FAILURES and run.backend == name:
                    with self._lock:
                        self._paths.fail(host, name)
                raise
            with self._lock:
                first = self._paths.add(host, name, size, time.monotonic() - began)
            if first:
                log.info("KV blocks come from %s:%s by %s", *ticket.address, name)
            return
        raise TransferError(TransferReason.UNREACHABLE, f"no backend reaches the sender; {detail}")

    def _by(self, backend: ReceiveBackend, run: _Run) -> None:
        used = False
        try:
            with self._links.link(run.ticket.address) as (link, used):
                self._over(link, backend, run)
        except TransferError as error:
            if not used or run.landing is not None or error.reason is not TransferReason.CUT:
                raise
            with self._links.link(run.ticket.address, fresh=True) as (link, _):
                self._over(link, backend, run)

    def _over(self, link: SideChannelLink, backend: ReceiveBackend, run: _Run) -> None:
        granted = self._open(link, backend.name, run)
        run.backend, run.needs_confirmation = backend.name, backend.needs_confirmation
        run.landing = ReceiveBuffer(self._store, run.dest, run.cancelled)
        backend.fetch(link, granted, run.landing, _Renewal(link, granted.patience))
        link.send(Done(run.landing.good))
        run.confirmed = expect(link, Confirm).held
        if not run.confirmed:
            raise TransferError(TransferReason.EXPIRED, "the lease was lost during the pull")

    def _open(self, link: SideChannelLink, backend: str, run: _Run) -> GrantFrame:
        ticket, count = run.ticket, len(run.dest)
        link.send(
            Open(
                engine=ticket.remote_engine_id,
                request=ticket.remote_request_id,
                secret=ticket.remote_secret,
                layout=self._fingerprint,
                last_hash=ticket.remote_last_hash,
                first=run.first,
                count=count,
                backend=backend,
            )
        )
        return expect(link, GrantFrame, _MAX_GRANT + 16 * count)

    def _early(self, run: _Run, error: TransferError) -> tuple[TransferReason, str]:
        """End a pull that failed: free the sender's blocks, so that no lease has to run out."""
        if error.reason in _TELL and not self._links.closed:
            try:
                run.confirmed = self.decline(run.ticket)
            except TransferError as failure:
                log.info("the sender could not be told: %s", str(failure))
        return error.reason, error.detail


class _Run:
    """What is known of a pull while it runs."""

    def __init__(
        self, ticket: TransferParams, first: int, dest: Ints, cancelled: Callable[[], bool]
    ) -> None:
        self.ticket = ticket
        self.first = first
        self.dest = dest
        self.cancelled = cancelled
        self.backend = ""
        self.needs_confirmation = False
        self.confirmed = False
        self.landing: ReceiveBuffer | None = None

    @property
    def blocks(self) -> int:
        """Leading blocks that may be used."""
        if self.landing is None or (self.needs_confirmation and not self.confirmed):
            return 0
        return self.landing.good


class _Renewal:
    """Sends a sign of life when a quarter of the sender's patience is over."""

    def __init__(self, link: SideChannelLink, patience: float) -> None:
        self._link = link
        self._every = patience / 4
        self._last = time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._last >= self._every:
            self._link.send(Renew())
            self._last = now


Address: TypeAlias = tuple[str, int]


class ConnectionPool:
    """Lends connections; one that went well is kept for a while, any other is closed."""

    def __init__(self, timeout: int, key: bytes = b"") -> None:
        """Begin with none.

        Args:
            timeout: nanoseconds that bound each wait, and half of them idleness.
            key: that both ends of each connection must prove to know; empty asks for no proof.
        """
        self._key = key
        self._timeout = timeout
        self._lock = threading.Lock()
        self._in_use: set[SideChannelLink] = set()
        self._idle: dict[Address, list[tuple[int, SideChannelLink]]] = {}
        self.closed = False

    @contextmanager
    def link(self, address: Address, fresh: bool = False) -> Iterator[tuple[SideChannelLink, bool]]:
        """Lend a connection, and tell whether it was used before (and may have been closed).

        Raises:
            TransferError: UNREACHABLE, or CLOSED.
        """
        link = None if fresh else self._take(address)
        used = link is not None
        if link is None:
            link = self._connect(address)
        try:
            if self._key and not used:
                prove_as_receiver(link, self._key)
            yield link, used
        except BaseException:
            with self._lock:
                self._in_use.discard(link)
            link.close()
            raise
        self._give_back(address, link)

    def sweep(self) -> None:
        """Close the connections that were idle for long."""
        past = time.monotonic_ns() - self._timeout // 2
        with self._lock:
            old = [link for idle in self._idle.values() for since, link in idle if since < past]
            young = {
                address: [(since, link) for since, link in idle if since >= past]
                for address, idle in self._idle.items()
            }
            self._idle = {address: idle for address, idle in young.items() if idle}
        for link in old:
            link.close()

    def close(self) -> None:
        """Cut every connection, and open no more."""
        with self._lock:
            self.closed = True
            links = [*self._in_use, *(link for idle in self._idle.values() for _, link in idle)]
            self._idle.clear()
        for link in links:
            link.close()

    def _take(self, address: Address) -> SideChannelLink | None:
        self.sweep()
        with self._lock:
            idle = self._idle.get(address)
            if not idle:
                return None
            _, link = idle.pop()
            self._in_use.add(link)
            return link

    def _give_back(self, address: Address, link: SideChannelLink) -> None:
        with self._lock:
            self._in_use.discard(link)
            if not self.closed:
                self._idle.setdefault(address, []).append((time.monotonic_ns(), link))
                return
        link.close()

    def _connect(self, address: Address) -> SideChannelLink:
        try:
            sock = socket.create_connection(address, self._timeout / SECOND)
        except (OSError, UnicodeError) as error:
            where = f"{address[0]}:{address[1]}"
            raise TransferError(TransferReason.UNREACHABLE, f"{where}: {error}") from error
        link = SideChannelLink(sock, self._timeout)
        with self._lock:
            if not self.closed:
                self._in_use.add(link)
                return link
        link.close()
        raise TransferError(TransferReason.CLOSED, "the receiver was closed")
