"""The laws of blocks that are on their way between tiers, checked."""

from __future__ import annotations

from collections.abc import Collection, Set
from typing import Protocol

from pigou.kv.integrity import ensure
from pigou.kv.tier import Tier


class OnItsWay(Protocol):
    """A move, as far as its laws go (`pigou.kv.tiers.Move`)."""

    @property
    def source(self) -> int:
        """Tier that it reads."""
        ...

    @property
    def target(self) -> int:
        """Tier that it writes to."""
        ...

    @property
    def keys(self) -> Collection[bytes]:
        """Of its blocks."""
        ...


def check_tier(
    number: int,
    tier: Tier,
    coming: Set[bytes],
    leaving: Set[bytes],
    staging: int,
    under: Collection[OnItsWay],
) -> None:
    """Check a tier, and what is on its way to it and from it.

    A tier's store holds what the tier does, and what is still read there for the next one: its cap
    and its staging, at most.

    Args:
        number: of the tier.
        tier: what lies there.
        coming: keys that have not arrived.
        leaving: keys that the tier gave up, and that are still read; it may hold them again.
        staging: how many those may be.
        under: moves that have not landed.

    Raises:
        IntegrityError: names the first law that does not hold.
    """
    tier.check()
    sent = [key for move in under if move.target == number for key in move.keys]
    ensure(len(sent) == len(set(sent)), f"tier {number} is sent a block twice")
    ensure(coming == set(sent), f"tier {number} waits for what is not on its way")
    read = {key for move in under if move.source == number for key in move.keys}
    ensure(leaving <= read, f"tier {number} keeps what nobody reads any more")
    ensure(
        len(leaving) <= staging, f"tier {number} stages {len(leaving)} blocks, and may {staging}"
    )
