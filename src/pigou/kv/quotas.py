"""Quotas of device KV blocks by tenant: a floor that others' floods leave, and a ceiling.

Evicted first are blocks of the tenant most above its ceiling, then the usual victim among tenants
above their floors, then the newcomer's own (`block_pool.victim_queue`). What a tenant does not use
of its floor, others may. Tiers and swapped blocks know no quotas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from pigou.config import ConfigError, KVQuota
from pigou.kv.block_pool import HELD, BlockPool

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
