"""LinkPool: connections to senders, kept for the next pull."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from pigou.request import SECOND
from pigou.worker.kv_transfer.auth import prove_as_receiver
from pigou.worker.kv_transfer.result import Reason, TransferError
from pigou.worker.kv_transfer.side_channel_protocol import Link

Address: TypeAlias = tuple[str, int]


class LinkPool:
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
        self._lent: set[Link] = set()
        self._idle: dict[Address, list[tuple[int, Link]]] = {}
        self.closed = False

    @contextmanager
    def link(self, address: Address, fresh: bool = False) -> Iterator[tuple[Link, bool]]:
        """Lend a connection, and tell whether it was used before (and may have been closed).

        Args:
            address: host and port.
            fresh: take none that was used before.

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
                self._lent.discard(link)
            link.close()
            raise
        self._give_back(address, link)

    def sweep(self) -> None:
        """Close the connections that were idle for long."""
        past = time.monotonic_ns() - self._timeout // 2
        with self._lock:
            old = [link for kept in self._idle.values() for since, link in kept if since < past]
            young = {
                address: [(since, link) for since, link in kept if since >= past]
                for address, kept in self._idle.items()
            }
            self._idle = {address: kept for address, kept in young.items() if kept}
        for link in old:
            link.close()

    def close(self) -> None:
        """Cut every connection, and open no more."""
        with self._lock:
            self.closed = True
            links = [*self._lent, *(link for kept in self._idle.values() for _, link in kept)]
            self._idle.clear()
        for link in links:
            link.close()

    def _take(self, address: Address) -> Link | None:
        self.sweep()
        with self._lock:
            kept = self._idle.get(address)
            if not kept:
                return None
            _, link = kept.pop()
            self._lent.add(link)
            return link

    def _give_back(self, address: Address, link: Link) -> None:
        with self._lock:
            self._lent.discard(link)
            if not self.closed:
                self._idle.setdefault(address, []).append((time.monotonic_ns(), link))
                return
        link.close()

    def _connect(self, address: Address) -> Link:
        try:
            sock = socket.create_connection(address, self._timeout / SECOND)
        except (OSError, UnicodeError) as error:
            where = f"{address[0]}:{address[1]}"
            raise TransferError(Reason.UNREACHABLE, f"{where}: {error}") from error
        link = Link(sock, self._timeout)
        with self._lock:
            if not self.closed:
                self._lent.add(link)
                return link
        link.close()
        raise TransferError(Reason.CLOSED, "the receiver was closed")
