"""What gateways of one fleet send one another."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from pigou.control.peers.bookings import PredictedPrompt, TenantService, WorkerBookings


class PeerState(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="state"):
    """What changed at a gateway since its message before, or all of it (`snapshot`).

    Attributes:
        gateway: its name, another one after each start.
        seq: number of the message, from 1; a snapshot has that of the last one before.
        workers: what it has on workers; in a snapshot, those that are left out have nothing.
        tenants: what it did for tenants, and has of them.
        prompts: that workers without KV events are expected to hold.
        heard: last message of each other gateway, by name, and nanoseconds since that came.
        snapshot: whether it has all of its state.
        leaves: whether it is the last.
    """

    gateway: str
    seq: int
    workers: tuple[WorkerBookings, ...] = ()
    tenants: tuple[TenantService, ...] = ()
    prompts: tuple[PredictedPrompt, ...] = ()
    heard: dict[str, tuple[int, int]] = {}
    snapshot: bool = False
    leaves: bool = False


class ResendRequest(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="ask"):
    """A gateway asks another for messages that it missed, or for a snapshot.

    Attributes:
        gateway: that asks.
        to: that is asked; "" for all.
        first, last: numbers of the messages; 0 for a snapshot.
    """

    gateway: str
    to: str = ""
    first: int = 0
    last: int = 0


SyncMessage: TypeAlias = PeerState | ResendRequest
