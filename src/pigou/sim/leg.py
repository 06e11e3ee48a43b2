"""A trip is one attempt at a call; a leg is what one worker does for it."""

from __future__ import annotations

from typing import Protocol

import msgspec

from pigou.engine.plan import Finished, Load
from pigou.events import KVEvent
from pigou.request import BlockHashes, Request
from pigou.sim.call import Call


class Trip(msgspec.Struct, eq=False):
    """One attempt at a call, over as many workers as it takes.

    Attributes:
        call: what is attempted.
        id: before the control plane.
        hashes: of the prompt's blocks.
        block_size: that they are of.
        arrived: when it reached the fleet.
        prefill: its leg on a prefill worker, while there is one.
        decode: its leg on a decode worker, while there is one.
        decoder: worker that is to stream it.
        priority: that its workers are sent.
        tried: workers that just failed it.
        failures: in a row, without a token between them.
        moves: failures altogether.
        request: as it was submitted last.
        seat: under which the control plane is told of its tokens.
        asked: id under which another worker's cache is asked for the prompt, "" while none is.
    """

    call: Call
    id: str
    hashes: BlockHashes
    block_size: int
    arrived: int
    prefill: Leg | None = None
    decode: Leg | None = None
    decoder: str = ""
    priority: int = 0
    tried: frozenset[str] = frozenset()
    failures: int = 0
    moves: int = 0
    request: Request | None = None
    seat: int = -1
    asked: str = ""


class Leg(msgspec.Struct, eq=False):
    """What one worker does for a trip.

    Attributes:
        trip: whose leg it is.
        worker: its name.
        request: as the worker's core knows it.
        source: worker that holds the prompt's blocks, "" where nobody does.
        held: under which id it holds them.
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
    source: str = ""
    held: str = ""
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
