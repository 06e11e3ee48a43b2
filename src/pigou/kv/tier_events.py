"""What tiers tell the world: which blocks can be read from which medium, and no longer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from pigou.events import BlockRemoved, BlockStored, Medium
from pigou.kv.block import ROOT, Block, hashes_of
from pigou.kv.tier import Tier
from pigou.request import BlockHashes, no_hashes

#: Whose blocks they are, in an event: no request's.
NOBODY = ""


class TierEvents:
    """KV events of tiers, in order, until somebody takes them.

    Neighbours of one kind and medium are one event: blocks that stand on one another are stored
    together, and what is removed in a row is removed together.

    Attributes:
        media: what each tier is called.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        coming: Sequence[Set[bytes]],
        leaving: Sequence[Set[bytes]],
        media: Sequence[Medium] | None = None,
    ) -> None:
        """Begin with nothing told.

        Args:
            tiers: from the nearest on.
            coming: of each, keys that it counts, and that have not arrived.
            leaving: of each, keys that it gave up, and that lie there until they have been copied.
            media: what events call each; the first is the host, the rest storage, unless said
                otherwise.
        """
        self.media = list(media) if media is not None else _usual_media(len(tiers))
        self._tiers, self._coming, self._leaving = tiers, coming, leaving
        self._told: list[tuple[bool, Medium, list[bytes], list[Block]]] = []

    def arrived(self, tier: int, keys: Iterable[bytes]) -> None:
        """Tell that blocks can be read from a tier, those of them that can."""
        held, coming = self._tiers[tier], self._coming[tier]
        there = (held.entry(key) for key in keys if key not in coming)
        self._stored(self.media[tier], [entry.block for entry in there if entry is not None])

    def gone(self, tier: int, keys: Sequence[bytes]) -> None:
        """Tell that blocks are gone from a tier, but for those that another has by that name."""
        medium = self.media[tier]
        others = [
            number for number, each in enumerate(self.media) if each is medium and number != tier
        ]
        if others:
            keys = [key for key in keys if not any(self._has(number, key) for number in others)]
        self._removed(medium, keys)

    def _has(self, tier: int, key: bytes) -> bool:
        there = key in self._tiers[tier] or key in self._leaving[tier]
        return there and key not in self._coming[tier]

    def _stored(self, medium: Medium, blocks: Iterable[Block]) -> None:
        for block in blocks:
            last = self._told[-1] if self._told else None
            if last is not None and last[0] and last[1] is medium and last[2][-1] == block.parent:
                last[2].append(block.key)
                last[3].append(block)
            else:
                self._told.append((True, medium, [block.key], [block]))

    def _removed(self, medium: Medium, keys: Sequence[bytes]) -> None:
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


def _usual_media(tiers: int) -> list[Medium]:
    return [Medium.HOST if number == 0 else Medium.STORAGE for number in range(tiers)]
