"""What goes down together with a block."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

from pigou.kv.block import ROOT, Block

if TYPE_CHECKING:
    from pigou.kv.tier import Tier


def path_down(
    here: Tier, below: Tier, coming: Set[bytes], block: Block, gone: Mapping[bytes, Block]
) -> list[Block]:
    """Return what must go down for a block to be of use there; nothing if it cannot be had.

    What has not arrived itself cannot be sent on.

    Args:
        here: the tier that has the block.
        below: the one that it goes to.
        coming: keys that have not arrived here.
        block: which.
        gone: by key, blocks that `here` does not hold any more, though their bytes are there.

    Returns:
        Blocks of one chain that are not below, from the first of them to `block`.
    """
    path: list[Block] = []
    at: Block | None = block
    while at is not None and at.key not in below:
        if at.key in coming:
            return []
        path.append(at)
        if at.parent == ROOT or at.parent in below:
            return path[::-1]
        entry = here.entry(at.parent)
        at = gone.get(at.parent) or (entry.block if entry is not None else None)
    return []
