"""A trip is one attempt of a client at a call; a leg is what one worker does for it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from pigou.engine.plan import Finished, Load
from pigou.events import KVEvent
from pigou.lifecycle.request import RequestLifecycle
from pigou.request import BlockHashes, Request
from pigou.sim.call import Call


class KVSource(NamedTuple):
    """Where a leg finds the beginning of its prompt: nowhere, as a rule.

    Attributes:
        worker: that holds its blocks; "" for none.
        held: id under which it holds them.
        tokens: that they have.
    """

    worker: str = ""
    held: str = ""
    tokens: int = 0


NO_SOURCE = KVSource()


class Trip(msgspec.Struct, eq=False):
    """One attempt of a client at a call, over as many workers as it takes.

    Attributes:
        call: what is attempted.
        life: what comes next for it.
        hashes: of the prompt's blocks.
        block_size: that they are of.
        arrived: when it reached the fleet.
        leg: on a worker, while there is one.
        source: of its next leg.
        priority: that its workers are sent.
        request: as it was submitted last.
        seat: under which the control plane is told of its tokens.
    """

    call: Call
    life: RequestLifecycle
    hashes: BlockHashes
    block_size: int
    arrived: int
    leg: Leg | None = None
    source: KVSource = NO_SOURCE
    priority: int = 0
    request: Request | None = None
    seat: int = -1


class Leg(msgspec.Struct, eq=False):
    """What one worker does for a trip.

    Attributes:
        trip: whose leg it is.
        worker: its name.
        request: as the worker's core knows it.
        number: that its trip's life knows it by.
        source: of the prompt's blocks that it need not compute.
        streams: whether its tokens are for the client, and wanted.
        first: whether its first token is still to come.
        row: of the batch; -1 while it has none.
        produced: tokens that it yielded, while it has no row.
        told: of those, tokens that the control plane knows of.
        last: when its last token came.
    """

    trip: Trip
    worker: str
    request: Request
    number: int = 0
    source: KVSource = NO_SOURCE
    streams: bool = True
    first: bool = True
    row: int = -1
    produced: int = 0
    told: int = 0
    last: int = 0


class Listener(Protocol):
    """Who hears of what happens on workers."""

    def refused(self, leg: Leg, error: Exception, now: int) -> None:
        """A leg was not taken in."""

    def first_token(self, leg: Leg, now: int) -> None:
        """A leg yielded its first token."""

    def finished(self, leg: Leg, finished: Finished, now: int) -> None:
        """A leg ended by itself."""

    def wanted(self, leg: Leg, load: Load, now: int) -> None:
        """A leg wants blocks of its source; none, if it has them all."""

    def cache_changed(self, worker: str, events: tuple[KVEvent, ...], now: int) -> None:
        """KV events are published."""
