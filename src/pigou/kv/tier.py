"""Metadata of one tier of KV blocks below the device, within a byte limit."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from pigou.config import KVQuota, check_bounds
from pigou.kv.block import ROOT, Block, Entry, ensure
from pigou.kv.quotas import ByteAccounts
from pigou.kv.tier_eviction.policy import EvictionPolicy
from pigou.request import NEVER


class Admission(NamedTuple):
    """Result of `Tier.admit`."""

    admitted: list[bytes]  # newly held keys, parent before child
    evicted: list[Block]  # child before parent


class Tier:
    """Blocks of one tier: metadata only, the driver moves the bytes.

    Lists of keys or blocks are runs of one chain, parent before child; `now` is in nanoseconds.
    Leaves are evicted first, pinned blocks never; `rooted` tiers hold the parent of each block.

    Example:
        n = tier.find(keys, now)                      # leading keys that are held and not expired
        tier.hit(keys[:n], now)                       # record the hits
        admitted, evicted = tier.admit(blocks, now)   # blocks: those from keys[n] on, say
        tier.pin(admitted)                            # until they are written
        tier.unpin(admitted)
    """

    def __init__(self, cap_bytes: int, policy: EvictionPolicy, rooted: bool = True) -> None:
        check_bounds("cap_bytes", cap_bytes, ge=0)
        self.cap_bytes = cap_bytes
        self.used_bytes = 0
        self.policy = policy
        self.rooted = rooted
        self._held: dict[bytes, Entry] = {}
        self._doomed: dict[bytes, Entry] = {}
        #: First held child of each parent that is not held.
        self._waiting: dict[bytes, Entry] = {}
        self._expiries: list[tuple[int, bytes]] = []
        #: Bytes by tenant; None without quotas.
        self.accounts: ByteAccounts | None = None

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: bytes) -> bool:
        return key in self._held

    def entry(self, key: bytes) -> Entry | None:
        """Return the entry of a key, read-only; None if not held."""
        return self._held.get(key)

    def blocks(self) -> Iterable[Block]:
        """Return the held blocks, in order of admission."""
        return (entry.block for entry in self._held.values())

    @property
    def price(self) -> float:
        """Price of a byte, in seconds of prefill per second; 0 if the policy has none."""
        return self.policy.price

    def set_quotas(self, quotas: Mapping[str, KVQuota], unit: int = 1) -> ByteAccounts:
        """Replace the tenants' shares of the bytes; floors are rounded down to `unit` bytes."""
        if self.accounts is None:
            self.accounts = ByteAccounts(self.cap_bytes, unit)
            for entry in (*self._held.values(), *self._doomed.values()):
                self.accounts.charge(entry)
                self.accounts.freed(entry)
        self.accounts.quotas = quotas
        return self.accounts

    # --- use ----------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes], now: int) -> int:
        """Return how many leading keys are held and not expired."""
        held = self._held
        for count, key in enumerate(keys):
            entry = held.get(key)
            if entry is None or entry.block.expiry <= now:
                return count
        return len(keys)

    def hit(self, keys: Sequence[bytes], now: int) -> None:
        """Record a hit of held blocks, a run of one chain."""
        if not keys:
            return
        entry: Entry | None = self._held[keys[-1]]
        assert entry is not None
        entry.last = now
        entry.uses += 1
        if not self.policy.paths:
            self.policy.hit(entry, now)
            return
        for _ in keys:
            if entry is None:
                break
            self.policy.hit(entry, now)
            entry = entry.up

    def use(self, blocks: Sequence[Block], now: int) -> int:
        """Record a use of a chain in any tier; return how many leading blocks are held here."""
        keys = [block.key for block in blocks]
        count = self.find(keys, now)
        self.hit(keys[:count], now)
        missed = [block for block in blocks[count:] if block.key not in self._held]
        if missed:
            self.policy.on_miss(missed, now)
        return count

    # --- admission ----------------------------------------------------------------------------

    def admit(self, blocks: Sequence[Block], now: int, used: bool = True) -> Admission:
        """Admit blocks of one chain as the policy decides, evicting others to make room.

        Expired, oversized and still pinned blocks are refused; so are, if `rooted`, blocks without
        their parent. Pass `used=False` if `use` recorded the access.
        """
        candidates = [block for block in blocks if block.key not in self._held]
        if used and candidates:
            self.policy.on_miss(candidates, now)
        answers = self.policy.admits(candidates, now) if candidates else []
        wanted = {block.key for block, answer in zip(candidates, answers, strict=True) if answer}
        if self.accounts is not None:
            wanted |= self.accounts.within_floor(candidates)
        if not wanted:
            return Admission([], [])
        guarded = self._guarded(blocks)
        taken: list[Entry] = []
        evicted: list[Block] = []
        for block in candidates:
            if block.key in wanted and self._may_hold(block, now):
                if not self._make_room(block, now, evicted):
                    break
                taken.append(self._link(block, now))
            elif self.rooted:
                break
        for entry in reversed(taken):
            entry.pins -= 1
            self.policy.insert(entry, now)
            if self.accounts is not None:
                self.accounts.freed(entry)
        for entry in guarded:
            entry.pins -= 1
            self._freed(entry, now)
        return Admission([entry.block.key for entry in taken], evicted)

    def _guarded(self, blocks: Sequence[Block]) -> list[Entry]:
        keys = (blocks[0].parent, *(block.key for block in blocks))
        guarded = [entry for key in keys if (entry := self._held.get(key)) is not None]
        for entry in guarded:
            entry.pins += 1
        return guarded

    def _may_hold(self, block: Block, now: int) -> bool:
        if block.expiry <= now or block.size > self.cap_bytes or block.key in self._doomed:
            return False
        return not self.rooted or block.parent == ROOT or block.parent in self._held

    def _make_room(self, block: Block, now: int, evicted: list[Block]) -> bool:
        while self.used_bytes + block.size > self.cap_bytes:
            ask = partial(self.policy.victim, block, now)
            entry = ask() if self.accounts is None else self.accounts.victim(block, ask)
            if entry is None:
                return False
            assert entry.free, f"the policy chose {entry.block}, which is not free"
            self._unlink(entry, True, now)
            self._return_bytes(entry)
            evicted.append(entry.block)
        return True

    def _link(self, block: Block, now: int) -> Entry:
        """Hold a block, pinned until the policy's `insert`."""
        entry = Entry(block, now)
        entry.pins = 1
        self._held[block.key] = entry
        self.used_bytes += block.size
        if self.accounts is not None:
            self.accounts.charge(entry)
        if block.expiry != NEVER:
            heapq.heappush(self._expiries, (block.expiry, block.key))
        above = self._held.get(block.parent)
        if above is not None:
            entry.up = above
            entry.right, above.down = above.down, entry
        elif block.parent != ROOT:
            entry.right = self._waiting.get(block.parent)
            self._waiting[block.parent] = entry
        if entry.right is not None:
            entry.right.left = entry
        if self._waiting:
            self._adopt(entry)
        return entry

    def _adopt(self, entry: Entry) -> None:
        child = entry.down = self._waiting.pop(entry.block.key, None)
        while child is not None:
            child.up = entry
            child = child.right

    # --- going --------------------------------------------------------------------------------

    def drop(self, keys: Iterable[bytes], now: int) -> list[bytes]:
        """Drop blocks and their descendants; return the keys freed, children first."""
        freed: list[bytes] = []
        for key in keys:
            entry = self._held.get(key)
            if entry is not None:
                for descendant in self._subtree(entry):
                    self._forget(descendant, freed, now)
        return freed

    def expire(self, now: int) -> list[bytes]:
        """Drop expired blocks; return the keys freed, children first."""
        due = []
        while self._expiries and self._expiries[0][0] <= now:
            _, key = heapq.heappop(self._expiries)
            entry = self._held.get(key)
            if entry is not None and entry.block.expiry <= now:
                due.append(key)
        return self.drop(due, now)

    def _subtree(self, top: Entry) -> list[Entry]:
        entries = [top]
        for entry in entries:  # grows in the loop
            child = entry.down
            while child is not None:
                entries.append(child)
                child = child.right
        return entries[::-1]

    def _forget(self, entry: Entry, freed: list[bytes], now: int) -> None:
        self._unlink(entry, False, now)
        if entry.pins:
            self._doomed[entry.block.key] = entry
        else:
            self._return_bytes(entry)
            freed.append(entry.block.key)

    def _return_bytes(self, entry: Entry) -> None:
        self.used_bytes -= entry.block.size
        if self.accounts is not None:
            self.accounts.discharge(entry)

    def _freed(self, entry: Entry, now: int) -> None:
        """Tell the policy, if a block became free."""
        if entry.free:
            self.policy.freed(entry, now)
            if self.accounts is not None:
                self.accounts.freed(entry)

    def _unlink(self, entry: Entry, evicted: bool, now: int) -> None:
        """Unlink a leaf; its parent inherits its uses."""
        entry.held = False
        del self._held[entry.block.key]
        above = entry.up
        if above is not None:
            above.uses += entry.uses
            above.last = max(above.last, entry.last)
        self.policy.remove(entry, evicted, now)
        if entry.right is not None:
            entry.right.left = entry.left
        if entry.left is not None:
            entry.left.right = entry.right
        elif above is not None:
            above.down = entry.right
        elif entry.block.parent in self._waiting:
            if entry.right is None:
                del self._waiting[entry.block.parent]
            else:
                self._waiting[entry.block.parent] = entry.right
        entry.up = entry.left = entry.right = None
        if above is not None:
            self._freed(above, now)

    # --- pins ---------------------------------------------------------------------------------

    def pin(self, keys: Iterable[bytes]) -> None:
        """Pin held blocks against eviction; raises KeyError, pinning none, if one is not held."""
        entries = [self._held[key] for key in keys]
        for entry in entries:
            entry.pins += 1

    def unpin(self, keys: Iterable[bytes], now: int) -> list[bytes]:
        """Unpin blocks; return keys freed by it. Raises KeyError or ValueError if not pinned."""
        freed = []
        for key in keys:
            entry = self._held.get(key) or self._doomed[key]
            if entry.pins < 1:
                raise ValueError(f"block {key.hex()} is not pinned")
            entry.pins -= 1
            if entry.pins == 0 and not entry.held:
                del self._doomed[key]
                self._return_bytes(entry)
                freed.append(key)
            else:
                self._freed(entry, now)
        return freed

    # --- laws ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise an IntegrityError on a violated invariant."""
        every = [*self._held.values(), *self._doomed.values()]
        used = sum(entry.block.size for entry in every)
        ensure(used == self.used_bytes, f"{used} bytes are held, {self.used_bytes} counted")
        ensure(used <= self.cap_bytes, f"{used} bytes are held, the cap is {self.cap_bytes}")
        if self.accounts is not None:
            self.accounts.check(every)
        for key, entry in self._doomed.items():
            ensure(entry.pins > 0, f"{key.hex()} was dropped, is not pinned, and was not freed")
        for key, entry in self._held.items():
            self._check_place(key, entry)
        due = {(block.expiry, block.key) for block in self.blocks() if block.expiry != NEVER}
        ensure(due <= set(self._expiries), "a block with an expiry is not queued for it")
        children = sum(len(_row(entry.down)) for entry in self._held.values())
        waiting = sum(len(_row(first)) for first in self._waiting.values())
        roots = sum(entry.block.parent == ROOT for entry in self._held.values())
        ensure(
            children + waiting + roots == len(self._held), "a block is not reachable from a root"
        )

    def _check_place(self, key: bytes, entry: Entry) -> None:
        name = key.hex()
        block = entry.block
        ensure(block.key == key, f"{name} leads to another block")
        ensure(entry.pins >= 0, f"{name} has {entry.pins} pins")
        ensure(entry.up is self._held.get(block.parent), f"{name} hangs from a wrong parent")
        orphan = self.rooted and block.parent != ROOT and entry.up is None
        ensure(not orphan, f"{name} is held without its parent")
        for child in _row(entry.down):
            ensure(
                child.up is entry,
                f"{child.block.key.hex()} has no link to its parent {name}",
            )


def _row(first: Entry | None) -> list[Entry]:
    entries = []
    while first is not None:
        entries.append(first)
        first = first.right
    return entries
