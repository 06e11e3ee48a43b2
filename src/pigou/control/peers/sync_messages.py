"""What gateways of one fleet send one another."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from pigou.control.peers.bookings import PredictedPrompt, TenantService, WorkerBookings


class PeerState(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="state"):
    """What changed at a gateway since its message before, or all of it (`snapshot`)."""

    gateway: str
    seq: int  # number of the message, from 1; a snapshot has that of the last one before
    # what it has on workers; in a snapshot, those that are left out have nothing.
    workers: tuple[WorkerBookings, ...] = ()
    tenants: tuple[TenantService, ...] = ()  # what it did for tenants, and has of them
    prompts: tuple[PredictedPrompt, ...] = ()
    # last message of each other gateway, by name, and nanoseconds since that came.
    heard: dict[str, tuple[int, int]] = {}
    snapshot: bool = False  # whether it has all of its state
    leaves: bool = False  # whether it is the last


class ResendRequest(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="ask"):
    """A gateway asks another for messages that it missed, or for a snapshot.

    Attributes:
        first, last: numbers of the messages; 0 for a snapshot.
    """

    gateway: str
    to: str = ""
    first: int = 0
    last: int = 0


SyncMessage: TypeAlias = PeerState | ResendRequest
