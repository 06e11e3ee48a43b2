"""Connects the engine thread to KV transfers with other workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pigou.engine.plan import Load
from pigou.request import Ints
from pigou.worker.engine_thread.commands import Loaded
from pigou.worker.engine_thread.mock_worker import SimulatedLink
from pigou.worker.kv_transfer.receiver import Pull, Receiver
from pigou.worker.kv_transfer.sender import Sender
from pigou.worker.kv_transfer.transfer_params import TransferError, TransferResult


class Transfers:
    """Moves blocks between workers; called from the engine thread. By itself it moves none."""

    def __init__(self, put: Callable[[Loaded], None]) -> None:
        self._put = put

    def begin(self, load: Load, ticket: dict[str, Any]) -> None:  # noqa: ARG002
        """Fill a load's blocks, and send a `Loaded` command; without blocks, decline the offer."""
        if len(load.blocks):
            self._put(Loaded(load.request, 0, 0, 0))

    def decline(self, ticket: dict[str, Any]) -> None:
        """Tell the sender of a ticket that its blocks are not needed."""

    def cancel(self, request: str) -> None:
        """Cancel a request's load; its `Loaded` still follows."""

    def done(self, request: str) -> None:
        """Forget a load that was answered."""

    def offer(
        self,
        request: str,  # noqa: ARG002
        blocks: Ints,  # noqa: ARG002
        block_size: int,  # noqa: ARG002
        last_hash: str,  # noqa: ARG002
    ) -> dict[str, Any] | None:
        """Hold full blocks for another worker; return the ticket, None on failure."""
        return None

    def end_offer(self, request: str) -> None:
        """End an offer; sends a `Release` command if it was still held."""

    def close(self) -> None:
        """End all transfers."""


class KVTransfers(Transfers):
    """Transfers by a Sender and a Receiver."""

    def __init__(
        self, sender: Sender, receiver: Receiver, put: Callable[[Loaded], None],
        link: SimulatedLink | None = None,
    ) -> None:  # fmt: skip
        super().__init__(put)
        self._sender = sender
        self._receiver = receiver
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
        """Tell the sender of a ticket that its blocks are not needed."""
        self._receiver.decline(ticket)

    def cancel(self, request: str) -> None:
        """Cancel a request's pull."""
        if (pull := self._pulls.get(request)) is not None:
            pull.cancel()

    def done(self, request: str) -> None:
        """Forget a finished pull."""
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
            return None  # the sender is closing; the caller frees the blocks

    def end_offer(self, request: str) -> None:
        """End an offer."""
        self._sender.release(request)

    def close(self) -> None:
        """End all transfers."""
        if self._link is not None:
            self._link.close()
        self._receiver.close()
        self._sender.close()
