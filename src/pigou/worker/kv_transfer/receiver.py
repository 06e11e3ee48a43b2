"""Receiver: the decode side of a transfer."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from pigou.background import Background
from pigou.kv import checksum
from pigou.logs import about
from pigou.request import Ints
from pigou.worker.kv_transfer.backends import ReceiveBackend, ShmImport
from pigou.worker.kv_transfer.block_store import BlockStore
from pigou.worker.kv_transfer.pull import Puller
from pigou.worker.kv_transfer.result import (
    TransferCounters,
    TransferError,
    TransferReason,
    TransferResult,
    TransferStats,
)
from pigou.worker.kv_transfer.tcp import TcpImport
from pigou.worker.kv_transfer.transfer_config import TransferConfig
from pigou.worker.kv_transfer.transfer_params import read_transfer_params

log = logging.getLogger(__name__)

OnDone: TypeAlias = Callable[[TransferResult], None]
#: Seconds after which an idle thread lets go of what belongs to dead senders.
_SWEEP = 5.0


@dataclass(eq=False, slots=True)
class Pull:
    """A pull that was asked for."""

    params: object
    first: int
    dest: Ints
    done: OnDone | None
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Ask it to end early; `done` is still called, and the blocks are not free before."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """Whether it was asked to end early."""
        return self._cancelled.is_set()


class Receiver:
    """Pulls blocks that other workers offer, on threads of its own."""

    def __init__(
        self,
        store: BlockStore,
        config: TransferConfig | None = None,
        background: Background | None = None,
        key: bytes = b"",
    ) -> None:
        """Start the threads.

        Args:
            key: of the fleet, by which tickets and senders are known; empty trusts all.

        Raises:
            ConfigError: a backend's library is not installed.
        """
        self._key = key
        checksum.warm_up()
        self._config = config or TransferConfig()
        self._store = store
        self._counters = TransferCounters()
        self._imports = [self._import(name) for name in self._config.backends]
        self._puller = Puller(store, self._imports, self._config, key)
        self._wake = threading.Condition()
        self._waiting: deque[Pull] = deque()
        self._closed = False
        background = background or Background()
        self._threads = [
            background.thread(f"kv-pull-{i}", self._run) for i in range(self._config.threads)
        ]
        for thread in self._threads:
            thread.start()

    def pull(self, params: object, first: int, dest: Ints, done: OnDone) -> Pull:
        """Pull blocks `first` to `first + len(dest)` of an offer into the blocks `dest`.

        Args:
            dest: device blocks to fill, in order, shape (n,). Until `done` is called they belong
                to the receiver, and hold garbage beyond `Outcome.blocks` afterwards.
            done: called exactly once, from a thread of the receiver; or from this call when too
                many pulls wait (BUSY) or the receiver is closed.

        Raises:
            ValueError: a destination block does not exist.
        """
        self._check(first, dest)
        pull = Pull(params, first, dest.copy(), done)
        with self._wake:
            full = sum(p.done is not None for p in self._waiting) >= self._config.max_pending
            refused = (
                TransferReason.CLOSED if self._closed else TransferReason.BUSY if full else None
            )
            if refused is None:
                self._waiting.append(pull)
                self._wake.notify()
        if refused is not None:
            self._finish(pull, TransferResult("", 0, 0, refused, "the pull was not begun"))
        if refused is TransferReason.BUSY:
            self.decline(params)
        return pull

    def decline(self, params: object) -> None:
        """Tell the sender, in the background, that its blocks are not wanted."""
        with self._wake:
            if not self._closed:
                self._waiting.append(Pull(params, 0, np.empty(0, dtype=np.int32), None))
                self._wake.notify()

    @property
    def pending(self) -> int:
        """Pulls and refusals that wait for a thread."""
        with self._wake:
            return len(self._waiting)

    def stats(self) -> TransferStats:
        """Counters of what was pulled."""
        return self._counters.stats()

    def close(self) -> None:
        """End every pull (CLOSED) and thread. The store may go then."""
        with self._wake:
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
            self._wake.notify_all()
        self._puller.close()
        for thread in self._threads:
            thread.join()
        for backend in self._imports:
            backend.close()
        for pull in left:
            self._finish(
                pull, TransferResult("", 0, 0, TransferReason.CLOSED, "the receiver was closed")
            )

    def _import(self, name: str) -> ReceiveBackend:
        if name == "nixl":
            from pigou.worker.kv_transfer.nixl import NixlImport

            return NixlImport(self._store, self._config.timeout)
        return ShmImport(self._config.copy_threads) if name == "shm" else TcpImport()

    def _check(self, first: int, dest: Ints) -> None:
        rows = self._store.as_bytes()
        if first < 0 or (dest.size and dest.min() < 0):
            raise ValueError("first and every destination block must be at least 0")
        if rows is not None and dest.size and dest.max() >= len(rows):
            raise ValueError(f"destination block {dest.max()} does not exist; {len(rows)} do")

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._waiting and not self._closed:
                    if not self._wake.wait(_SWEEP):
                        self._puller.sweep()
                if self._closed:
                    return
                pull = self._waiting.popleft()
            if pull.done is None:
                self._decline(pull)
            else:
                self._finish(pull, self._pull(pull))

    def _pull(self, pull: Pull) -> TransferResult:
        try:
            ticket = read_transfer_params(pull.params, self._key)
        except TransferError as error:
            return TransferResult("", 0, 0, error.reason, error.detail)
        try:
            return self._puller.pull(ticket, pull.first, pull.dest, lambda: pull.cancelled)
        except Exception as error:  # the caller that waits for the blocks must be answered
            request = ticket.remote_request_id
            log.exception("a pull of request %s failed", request, extra=about(request))
            return TransferResult(ticket.remote_request_id, 0, 0, TransferReason.STORE, repr(error))

    def _decline(self, pull: Pull) -> None:
        try:
            self._puller.decline(read_transfer_params(pull.params, self._key))
        except TransferError as error:
            log.info("an offer could not be declined, and will expire: %s", str(error))
        except Exception:
            log.exception("an offer could not be declined, and will expire")

    def _finish(self, pull: Pull, outcome: TransferResult) -> None:
        if outcome.reason is not TransferReason.OK:
            log.warning("pull of request %s: %s %s", *_words(outcome), extra=about(outcome.request))
        if pull.done is None:
            return
        self._counters.add(outcome.blocks, outcome.bytes, outcome.seconds, outcome.reason)
        try:
            pull.done(outcome)
        except Exception:
            log.exception(
                "done failed for request %s", outcome.request, extra=about(outcome.request)
            )


def _words(outcome: TransferResult) -> tuple[str, str, str]:
    return outcome.request or "(unknown)", outcome.reason, outcome.detail
