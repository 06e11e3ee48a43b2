"""What tiers tell the world: which blocks can be read from which medium, and no longer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pigou.events import BlockRemoved, BlockStored, Medium
from pigou.kv.block import ROOT, Block, hashes_of
from pigou.request import BlockHashes, no_hashes

#: Whose blocks they are, in an event: no request's.
NOBODY = ""


class TierEvents:
    """KV events of tiers, in order, until somebody takes them.

    Neighbours of one kind and medium are one event: blocks that stand on one another are stored
    together, and what is removed in a row is removed together.
    """

    def __init__(self) -> None:
        self._told: list[tuple[bool, Medium, list[bytes], list[Block]]] = []

    def stored(self, medium: Medium, blocks: Iterable[Block]) -> None:
        """Note that blocks can be read from a medium."""
        for block in blocks:
            last = self._told[-1] if self._told else None
            if last is not None and last[0] and last[1] is medium and last[2][-1] == block.parent:
                last[2].append(block.key)
                last[3].append(block)
            else:
                self._told.append((True, medium, [block.key], [block]))

    def removed(self, medium: Medium, keys: Sequence[bytes]) -> None:
        """Note that blocks can no longer be read from a medium."""
        if not keys:
            return
        last = self._told[-1] if self._told else None
        if last is not None and not last[0] and last[1] is medium:
            last[2].extend(keys)
        else:
            self._told.append((False, medium, list(keys), []))

    def forget(self) -> None:
        """Drop what nobody has taken: it was all cleared."""
        self._told.clear()

    def take(self) -> list[BlockStored | BlockRemoved]:
        """Return the events since the last call, in order."""
        if not self._told:
            return []
        told, self._told = self._told, []
        return [_event(*each) for each in told]


def _event(
    stored: bool, medium: Medium, keys: list[bytes], blocks: list[Block]
) -> BlockStored | BlockRemoved:
    hashes = hashes_of(keys)
    if not stored:
        return BlockRemoved(hashes, medium)
    first = blocks[0]
    return BlockStored(NOBODY, first.depth, hashes, _parent(first), medium)


def _parent(block: Block) -> BlockHashes:
    return no_hashes() if block.parent == ROOT else hashes_of([block.parent])
