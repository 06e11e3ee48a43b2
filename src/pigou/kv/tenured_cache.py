"""A cache of artifacts above the engine: within tenure, priced by the byte, with tenant quotas."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pigou.config import KVQuota
from pigou.kv.block import ROOT, Block
from pigou.kv.manifest import Bound, Manifest, ManifestEntry
from pigou.kv.offload import RecomputeCost
from pigou.kv.quotas import EACH_OTHER
from pigou.kv.tenure import Tenured
from pigou.kv.tier import Tier
from pigou.kv.tier_eviction.policy import TierSetting, load
from pigou.request import NEVER

T = TypeVar("T")
_KEY_BYTES = 16
#: Quotas by which no tenant may crowd out the others.
EACH_HALF: Mapping[str, KVQuota] = {EACH_OTHER: KVQuota(ceiling=0.5)}
#: Bytes of an artifact's own records: tenure, keys and entries.
OVERHEAD_BYTES = 1024
#: Blocks of this cost have milliseconds of making for their depth.
_PER_MILLISECOND = RecomputeCost(base=0.0, slope=2e-3)
#: Times of hits kept for each artifact.
_MAX_TIMES = 64


@dataclass(slots=True)
class Held(Generic[T]):
    """An artifact with its cost and hits."""

    bound: Bound
    tenured: Tenured[T]
    size: int
    cost_s: float  # seconds to make it again
    made_at: int  # ns since 1970
    hits: list[int] = field(default_factory=list)  # times of the last ones


class TenuredCache(Generic[T]):
    """Artifacts found by equal tenure and content alone, evicted by value per byte.

    `quotas` are tenants' shares of the bytes (`pigou.kv.quotas`).
    """

    def __init__(
        self, cap_bytes: int, manifest: Manifest, quotas: Mapping[str, KVQuota] = EACH_HALF,
        policy: str = "price",
    ) -> None:  # fmt: skip
        self.manifest = manifest
        self.tier = Tier(
            cap_bytes, load(policy, TierSetting(cap_bytes, _PER_MILLISECOND)), rooted=False
        )
        self.counts: Counter[str] = Counter()  # lookups, hits, stored, refused, stale_hits
        self.saved_s = 0.0  # seconds that hits saved
        self.accounts = self.tier.set_quotas({EACH_OTHER: KVQuota(), **quotas})
        self._held: dict[bytes, Held[T]] = {}
        self._by_tenant: dict[str, OrderedDict[bytes, None]] = {}

    def get(self, bound: Bound, content: bytes, now: int, max_age: int | None = None) -> T | None:
        """Return the artifact made from `content` under an equal tenure; None on a miss."""
        key = bound.tenure.key(content)[:_KEY_BYTES]
        self.counts["lookups"] += 1
        is_held = self.tier.use([Block(key, ROOT, 0, 1)], now) == 1 and self.manifest.holds(bound)
        held = self._held[key] if is_held else None
        artifact = None if held is None else held.tenured.open(bound.tenure, now)
        if artifact is None or held is None or (max_age or NEVER) < now - held.made_at:
            return None
        self.counts["hits"] += 1
        self.saved_s += held.cost_s
        held.hits = [*held.hits[1 - _MAX_TIMES :], now]
        self._by_tenant[bound.tenure.tenant].move_to_end(key)
        return artifact

    def put(
        self, bound: Bound, content: bytes, artifact: T, size: int, cost_s: float, now: int,
        until: int = NEVER,
    ) -> bool:  # fmt: skip
        """Store an artifact; False if its tenure changed or ended meanwhile, or it is not worth it.

        `size` in bytes, `cost_s` the seconds to make it again; it ends at `until`, or its tenure.
        """
        tenant, size = bound.tenure.tenant, size + OVERHEAD_BYTES
        key = bound.tenure.key(content)[:_KEY_BYTES]
        self._forget(self.tier.expire(now))
        if (
            size > self.accounts.bounds(tenant)[1]
            or not self.manifest.holds(bound)
            or bound.tenure.expired(now)
        ):
            self.counts["refused"] += 1
            return False
        self._drop([key], now)
        expiry = min(until, bound.tenure.expiry)
        block = Block(key, ROOT, max(1, round(cost_s * 1e3)), size, expiry, tenant)
        admission = self.tier.admit([block], now)
        self._forget([evicted.key for evicted in admission.evicted])
        if not admission.admitted:
            self.counts["refused"] += 1
            return False
        tenured = Tenured.wrap(artifact, bound.tenure, content)
        self._held[key] = Held(bound, tenured, size, cost_s, now)
        self._by_tenant.setdefault(tenant, OrderedDict())[key] = None
        self.counts["stored"] += 1
        return True

    def held(self, tenant: str) -> Iterator[tuple[bytes, Held[T]]]:
        """Yield a tenant's artifacts by key, least recently used first."""
        for key in list(self._by_tenant.get(tenant, ())):
            yield key, self._held[key]

    def sweep(self, entry: ManifestEntry, changed_at: int, now: int) -> int:
        """Drop what a changed entry voided; count hits since the source changed as stale."""
        gone = [(k, h) for k, h in self.held(entry.tenant) if not self.manifest.holds(h.bound)]
        self.counts["stale_hits"] += sum(at >= changed_at for _, h in gone for at in h.hits)
        self._drop([key for key, _ in gone], now)
        return len(gone)

    def remove(self, key: bytes, now: int) -> None:
        """Drop an artifact by the key that `held` yields."""
        self._drop([key], now)

    def _drop(self, keys: list[bytes], now: int) -> None:
        self._forget(self.tier.drop(keys, now))

    def _forget(self, keys: list[bytes]) -> None:
        for key in keys:
            held = self._held.pop(key)
            tenant = held.bound.tenure.tenant
            del self._by_tenant[tenant][key]
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]
