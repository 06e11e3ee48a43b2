"""Keyed events: what a cache holds, without the tokens in its blocks."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from pigou.control.index.slots import Words


class KeyedStored(msgspec.Struct, frozen=True, eq=False, tag_field="kind", tag="stored"):
    """Blocks that can be hit from now on.

    Attributes:
        hashes: the engine's own, as 64-bit names, shape (blocks,).
        keys: the router's, shape (blocks,); 0 where unknown.
        parent: name of the block before them; None at the beginning of a sequence.
        medium: tier, as the sender names it; None means the device.
    """

    hashes: Words
    keys: Words
    parent: int | None
    medium: str | None = None


class KeyedRemoved(msgspec.Struct, frozen=True, eq=False, tag_field="kind", tag="removed"):
    """Blocks that can no longer be hit: names, shape (blocks,), and tier; None means the device."""

    hashes: Words
    medium: str | None = None


class KeyedCleared(msgspec.Struct, frozen=True, tag_field="kind", tag="cleared"):
    """The whole cache was emptied."""


KeyedEvent: TypeAlias = KeyedStored | KeyedRemoved | KeyedCleared
