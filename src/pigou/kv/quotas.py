"""Quotas of memory by tenant: a floor that others' floods leave, and a ceiling.

They are shares of a device's KV blocks (`pigou.engine.quotas`), and of the bytes of a tier or of a
cache above the engine (`ByteAccounts`). Who first wrote a block is charged. Evicted first are
blocks of the tenant most above its ceiling, then the usual victim among tenants above their floors,
then the newcomer's own. What a tenant does not use of its floor, others may. Where all blocks of
tenants above their ceilings are in use, a tier refuses such a tenant's; on the device its requests
wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count

import msgspec

from pigou.config import ConfigError, KVQuota
from pigou.kv.block import Block, Entry, ensure

#: Name of the quota of each tenant that has none of its own.
EACH_OTHER = "*"
#: Most accounts of a pool; beyond, tenants without a quota of their own share one.
MAX_ACCOUNTS = 256
_NONE = KVQuota()


def read_quotas(texts: Iterable[str], where: str = "kv_quotas") -> dict[str, KVQuota]:
    """Read `TENANT=FLOOR:CEILING` of each tenant; raises ConfigError."""
    quotas: dict[str, KVQuota] = {}
    for text in texts:
        tenant, _, shares = text.partition("=")
        floor, colon, ceiling = shares.partition(":")
        try:
            if not colon or tenant in quotas:
                raise ValueError
            quotas[tenant] = msgspec.convert(
                {"floor": floor, "ceiling": ceiling}, KVQuota, strict=False
            )
        except (ValueError, msgspec.ValidationError):
            raise ConfigError(
                f"{where} has {text!r}; write TENANT=FLOOR:CEILING once for each tenant, with "
                "shares from 0 to 1, as acme=0.1:0.5, or *=0:0.5 for each other tenant"
            ) from None
    return quotas


def check_quotas(quotas: Mapping[str, KVQuota], where: str = "kv_quotas") -> None:
    """Raise a ConfigError for floors above ceilings, or above the whole memory together."""
    for tenant, quota in quotas.items():
        if quota.floor > quota.ceiling:
            raise ConfigError(
                f"{where}: {tenant!r} has floor {quota.floor:g} and ceiling {quota.ceiling:g}; "
                "give a floor up to the ceiling"
            )
    if quotas.get(EACH_OTHER, _NONE).floor:
        raise ConfigError(f"{where}: {EACH_OTHER!r} has a floor; give floors to named tenants")
    total = sum(quota.floor for quota in quotas.values())
    if total > 1 + 1e-9:
        raise ConfigError(f"{where}: floors are {total:g} together; they must be 1 at most")


def quota_of(quotas: Mapping[str, KVQuota], tenant: str) -> KVQuota:
    """Return a tenant's quota, or that of each other tenant."""
    return quotas.get(tenant) or quotas.get(EACH_OTHER, _NONE)


@dataclass(slots=True)
class _ByteAccount:
    """Bytes of a tenant, and its free blocks by last use; some of them are free no more."""

    held: int = 0
    blocks: int = 0
    heap: list[tuple[int, int, Entry]] = field(default_factory=list)
    queued: set[Entry] = field(default_factory=set)


class ByteAccounts:
    """Accounts of a tier's bytes by tenant, within quotas; floors are multiples of `unit` bytes."""

    def __init__(self, cap_bytes: int, unit: int = 1) -> None:
        self.cap_bytes, self._unit = cap_bytes, unit
        self.quotas: Mapping[str, KVQuota] = {}
        self.evicted = 0  # blocks of tenants above their ceilings that made room for others
        self.refused = 0  # blocks of tenants above their ceilings, or without room beside floors
        self._accounts: dict[str, _ByteAccount] = {}
        self._number = count()

    def bounds(self, tenant: str) -> tuple[int, int]:
        """Return a tenant's floor and ceiling, in bytes."""
        quota = quota_of(self.quotas, tenant)
        floor = int(quota.floor * self.cap_bytes)
        return floor - floor % self._unit, int(quota.ceiling * self.cap_bytes)

    def held(self) -> dict[str, int]:
        """Return bytes by tenant; those of tenants without an account of their own as `*`."""
        return {tenant: account.held for tenant, account in list(self._accounts.items())}

    def _name(self, tenant: str) -> str:
        few = len(self._accounts) < MAX_ACCOUNTS
        return tenant if few or tenant in self._accounts or tenant in self.quotas else EACH_OTHER

    def charge(self, entry: Entry) -> None:
        """Charge a block to its tenant."""
        entry.account = self._name(entry.block.tenant)
        account = self._accounts.setdefault(entry.account, _ByteAccount())
        account.held += entry.block.size
        account.blocks += 1

    def discharge(self, entry: Entry) -> None:
        """Take a block that is gone from its tenant's account."""
        account = self._accounts[entry.account]
        account.held -= entry.block.size
        account.blocks -= 1
        if not account.blocks:
            del self._accounts[entry.account]
        elif len(account.heap) > 2 * account.blocks + 64:
            account.queued = {one for one in account.queued if one.held}
            account.heap = [(one.last, next(self._number), one) for one in account.queued]
            heapify(account.heap)

    def freed(self, entry: Entry) -> None:
        """Queue a block that may be evicted."""
        account = self._accounts[entry.account]
        if entry.free and entry not in account.queued:
            account.queued.add(entry)
            heappush(account.heap, (entry.last, next(self._number), entry))

    def within_floor(self, blocks: Sequence[Block]) -> set[bytes]:
        """Return which blocks, offered together, their tenants' floors have room for."""
        sizes, keys = Counter[str](), set()
        for block in blocks:
            sizes[block.tenant] += block.size
            if self._room(block.tenant, sizes[block.tenant])[0] >= 0:
                keys.add(block.key)
        return keys

    def _room(self, tenant: str, size: int) -> tuple[int, int]:
        """Return the bytes to a tenant's floor and ceiling that `size` more would leave."""
        name = self._name(tenant)
        held = size + (self._accounts[name].held if name in self._accounts else 0)
        floor, ceiling = self.bounds(name)
        return floor - held, ceiling - held

    def victim(self, newcomer: Block, ask: Callable[[], Entry | None]) -> Entry | None:
        """Return the block to evict for a newcomer, or None to refuse it; `ask` asks the policy."""
        own = self._name(newcomer.tenant)
        to_floor, to_ceiling = self._room(newcomer.tenant, newcomer.size)
        above = {name: one.held - self.bounds(name)[1] for name, one in self._accounts.items()}
        above[own] = -to_ceiling
        for name in sorted((name for name in above if above[name] > 0), key=lambda n: -above[n]):
            if (entry := self._oldest(name)) is not None:
                self.evicted += name != own
                return entry
        if to_ceiling < 0:
            self.refused += 1
            return None
        chosen = ask()
        if chosen is None and to_floor < 0:
            return None  # it is not worth its bytes
        if chosen is None or not self._may_go(chosen):
            oldest = [entry for name in self._accounts if (entry := self._oldest(name)) is not None]
            may_go = [entry for entry in oldest if self._may_go(entry)]
            chosen = min(may_go, key=lambda entry: entry.last, default=None) or self._oldest(own)
        self.refused += chosen is None
        return chosen

    def _may_go(self, entry: Entry) -> bool:
        """True if a block's tenant keeps its floor without it."""
        held = self._accounts[entry.account].held
        return held - entry.block.size >= self.bounds(entry.account)[0]

    def _oldest(self, name: str) -> Entry | None:
        """Return an account's free block that was used least recently."""
        account = self._accounts.get(name)
        while account is not None and account.heap:
            last, _, entry = account.heap[0]
            if entry.free and entry.last == last:
                return entry
            heappop(account.heap)
            account.queued.remove(entry)
            self.freed(entry)  # it may have been used since
        return None

    def check(self, entries: Sequence[Entry]) -> None:
        """Raise an IntegrityError unless accounts are those of the blocks that a tier has."""
        held: Counter[str] = Counter()
        for entry in entries:
            held[entry.account] += entry.block.size
            queued = entry in self._accounts[entry.account].queued
            ensure(queued or not entry.free, f"{entry.block.key.hex()} is free, and not queued")
        ensure(held == self.held(), f"{held} bytes are held, {self.held()} are charged")
