"""Tiers below the device: which blocks to store, load, move and drop, and their KV events.

Decides without I/O; the driver makes the moves and reports them with `on_transfer_done`. Each
tier is filled from the one above: copies while it has room, evicted blocks after that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from pigou.config import KVQuota
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
from pigou.request import BlockHashes, BlockRemoved, BlockStored, Ints, Medium, no_hashes

#: Request id in events of tiers.
NOBODY = ""
#: Relative change of the recompute cost before policies value blocks again.
_CHANGED = 0.25


@dataclass(slots=True)
class _PendingEvent:
    stored: bool
    medium: Medium
    keys: list[bytes]
    blocks: list[Block]


class TierEvents:
    """KV events of tiers, in order; adjacent events of one kind and medium are merged."""

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
        """Publish that blocks of a tier can be loaded, except those still incoming."""
        held, incoming = self._tiers[tier], self._incoming[tier]
        entries = (held.entry(key) for key in keys if key not in incoming)
        self._stored(self.media[tier], [entry.block for entry in entries if entry is not None])

    def gone(self, tier: int, keys: Sequence[bytes]) -> None:
        """Publish that blocks are gone, unless another tier of the medium has them."""
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
        """Drop the events not yet taken."""
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


class Tiers:
    """Tiers of one worker, nearest first.

    `staging` is the number of evicted blocks a tier may keep, beyond its cap, while they are
    copied to the next; `copies` limits device blocks under copy. The first medium is the host by
    default, the others storage.

    Example:
        tiers = Tiers([Tier(2**30, policy)], block_bytes=2**16)
        loads = tiers.restorable(hashes, first=0, now=now)  # tier of each block worth loading
        moves = tiers.drain()  # copies to make; report each with `on_transfer_done`
    """

    recall = True

    def __init__(
        self, tiers: Sequence[Tier], block_bytes: int, staging: Sequence[int] | None = None,
        #: measured read speeds; set by the driver
        speeds: Sequence[TierSpeed] | None = None, copies: int = 512,
        media: Sequence[Medium] | None = None,
    ) -> None:  # fmt: skip
        self.tiers = list(tiers)
        self.speeds = list(speeds) if speeds is not None else [TierSpeed() for _ in tiers]
        self.copies = copies
        #: as measured (`learn`); None loads everything
        self.recompute_cost: RecomputeCost | None = None
        self.counts = [TierCounts() for _ in tiers]
        self._learned_base_s = 0.0
        self._bytes = block_bytes
        self._staging = list(staging) if staging is not None else [0 for _ in tiers]
        self._incoming: list[set[bytes]] = [set() for _ in tiers]
        self._leaving: list[set[bytes]] = [set() for _ in tiers]
        self.events = TierEvents(self.tiers, self._incoming, self._leaving, media)
        self._transfers = MoveQueue()
        #: By move, blocks pinned at its source.
        self._pinned_at_source: dict[int, list[bytes]] = {}
        self._reading: dict[str, list[tuple[int, bytes]]] = {}

    def learn(self, cost: RecomputeCost) -> None:
        """Update the recompute cost; policies follow once it changes by a quarter."""
        self.recompute_cost = cost
        if abs(cost.base - self._learned_base_s) <= _CHANGED * self._learned_base_s:
            return
        self._learned_base_s = cost.base
        for tier, speed in zip(self.tiers, self.speeds, strict=True):
            back = speed.block / self._bytes if math.isfinite(speed.block) else 0.0
            tier.policy.learn(RecomputeCost(cost.base, cost.slope, back))

    def set_quotas(self, quotas: Mapping[str, KVQuota]) -> None:
        """Replace the tenants' shares of the bytes of each tier; see `pigou.kv.quotas`."""
        for tier in self.tiers:
            if quotas or tier.accounts is not None:
                tier.set_quotas(quotas, self._bytes)

    # --- from and to the device -----------------------------------------------------------------

    def set_device_probe(self, device: Callable[[bytes], bool]) -> None:
        """Give the host tier's policy a test of whether the device holds a block (`above`)."""
        if self.events.media[0] is Medium.HOST and self.tiers[0].policy.exclusive:
            self.tiers[0].policy.above = device

    def defers(self, blocks: int) -> bool:
        """True if offload should wait for device eviction: the first tier is full and exclusive."""
        first = self.tiers[0]
        room = first.cap_bytes - first.used_bytes
        return first.policy.above is not None and blocks * self._bytes > room

    def use(self, hashes: BlockHashes, expiry: int, now: int) -> None:
        """Record a use of a sequence's first blocks, shape (n, 2)."""
        first = self.tiers[0]
        keys = keys_of(hashes)
        held = first.find(keys, now)
        first.hit(keys[:held], now)
        first.use(self._chain(hashes, keys, held, len(keys), expiry), now)

    def offer(
        self,
        hashes: BlockHashes,
        device: Ints,
        expiry: int,
        now: int,
        limit: int,
        tenant: str = "",
    ) -> Move | None:
        """Offer a sequence's first blocks, (n, 2), to the first tier; return the move, or None.

        At most `limit` are copied, from `device` blocks, shape (n,), which stay until the move is
        done.
        """
        keys = keys_of(hashes)
        first = self.tiers[0].find(keys, now)
        rest = self._chain(hashes, keys, first, first + limit, expiry, tenant)
        taken = self._admit(0, rest, now) if rest else 0
        if not taken:
            return None
        self._expect(0, rest[:taken])
        return self._transfers.add(DEVICE, 0, rest[:taken], device[first : first + taken].copy())

    def _chain(
        self, hashes: BlockHashes, keys: Sequence[bytes], start: int, stop: int, expiry: int,
        tenant: str = "",
    ) -> list[Block]:  # fmt: skip
        parent = keys[start - 1] if start else ROOT
        return chain_of(hashes[start:stop], self._bytes, expiry, start, parent, tenant)

    def restorable(self, hashes: BlockHashes, first: int, now: int) -> Ints:
        """Return the tiers to load blocks from index `first` on from, shape (n,)."""
        tiers: list[int] = []
        for key in keys_of(hashes[first:]):
            tier = self._where(key, now)
            if tier is None:
                break
            tiers.append(tier)
        count = blocks_worth_loading(tiers, first, self.speeds, self.recompute_cost)
        return np.array(tiers[:count], dtype=np.int32)

    def readable(self, tier: int, key: bytes, now: int) -> bool:
        """True if a block has arrived in a tier and is valid."""
        if self.speeds[tier].block == math.inf:  # the store is down
            return False
        entry = self.tiers[tier].entry(key)
        return entry is not None and key not in self._incoming[tier] and entry.block.expiry > now

    def begin_load(self, request: str, hashes: BlockHashes, tiers: Ints, now: int) -> None:
        """Record that a request loads blocks from these tiers, shape (n,)."""
        reading = list(zip(tiers.tolist(), keys_of(hashes), strict=True))
        for number, tier in enumerate(self.tiers):
            keys = [key for at, key in reading if at == number]
            tier.pin(keys)
            tier.hit(keys, now)
        self._reading[request] = reading

    def end_load(
        self, request: str, good: int, now: int, failed: bool = False, requested: bool = True
    ) -> None:
        """Record the end of a request's load: `good` blocks arrived, and the next one is lost.

        If it `failed`, no block counts as lost. Blocks not `requested` yet count as recalled.
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
        """Return the moves decided since the last call, in order."""
        return self._transfers.drain()

    def on_transfer_done(self, number: int, good: Sequence[bool], now: int) -> Move:
        """Complete and return a move; raises ValueError for an unknown one."""
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
        """Record that a tier lost these blocks."""
        held = [key for key in keys if key in self.tiers[tier]]
        self.counts[tier].lost += len(held)
        self._delete(tier, self.tiers[tier].drop(held, now))

    def expire(self, now: int) -> None:
        """Delete expired blocks in all tiers."""
        for number, tier in enumerate(self.tiers):
            self._delete(number, tier.expire(now))

    def drop(self, keys: Sequence[bytes], now: int) -> None:
        """Delete blocks and what extends them in all tiers."""
        for number, tier in enumerate(self.tiers):
            self._delete(number, tier.drop(keys, now))

    def clear(self, now: int) -> None:
        """Delete all blocks in all tiers; the caller publishes the event."""
        for number, tier in enumerate(self.tiers):
            self._delete(number, tier.drop([block.key for block in tier.blocks()], now))
        self.events.forget()

    def recover(self, tier: int, blocks: Iterable[Block], now: int) -> int:
        """Register blocks found in a tier's store at startup; return how many are held."""
        holder = self.tiers[tier]
        # Blocks evicted for one of these are deleted, so they must not be among them.
        new = {block.key: block for block in blocks if block.key not in holder}
        for block in sorted(new.values(), key=lambda block: block.depth):
            if not self._admit(tier, [block], now):
                self._transfers.delete(tier, [block.key])
        return len(holder)

    def copies_under(self) -> dict[int, int]:
        """Return the number of device blocks read by each move under way."""
        moves = self._transfers.under_way.values()
        return {move.number: len(move.keys) for move in moves if move.source == DEVICE}

    def check(self) -> None:
        """Raise an IntegrityError on a violated invariant of tiers or moves."""
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
        """Admit a run of blocks, pass on evicted ones; return the number admitted."""
        admitted, evicted = self.tiers[tier].admit(blocks, now)
        self.counts[tier].evicted += len(evicted)
        if evicted:
            self._offer_below(tier, evicted, now)
        return len(admitted)

    def _offer_below(self, tier: int, evicted: Sequence[Block], now: int) -> None:
        """Offer evicted blocks to the next tier, with the blocks before them."""
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
        """Offer blocks to the next tier with their prefixes, deepest first; return those taken."""
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
        """Pin blocks on their way to a tier."""
        keys = [block.key for block in blocks]
        self.tiers[tier].pin(keys)
        self._incoming[tier].update(keys)

    # --- what was decided -----------------------------------------------------------------------

    def _left(self, move: Move, now: int) -> None:
        """Free the blocks read by a move between tiers."""
        source = move.source
        self._unpin(source, self._pinned_at_source.pop(move.number), now)
        left = [key for key in move.keys if key in self._leaving[source]]
        self._leaving[source].difference_update(left)
        self._delete(source, [key for key in left if key not in self.tiers[source]])

    def _unpin(self, tier: int, keys: Iterable[bytes], now: int) -> None:
        self._delete(tier, self.tiers[tier].unpin(keys, now))

    def _delete(self, tier: int, keys: Sequence[bytes]) -> None:
        """Delete blocks; those still leaving are deleted when their copy is done."""
        leaving = self._leaving[tier]
        if leaving:
            keys = [key for key in keys if key not in leaving]
        if keys:
            self._transfers.delete(tier, keys)
            self.events.gone(tier, keys)


def _path_down(
    source: Tier, target: Tier, incoming: Set[bytes], block: Block, gone: Mapping[bytes, Block]
) -> list[Block]:
    """Return the chain that must move for `block` to be useful in `target`; empty if impossible."""
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
    tier.check()
    sent = [key for move in under if move.target == number for key in move.keys]
    ensure(len(sent) == len(set(sent)), f"tier {number} is sent a block twice")
    ensure(incoming == set(sent), f"tier {number} waits for what is not on its way")
    read = {key for move in under if move.source == number for key in move.keys}
    ensure(leaving <= read, f"tier {number} keeps what nobody reads any more")
    ensure(
        len(leaving) <= staging, f"tier {number} stages {len(leaving)} blocks, and may {staging}"
    )
