"""Tiers beyond the device: which blocks are stored, loaded, moved and dropped, and their KV events.

`Tiers` decides, and does no I/O. The engine's driver makes the moves, each on the queue of its
link, and answers them with `on_transfer_done`.

A tier is filled by the one above it, the first by the device. A block goes down together with those
before it that are not there yet: so all that is left after a restart can be hit. While a tier has
room, it gets a copy of what arrives in the one above; later it gets what that one evicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from pigou.events import BlockRemoved, BlockStored, Medium
from pigou.kv.block import ROOT, Block, chain_of, ensure, hashes_of, keys_of
from pigou.kv.offload import (
    DEVICE,
    Move,
    MoveQueue,
    RecomputeCost,
    TierCounts,
    TierSpeed,
    blocks_worth_loading,
)
from pigou.kv.tier import Tier
from pigou.request import BlockHashes, Ints, no_hashes

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
    together, and what is removed in a row is removed together. Of each tier, `incoming` are keys
    that have not arrived, `leaving` those that it gave up and that are still to be copied.
    """

    def __init__(
        self, tiers: Sequence[Tier], incoming: Sequence[Set[bytes]],
        leaving: Sequence[Set[bytes]], media: Sequence[Medium] | None = None,
    ) -> None:  # fmt: skip
        if media is None:
            media = [Medium.HOST if number == 0 else Medium.STORAGE for number in range(len(tiers))]
        self.media = list(media)
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
    parent = no_hashes() if first.parent == ROOT else hashes_of([first.parent])
    return BlockStored(NOBODY, first.depth, hashes, parent, pending.medium)


#: Relative change of the recompute cost from which on policies value blocks anew.
_CHANGED = 0.25


class Tiers:
    """The tiers of one worker, from the nearest to the farthest.

    `staging` is, for each tier, the blocks beyond its cap that may lie there while they are copied
    to the next; without any, evicted blocks are dropped. `copies` limits device blocks under copy.
    By default the first medium is the host, the rest storage.

    Example:
        tiers = Tiers([Tier(2**30, policy)], block_bytes=2**16)
        loads = tiers.restorable(hashes, first=0, now=now)  # tier of each block that can come back
        moves = tiers.drain()  # copies to make; `on_transfer_done` tells how they went
    """

    recall = True

    def __init__(
        self, tiers: Sequence[Tier], block_bytes: int, staging: Sequence[int] | None = None,
        #: of reading, as measured; set by the driver
        speeds: Sequence[TierSpeed] | None = None, copies: int = 512,
        media: Sequence[Medium] | None = None,
    ) -> None:  # fmt: skip
        self.tiers = list(tiers)
        self.speeds = list(speeds) if speeds is not None else [TierSpeed() for _ in tiers]
        self.copies = copies
        #: as measured (`learn`); while None, every load pays
        self.recompute_cost: RecomputeCost | None = None
        self.counts = [TierCounts() for _ in tiers]
        self._learned_base_s = 0.0
        self._bytes = block_bytes
        self._staging = list(staging) if staging is not None else [0 for _ in tiers]
        self._incoming: list[set[bytes]] = [set() for _ in tiers]
        self._leaving: list[set[bytes]] = [set() for _ in tiers]
        self.events = TierEvents(self.tiers, self._incoming, self._leaving, media)
        self._transfers = MoveQueue()
        #: By move, blocks that stay at its source, pinned.
        self._pinned_at_source: dict[int, list[bytes]] = {}
        self._reading: dict[str, list[tuple[int, bytes]]] = {}

    def learn(self, cost: RecomputeCost) -> None:
        """Take in the measured recompute cost; policies value anew once it changed by a quarter."""
        self.recompute_cost = cost
        if abs(cost.base - self._learned_base_s) <= _CHANGED * self._learned_base_s:
            return
        self._learned_base_s = cost.base
        for tier, speed in zip(self.tiers, self.speeds, strict=True):
            back = speed.block / self._bytes if math.isfinite(speed.block) else 0.0
            tier.policy.learn(RecomputeCost(cost.base, cost.slope, back))

    # --- from and to the device -----------------------------------------------------------------

    def set_device_probe(self, device: Callable[[bytes], bool]) -> None:
        """Tell the host's policy how to ask if the device holds a block (`above`)."""
        if self.events.media[0] is Medium.HOST and self.tiers[0].policy.exclusive:
            self.tiers[0].policy.above = device

    def defers(self, blocks: int) -> bool:
        """True if so many blocks are better offered when the device is about to evict them.

        It is so where the first tier is full, and its policy heeds what the device holds.
        """
        first = self.tiers[0]
        room = first.cap_bytes - first.used_bytes
        return first.policy.above is not None and blocks * self._bytes > room

    def use(self, hashes: BlockHashes, expiry: int, now: int) -> None:
        """Record a use of the first blocks of a sequence, shape (n, 2), which may be offered."""
        first = self.tiers[0]
        keys = keys_of(hashes)
        held = first.find(keys, now)
        first.hit(keys[:held], now)
        first.use(self._chain(hashes, keys, held, len(keys), expiry), now)

    def offer(
        self, hashes: BlockHashes, device: Ints, expiry: int, now: int, limit: int
    ) -> Move | None:
        """Offer the first blocks of a sequence, (n, 2), to the first tier; copy at most `limit`.

        `device` has the device blocks that hold them, shape (n,). Returns the move of those that
        the tier takes, which `drain` returns too, or None. The device keeps them until the move is
        done.
        """
        keys = keys_of(hashes)
        first = self.tiers[0].find(keys, now)
        rest = self._chain(hashes, keys, first, first + limit, expiry)
        taken = self._admit(0, rest, now) if rest else 0
        if not taken:
            return None
        self._expect(0, rest[:taken])
        return self._transfers.add(DEVICE, 0, rest[:taken], device[first : first + taken].copy())

    def _chain(
        self, hashes: BlockHashes, keys: Sequence[bytes], start: int, stop: int, expiry: int
    ) -> list[Block]:
        parent = keys[start - 1] if start else ROOT
        return chain_of(hashes[start:stop], self._bytes, expiry, start, parent)

    def restorable(self, hashes: BlockHashes, first: int, now: int) -> Ints:
        """Return from which tiers blocks from `first` on are best loaded, shape (n,)."""
        tiers: list[int] = []
        for key in keys_of(hashes[first:]):
            tier = self._where(key, now)
            if tier is None:
                break
            tiers.append(tier)
        count = blocks_worth_loading(tiers, first, self.speeds, self.recompute_cost)
        return np.array(tiers[:count], dtype=np.int32)

    def readable(self, tier: int, key: bytes, now: int) -> bool:
        """Whether a block lies in a tier, has arrived there, and is valid."""
        if self.speeds[tier].block == math.inf:  # its store is down
            return False
        entry = self.tiers[tier].entry(key)
        return entry is not None and key not in self._incoming[tier] and entry.block.expiry > now

    def begin_load(self, request: str, hashes: BlockHashes, tiers: Ints, now: int) -> None:
        """Record that a request's blocks are read from these tiers, shape (n,)."""
        reading = list(zip(tiers.tolist(), keys_of(hashes), strict=True))
        for number, tier in enumerate(self.tiers):
            keys = [key for at, key in reading if at == number]
            tier.pin(keys)
            tier.hit(keys, now)
        self._reading[request] = reading

    def end_load(
        self, request: str, good: int, now: int, failed: bool = False, requested: bool = True
    ) -> None:
        """Record that a request's load has ended: `good` blocks came, and the next is lost.

        Where the load `failed`, the others may still be there. A request without a load changes
        nothing. Blocks that no request has `requested` yet count as recalled.
        """
        reading = self._reading.pop(request, [])
        for number, key in reading:
            self._unpin(number, [key], now)
        for number, key in reading[:good]:
            self.counts[number].restored += requested
            self.counts[number].recalled += not requested
            self.events.arrived(number, [key])
        if good < len(reading) and not failed:
            number, key = reading[good]
            self.lose(number, [key], now)

    # --- moves ----------------------------------------------------------------------------------

    def drain(self) -> list[Move]:
        """Return the moves that were decided since the last call, in order."""
        return self._transfers.drain()

    def on_transfer_done(self, number: int, good: Sequence[bool], now: int) -> Move:
        """Record that a move has ended, and which blocks arrived; return it. Refuse an unknown
        move.
        """
        move = self._transfers.end(number)
        target = move.target
        self._incoming[target].difference_update(move.keys)
        self._unpin(target, move.keys, now)
        lost = [key for key, arrived in zip(move.keys, good, strict=True) if not arrived]
        self.counts[target].stored += len(move.keys) - len(lost)
        self.lose(target, lost, now)
        self.events.arrived(target, move.keys)
        if move.source != DEVICE:
            self._left(move, now)
        if target + 1 < len(self.tiers):
            self._copy_down(target, move.blocks, now)
        return move

    def lose(self, tier: int, keys: Iterable[bytes], now: int) -> None:
        """Record that a tier does not have these blocks any more."""
        held = [key for key in keys if key in self.tiers[tier]]
        self.counts[tier].lost += len(held)
        self._delete(tier, self.tiers[tier].drop(held, now))

    def expire(self, now: int) -> None:
        """Delete what is no longer valid, everywhere."""
        for number, tier in enumerate(self.tiers):
            self._delete(number, tier.expire(now))

    def clear(self, now: int) -> None:
        """Delete everything, everywhere; the caller publishes the event."""
        for number, tier in enumerate(self.tiers):
            self._delete(number, tier.drop([block.key for block in tier.blocks()], now))
        self.events.forget()

    def recover(self, tier: int, blocks: Iterable[Block], now: int) -> int:
        """Take in what a tier's store has at the start; return how many blocks can be hit again.

        What does not fit is deleted there; held blocks stay. No event names a recovered block
        before it is loaded: its tokens are not stored, and its hash alone says nothing.
        """
        holder = self.tiers[tier]
        # What goes for one of these is deleted, so that it is none of them itself.
        new = {block.key: block for block in blocks if block.key not in holder}
        for block in sorted(new.values(), key=lambda block: block.depth):
            if not self._admit(tier, [block], now):
                self._transfers.delete(tier, [block.key])
        return len(holder)

    def copies_under(self) -> dict[int, int]:
        """Return how many device blocks each move under way reads, by its number."""
        moves = self._transfers.under_way.values()
        return {move.number: len(move.keys) for move in moves if move.source == DEVICE}

    def check(self) -> None:
        """Raise an IntegrityError for the first law of tiers and moves that does not hold."""
        moves = self._transfers.under_way.values()
        parts = zip(self.tiers, self._incoming, self._leaving, self._staging, strict=True)
        for number, (tier, incoming, leaving, staging) in enumerate(parts):
            _check_tier(number, tier, incoming, leaving, staging, moves)

    # --- decisions ------------------------------------------------------------------------------

    def _where(self, key: bytes, now: int) -> int | None:
        for number in range(len(self.tiers)):
            if self.readable(number, key, now):
                return number
        return None

    def _admit(self, tier: int, blocks: Sequence[Block], now: int) -> int:
        """Offer a run of blocks to a tier, and what it evicts to the next; return how many stay."""
        admitted, evicted = self.tiers[tier].admit(blocks, now)
        self.counts[tier].evicted += len(evicted)
        if evicted:
            self._offer_below(tier, evicted, now)
        return len(admitted)

    def _offer_below(self, tier: int, evicted: Sequence[Block], now: int) -> None:
        """Offer the next tier what this one evicted, together with the blocks before it."""
        gone = {block.key: block for block in evicted}
        going: dict[bytes, Block] = {}
        if tier + 1 < len(self.tiers):
            leaving = self._leaving[tier]
            room = self._staging[tier] - len(leaving)
            fresh = gone.keys() - leaving
            leaving |= fresh  # they still lie there, even if the tier below evicts them meanwhile
            going = self._send_down(tier, evicted, gone, max(0, room), now)
            leaving -= fresh - going.keys()
        self._delete(tier, [key for key in gone if key not in going])

    def _copy_down(self, tier: int, blocks: Sequence[Block], now: int) -> None:
        below = self.tiers[tier + 1]
        room = (below.cap_bytes - below.used_bytes) // self._bytes
        held = [block for block in blocks if block.key in self.tiers[tier]]
        self._send_down(tier, held, {}, room, now)

    def _send_down(
        self, tier: int, blocks: Iterable[Block], gone: dict[bytes, Block], room: int, now: int
    ) -> dict[bytes, Block]:
        """Offer blocks to the next tier, deepest first, with those before; return what goes."""
        source, below = self.tiers[tier], self.tiers[tier + 1]
        going: dict[bytes, Block] = {}
        seen: set[bytes] = set()
        for block in sorted(blocks, key=lambda block: -block.depth):
            if room < 1:
                break
            if block.key in seen:
                continue
            path = _path_down(source, below, self._incoming[tier], block, gone)
            if gone:
                count = sum(step.key in gone for step in path)
                path = path[: len(path) - max(0, count - room)]
            else:
                path = path[:room]
            seen.update(step.key for step in path)
            taken = path[: self._admit(tier + 1, path, now)] if path else path
            self._expect(tier + 1, taken)
            going.update((step.key, step) for step in taken)
            room -= sum(step.key in gone for step in taken) if gone else len(taken)
        if going:
            stay = [key for key in going if key not in gone]
            self.tiers[tier].pin(stay)
            move = self._transfers.add(tier, tier + 1, list(going.values()))
            self._pinned_at_source[move.number] = stay
        return going

    def _expect(self, tier: int, blocks: Sequence[Block]) -> None:
        """Note that blocks are on their way to a tier: they are neither read nor evicted."""
        keys = [block.key for block in blocks]
        self.tiers[tier].pin(keys)
        self._incoming[tier].update(keys)

    # --- what was decided -----------------------------------------------------------------------

    def _left(self, move: Move, now: int) -> None:
        """Free what a move between tiers read."""
        source = move.source
        self._unpin(source, self._pinned_at_source.pop(move.number), now)
        left = [key for key in move.keys if key in self._leaving[source]]
        self._leaving[source].difference_update(left)
        self._delete(source, [key for key in left if key not in self.tiers[source]])

    def _unpin(self, tier: int, keys: Iterable[bytes], now: int) -> None:
        self._delete(tier, self.tiers[tier].unpin(keys, now))

    def _delete(self, tier: int, keys: Sequence[bytes]) -> None:
        """Delete blocks, but for those that are leaving: they are deleted once they have."""
        leaving = self._leaving[tier]
        if leaving:
            keys = [key for key in keys if key not in leaving]
        if keys:
            self._transfers.delete(tier, keys)
            self.events.gone(tier, keys)


def _path_down(
    source: Tier, target: Tier, incoming: Set[bytes], block: Block, gone: Mapping[bytes, Block]
) -> list[Block]:
    """Return the blocks of one chain that must go down for `block` to be of use there, in order.

    Empty if it cannot be: what has not arrived itself cannot be sent on. `gone` are blocks, by key,
    that `source` does not hold any more, though their bytes are there.
    """
    path: list[Block] = []
    at: Block | None = block
    while at is not None and at.key not in target:
        if at.key in incoming:
            return []
        path.append(at)
        if at.parent == ROOT or at.parent in target:
            return path[::-1]
        entry = source.entry(at.parent)
        at = gone.get(at.parent) or (entry.block if entry is not None else None)
    return []


def _check_tier(
    number: int, tier: Tier, incoming: Set[bytes], leaving: Set[bytes], staging: int,
    under: Collection[Move],
) -> None:  # fmt: skip
    """Check a tier, and the moves to it and from it; `leaving` keys are evicted, and still read.

    A tier's store holds the tier's blocks, and those that are still read there for the next tier:
    at most its cap and its staging.

    Raises:
        IntegrityError: names the first law that does not hold.
    """
    tier.check()
    sent = [key for move in under if move.target == number for key in move.keys]
    ensure(len(sent) == len(set(sent)), f"tier {number} is sent a block twice")
    ensure(incoming == set(sent), f"tier {number} waits for what is not on its way")
    read = {key for move in under if move.source == number for key in move.keys}
    ensure(leaving <= read, f"tier {number} keeps what nobody reads any more")
    ensure(
        len(leaving) <= staging, f"tier {number} stages {len(leaving)} blocks, and may {staging}"
    )
