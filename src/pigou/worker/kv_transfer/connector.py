"""Blocks that come from other workers, and blocks that are kept for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from pigou.engine.plan import Load
from pigou.request import Ints
from pigou.worker.engine_thread.commands import Loaded
from pigou.worker.engine_thread.mock_worker import SimulatedLink
from pigou.worker.kv_transfer.receiver import Pull, Receiver
from pigou.worker.kv_transfer.sender import Sender
from pigou.worker.kv_transfer.transfer_params import TransferError, TransferResult


class Transfers(Protocol):
    """Moves blocks between workers; called from the engine thread."""

    def begin(self, load: Load, ticket: dict[str, Any]) -> None:
        """Fill a load's blocks; a `Loaded` command follows. Without blocks, decline the offer."""

    def decline(self, ticket: dict[str, Any]) -> None:
        """Tell the other worker that its blocks are not wanted."""

    def cancel(self, request: str) -> None:
        """End a request's load early; its `Loaded` follows all the same."""

    def done(self, request: str) -> None:
        """Note that a request's load was answered."""

    def offer(
        self, request: str, blocks: Ints, block_size: int, last_hash: str
    ) -> dict[str, Any] | None:
        """Keep blocks for another worker; return the ticket, or None where that fails.

        `last_hash` is that of the last of them, as tickets write it.
        """

    def end_offer(self, request: str) -> None:
        """End an offer; a `Release` command follows if it still stood."""


class NoTransfers:
    """A worker that exchanges no blocks: every load fails at once, nothing is offered."""

    def __init__(self, put: Callable[[Loaded], None]) -> None:
        self._put = put

    def begin(self, load: Load, ticket: dict[str, Any]) -> None:  # noqa: ARG002
        """Answer that nothing came."""
        if len(load.blocks):
            self._put(Loaded(load.request, 0, 0, 0))

    def decline(self, ticket: dict[str, Any]) -> None:
        """Do nothing: there is nobody to tell."""

    def cancel(self, request: str) -> None:
        """Do nothing: no load is under way."""

    def done(self, request: str) -> None:
        """Do nothing: no load is under way."""

    def offer(self, *_: object) -> None:
        """Offer nothing."""

    def end_offer(self, request: str) -> None:
        """Do nothing: nothing is offered."""


class KVTransfers:
    """Transfers over a Sender and a Receiver."""

    def __init__(
        self,
        sender: Sender,
        receiver: Receiver,
        put: Callable[[Loaded], None],
        link: SimulatedLink | None = None,
    ) -> None:
        self._sender = sender
        self._receiver = receiver
        self._put = put
        self._link = link
        self._pulls: dict[str, Pull] = {}

    def begin(self, load: Load, ticket: dict[str, Any]) -> None:
        """Pull a load's blocks."""
        if not len(load.blocks):
            self._receiver.decline(ticket)
            return
        request, link = load.request, self._link
        arrival_ns = 0 if link is None else link.send(len(load.blocks), time.monotonic_ns())

        def done(outcome: TransferResult) -> None:
            loaded = Loaded(request, outcome.tokens, outcome.blocks, outcome.bytes)
            if link is None or not outcome.tokens:
                self._put(loaded)
            else:
                link.at(arrival_ns, lambda: self._put(loaded))

        self._pulls[request] = self._receiver.pull(ticket, load.first, load.blocks, done)

    def decline(self, ticket: dict[str, Any]) -> None:
        """Tell the sender of a ticket that its blocks are not wanted."""
        self._receiver.decline(ticket)

    def cancel(self, request: str) -> None:
        """End a request's pull early."""
        if (pull := self._pulls.get(request)) is not None:
            pull.cancel()

    def done(self, request: str) -> None:
        """Forget a pull that has ended."""
        self._pulls.pop(request, None)

    def offer(
        self, request: str, blocks: Ints, block_size: int, last_hash: str
    ) -> dict[str, Any] | None:
        """Offer full blocks."""
        if not len(blocks):
            return None
        try:
            tokens = len(blocks) * block_size
            return self._sender.offer(request, np.asarray(blocks), tokens, last_hash)
        except TransferError:
            return None  # the sender is closing: the caller frees the blocks

    def end_offer(self, request: str) -> None:
        """End an offer."""
        self._sender.release(request)

    def close(self) -> None:
        """End all transfers."""
        if self._link is not None:
            self._link.close()
        self._receiver.close()
        self._sender.close()
