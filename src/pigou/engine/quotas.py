"""Quotas of KV blocks by tenant in the engine: who is admitted next, and who is preempted.

| a tenant | admission | preemption, eviction |
|---|---|---|
| within its floor | overtakes who waits for blocks; takes lent blocks back | never for others |
| up to its ceiling | in the queue's order | after those above theirs |
| above its ceiling | after all others | first, the most above before others |
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from pigou.config import KVQuota
from pigou.engine.sequence import Sequence, WaitingQueue
from pigou.kv.block_pool import CEILING, FLOOR, HELD, BlockPool
from pigou.kv.prefix_cache import PrefixCache
from pigou.kv.quotas import EACH_OTHER, MAX_ACCOUNTS, quota_of

_key = attrgetter("key")
#: Stands for `entitled` beside lanes.
_ENTITLED = -2


class Accounts:
    """Accounts of a pool's blocks by tenant, within quotas."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        pool.open_accounts(MAX_ACCOUNTS)
        self._rest = pool.nobody - 1  # account of tenants without one of their own
        self._rows: dict[str, int] = {}
        self._quotas: Mapping[str, KVQuota] = {}

    def set(self, quotas: Mapping[str, KVQuota]) -> None:
        """Replace all quotas; blocks stay with their accounts."""
        self._quotas = quotas
        for tenant in dict.fromkeys([*quotas, *self._rows]):
            if tenant != EACH_OTHER:
                self.pool.set_quota(self.row(tenant), *self._bounds(tenant))
        self.pool.set_quota(self._rest, *self._bounds(EACH_OTHER))

    def row(self, tenant: str) -> int:
        """Return a tenant's account."""
        row = self._rows.get(tenant)
        if row is None and (tenant in self._quotas or EACH_OTHER in self._quotas):
            row = self._open(tenant)
        return self._rest if row is None else row

    def _open(self, tenant: str) -> int | None:
        bounds = self._bounds(tenant)
        if len(self._rows) < MAX_ACCOUNTS - 1:
            self._rows[tenant] = self.pool.add_account(*bounds)
            return self._rows[tenant]
        held = self.pool.meta[:, HELD]
        for old, row in self._rows.items():
            if held[row] == 0 and old not in self._quotas:
                del self._rows[old]
                self._rows[tenant] = row
                self.pool.set_quota(row, *bounds)
                return row
        return None

    def _bounds(self, tenant: str) -> tuple[int, int]:
        quota, blocks = quota_of(self._quotas, tenant), self.pool.blocks
        return int(quota.floor * blocks), int(quota.ceiling * blocks)

    def held(self) -> dict[str, int]:
        """Return blocks by tenant; those of tenants without an account as `*`."""
        rows = {EACH_OTHER: self._rest, **self._rows}
        return {tenant: self.pool.meta.item(row, HELD) for tenant, row in rows.items()}


class TenantQuotas:
    """Orders sequences by what their tenants hold."""

    def __init__(self, prefix: PrefixCache, accounts: Accounts, block_size: int) -> None:
        self.accounts = accounts
        self._prefix, self._size = prefix, block_size
        #: By lane and tenant, the first that did not fit, until blocks or rows become free.
        self.blocked: dict[tuple[bool, str], Sequence] = {}
        #: Version of the queue in which nobody was next, by skipped lane, or entitled.
        self._settled: dict[int, int] = {}
        #: Sequence that running ones were preempted for, until it is admitted.
        self.owed: Sequence | None = None

    def account(self, seq: Sequence) -> int:
        """Return the account of a sequence's tenant."""
        return self.accounts.row(seq.request.tenant)

    def block(self, queue: WaitingQueue, seq: Sequence) -> None:
        """Record that a waiting sequence did not fit; its tenant's others wait behind it."""
        self.blocked[queue.is_long(seq), seq.request.tenant] = seq
        self._settled.clear()
        if self.owed is not None and self.owed.request.tenant == seq.request.tenant:
            self.owed = None

    def unblock(self) -> None:
        """Let waiting sequences that did not fit be tried again."""
        self.blocked.clear()
        self._settled.clear()

    def next(self, queue: WaitingQueue, skip: int = -1) -> Sequence | None:
        """Return the waiting sequence to admit next, not of lane `skip`."""
        if self._settled.get(skip) == queue.version:
            return None
        heads = [seq for seq in queue.heads() if skip < 0 or queue.is_long(seq) != skip]
        if self.owed is not None:
            owed = queue.is_long(self.owed), self.owed.request.tenant
            for seq in heads:
                if (queue.is_long(seq), seq.request.tenant) == owed:
                    return seq
            self.owed = None
        lanes = {lane for lane, _ in self.blocked}
        above: Sequence | None = None
        for seq in sorted(heads, key=_key):
            if self._is_blocked(queue, seq):
                continue
            account = self.account(seq)
            if queue.is_long(seq) in lanes and not self._is_within_floor(account, seq):
                continue
            if self._above(account, CEILING) < 0:
                return seq
            above = above or seq
        if above is None:  # until blocks become free, tenants hold no fewer below their floors
            self._settled[skip] = queue.version
        return above

    def entitled(self, queue: WaitingQueue) -> Sequence | None:
        """Return the first sequence within its tenant's floor that did not fit; each once."""
        if self._settled.get(_ENTITLED) == queue.version:
            return None
        for seq in sorted(queue.heads(), key=_key):
            is_blocked = not seq.was_owed and self._is_blocked(queue, seq)
            if is_blocked and self._is_within_floor(self.account(seq), seq):
                return seq
        self._settled[_ENTITLED] = queue.version
        return None

    def victims(self, running: list[Sequence]) -> list[Sequence]:
        """Return the sequences of the tenant most above its ceiling, else of those above floors."""
        accounts = [self.account(seq) for seq in running]
        over = max(accounts, key=lambda account: self._above(account, CEILING))
        if self._above(over, CEILING) > 0:
            return [s for s, account in zip(running, accounts, strict=True) if account == over]
        return self.above_floors(running) or running

    def above_floors(self, running: list[Sequence]) -> list[Sequence]:
        """Return the sequences of tenants above their floors."""
        return [seq for seq in running if self._above(self.account(seq), FLOOR) > 0]

    def set(self, quotas: Mapping[str, KVQuota]) -> None:
        """Replace all quotas."""
        self.accounts.set(quotas)
        self.unblock()

    def _is_blocked(self, queue: WaitingQueue, seq: Sequence) -> bool:
        """True if it, or one before it of its lane and tenant, did not fit."""
        first = self.blocked.get((queue.is_long(seq), seq.request.tenant))
        return first is not None and first.key <= seq.key

    def _above(self, account: int, bound: int) -> int:
        meta = self.accounts.pool.meta
        return meta.item(account, HELD) - meta.item(account, bound)

    def _is_within_floor(self, account: int, seq: Sequence) -> bool:
        """True if a tenant stays within its floor with a waiting sequence's new blocks."""
        room, total = -self._above(account, FLOOR), -(-seq.length // self._size)
        if room >= total or room < max(0, total - len(seq.hashes)):
            return room >= total
        hits = len(self._prefix.match(seq.hashes, len(seq.hashes)).blocks)
        return room >= total - hits
