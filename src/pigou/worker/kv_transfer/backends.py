"""Transport: what a backend must do to move blocks. `shm` and `tcp` do; RDMA (NIXL) could.

A backend has two ends. The sender's end says in `details` what its receiving end needs to know
(a file's name, a memory registration), and in `push` moves bytes itself or leaves that to the
receiver. The receiver's end writes into a `Landing`, which verifies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pigou.request import Ints
from pigou.worker.kv_transfer.receive_buffer import Landing
from pigou.worker.kv_transfer.side_channel_protocol import Grant, Link
from pigou.worker.kv_transfer.transfer_params import Ticket


class BackendUnavailable(Exception):
    """This backend cannot reach the sender after all; another may."""


class Export(Protocol):
    """The sender's end of a backend."""

    @property
    def name(self) -> str:
        """The backend's name, the same at both ends."""
        ...

    def details(self, blocks: Ints) -> dict[str, bytes | int]:
        """What the receiver's end needs to know to have these blocks."""
        ...

    def push(self, link: Link, blocks: Ints, keep: Callable[[], None]) -> None:
        """Send the blocks, if it is this end that moves them.

        Args:
            link: connection to the receiver, after the Grant.
            blocks: device blocks, shape (n,).
            keep: to be called at least once a chunk: renews the lease, or raises when it is lost.
        """
        ...

    def finish(self, details: dict[str, bytes | int]) -> None:
        """Let go of what `details` made for one pull; that has ended, well or not."""
        ...


class Import(Protocol):
    """The receiver's end of a backend."""

    @property
    def name(self) -> str:
        """The backend's name, the same at both ends."""
        ...

    @property
    def needs_confirmation(self) -> bool:
        """Whether blocks count only if the lease is confirmed afterwards (one-sided reads)."""
        ...

    def reaches(self, ticket: Ticket) -> bool:
        """Whether the sender's memory may be within reach."""
        ...

    def fetch(self, link: Link, grant: Grant, landing: Landing, renew: Callable[[], None]) -> None:
        """Fill the landing.

        Args:
            link: connection to the sender, after the Grant.
            grant: what the sender said.
            landing: where the blocks go.
            renew: to be called at least once a chunk where the sender's end does not push.

        Raises:
            BackendUnavailable: nothing was moved; try another.
            TransferError: it ended early; `landing.good` blocks are there.
        """
        ...

    def sweep(self) -> None:
        """Let go of what belongs to senders that are gone; called now and then."""
        ...

    def close(self) -> None:
        """Let go of everything; no pull runs any more."""
        ...
