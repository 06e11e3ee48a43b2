"""StoreStatus: a store and its links, for health pages and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from pigou.runtime.stores.link import LinkStatus
from pigou.runtime.stores.store import Counts


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """A store and its links, to be shown.

    Attributes:
        up: whether both directions take work.
        reason: why not.
        used_bytes: bytes taken.
        cap_bytes: that are never exceeded.
        capacity: blocks that have room.
        counts: what the store has seen.
        reads: the link from it.
        writes: the link to it.
    """

    up: bool
    reason: str
    used_bytes: int
    cap_bytes: int
    capacity: int
    counts: Counts
    reads: LinkStatus
    writes: LinkStatus
