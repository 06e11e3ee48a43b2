"""Which tenants were here lately, and what is in flight of each."""

from __future__ import annotations

from collections import Counter, OrderedDict

from pigou.request import SECOND

#: A tenant counts among those that share the fleet until so long after its last request came or
#: ended.
LINGERS = 10 * SECOND


class Activity:
    """The tenants that share the fleet now, and what each has of it."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._weights = 0.0
        self._streams: Counter[str] = Counter()
        self._total = 0

    def seen(self, tenant: str, weight: float, now: int) -> None:
        """A request of a tenant came, or ended."""
        if len(self._seen) == 1 and tenant in self._seen:  # nobody else shares the fleet
            self._seen[tenant], self._weights = (now, weight), weight
            return
        _, before = self._seen.pop(tenant, (0, 0.0))
        self._seen[tenant] = (now, weight)
        self._weights += weight - before
        while self._seen:
            oldest, (when, gone) = next(iter(self._seen.items()))
            if now - when <= LINGERS:
                break
            del self._seen[oldest]
            self._weights -= gone
        if len(self._seen) == 1:
            self._weights = weight  # no rounding stays behind

    def part(self, tenant: str, weight: float) -> float:
        """Return a tenant's weight over that of all that share the fleet, itself among them."""
        _, before = self._seen.get(tenant, (0, 0.0))
        return weight / max(weight, self._weights - before + weight)

    def began(self, tenant: str, sequences: int = 1) -> None:
        """A request of a tenant was sent to a worker."""
        self._streams[tenant] += sequences
        self._total += sequences

    def ended(self, tenant: str, sequences: int = 1) -> None:
        """A request of a tenant left its worker."""
        self._total -= sequences
        self._streams[tenant] -= sequences
        if not self._streams[tenant]:
            del self._streams[tenant]

    def above(self, tenant: str, weight: float) -> bool:
        """Whether a tenant has more than its part of what is in flight, and others share it."""
        part = self.part(tenant, weight)
        return part < 1.0 and self._streams[tenant] > part * self._total
