"""What the gang scheduler decides, for a driver to carry out."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from pigou.control.placement.gang import GangPlacement, Replica


class GangPlaced(msgspec.Struct, frozen=True):
    """A gang got nodes: `added` are to be started, and all of `placement` run then."""

    gang: str
    placement: GangPlacement
    added: tuple[Replica, ...]


class GangEvicted(msgspec.Struct, frozen=True):
    """A gang below its minimum gives up what it has, for the given reason, and waits again."""

    gang: str
    removed: tuple[Replica, ...]
    reason: str


class GangWaits(msgspec.Struct, frozen=True):
    """A gang waits for nodes, for the given reason."""

    gang: str
    reason: str


class GangRefused(msgspec.Struct, frozen=True):
    """A gang is refused: it would not fit if nobody else were there."""

    gang: str
    reason: str


PlacementEffect: TypeAlias = GangPlaced | GangEvicted | GangWaits | GangRefused
