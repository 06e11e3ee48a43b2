"""Keyed: stored blocks whose tokens were already made into the router's keys."""

from __future__ import annotations

from dataclasses import dataclass

from pigou.control.index.slots import Words


@dataclass(frozen=True, slots=True)
class Keyed:
    """Blocks that can be hit from now on, told without the tokens in them.

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
