"""KV events of tiers: which blocks can be read from which medium, and no longer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from pigou.events import BlockRemoved, BlockStored, Medium
from pigou.kv.block import ROOT, Block, hashes_of
from pigou.kv.tier import Tier
from pigou.request import BlockHashes, no_hashes

#: Whose blocks they are, in an event: no request's.
NOBODY = ""


@dataclass(slots=True)
class _PendingEvent:
    """An event that may still grow; `blocks` of what was stored, empty for what was removed."""

    stored: bool
    medium: Medium
    keys: list[bytes]
    blocks: list[Block]


class TierEvents:
    """KV events of tiers, in order, until they are taken.

    Neighbours of one kind and medium are one event: blocks that stand on one another are stored
    together, and what is removed in a row is removed together.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        incoming: Sequence[Set[bytes]],
        leaving: Sequence[Set[bytes]],
        media: Sequence[Medium] | None = None,
    ) -> None:
        """Begin without events.

        Args:
            incoming: of each, keys that it counts, and that have not arrived.
            leaving: of each, keys that it gave up, and that lie there until they have been copied.
            media: what events call each; the first is the host, the rest storage, unless said
                otherwise.
        """
        self.media = list(media) if media is not None else _default_media(len(tiers))
        self._tiers, self._incoming, self._leaving = tiers, incoming, leaving
        self._pending: list[_PendingEvent] = []

    def arrived(self, tier: int, keys: Iterable[bytes]) -> None:
        """Add the event that blocks can be read from a tier, for those of them that can."""
        held, incoming = self._tiers[tier], self._incoming[tier]
        entries = (held.entry(key) for key in keys if key not in incoming)
        self._stored(self.media[tier], [entry.block for entry in entries if entry is not None])

    def gone(self, tier: int, keys: Sequence[bytes]) -> None:
        """Add the event that blocks are gone, but for those that a tier of the same medium has."""
        medium = self.media[tier]
        others = [
            number
            for number, other_medium in enumerate(self.media)
            if other_medium is medium and number != tier
        ]
        if others:
            keys = [key for key in keys if not any(self._has(number, key) for number in others)]
        self._removed(medium, keys)

    def _has(self, tier: int, key: bytes) -> bool:
        is_held = key in self._tiers[tier] or key in self._leaving[tier]
        return is_held and key not in self._incoming[tier]

    def _stored(self, medium: Medium, blocks: Iterable[Block]) -> None:
        for block in blocks:
            last = self._pending[-1] if self._pending else None
            follows = last is not None and last.stored and last.medium is medium
            if last is not None and follows and last.keys[-1] == block.parent:
                last.keys.append(block.key)
                last.blocks.append(block)
            else:
                self._pending.append(_PendingEvent(True, medium, [block.key], [block]))

    def _removed(self, medium: Medium, keys: Sequence[bytes]) -> None:
        if not keys:
            return
        last = self._pending[-1] if self._pending else None
        if last is not None and not last.stored and last.medium is medium:
            last.keys.extend(keys)
        else:
            self._pending.append(_PendingEvent(False, medium, list(keys), []))

    def forget(self) -> None:
        """Drop what nobody has taken: it was all cleared."""
        self._pending.clear()

    def take(self) -> list[BlockStored | BlockRemoved]:
        """Return the events since the last call, in order."""
        if not self._pending:
            return []
        pending, self._pending = self._pending, []
        return [_event(event) for event in pending]


def _event(pending: _PendingEvent) -> BlockStored | BlockRemoved:
    hashes = hashes_of(pending.keys)
    if not pending.stored:
        return BlockRemoved(hashes, pending.medium)
    first = pending.blocks[0]
    return BlockStored(NOBODY, first.depth, hashes, _parent(first), pending.medium)


def _parent(block: Block) -> BlockHashes:
    return no_hashes() if block.parent == ROOT else hashes_of([block.parent])


def _default_media(tiers: int) -> list[Medium]:
    return [Medium.HOST if number == 0 else Medium.STORAGE for number in range(tiers)]
